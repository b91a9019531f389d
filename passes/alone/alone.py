"""What may be another program for a batch of one sample: `x.squeeze()` takes the sample dim too, and later dims have
other numbers; `x.contiguous().relu_()` writes into x where that is contiguous as it lies; `pad_packed_sequence(packed)`
pads to the longest sample.

The graph keeps the sample dim, has the copy, and keeps the padding as it was given.  The loss of a sample is by
definition what the code computes for it alone, so where the two could differ the code is run on single samples, and
must give what the graph gives.  Masks, labels and weights of one batch hide what another shows, so every call of torch
on the way must give the same as well, in the code as it is and as it runs on several samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.program.arguments.call import Call
from psg_fx.program.program import Program
from psg_fx.source import locate

from .calls import AsOfSeveral, Calls
from .code import Code, Packed
from .doubts import Doubt, copied, squeezed, trimmed
from .runs import NOISE, all_equal, equal, perturbed, results, undisturbed
from .trimmed import Trimmed


class Alone(Code):
    """Compares a graph with its program on single samples."""

    def __init__(self, program: Program, call: Call, packed: Packed) -> None:
        super().__init__(program, call, packed)
        self.asked = False  # whether the code has been run

    def __call__(self, gm: GraphModule, squeezes: Sequence[Node]) -> str:
        """Refuse a graph that gives something else than the code for one sample; a note where the code does not run so.

        squeezes: the ops of the graph that keep the sample dim where the code drops it.
        """
        self.asked, info = True, facts.graph_facts(gm)
        asked: list[tuple[Callable[[GraphModule, Doubt], str], Doubt]] = []
        if where := locate(squeezes[0]) if squeezes else info.squeezed:
            asked.append((self.single, squeezed(where)))
        if info.written_copy:
            asked.append((self.single, copied(info.written_copy)))
        if info.trims:
            asked.append((lambda gm, doubt: Trimmed(self, gm, doubt).tried(), trimmed(info.trims)))
        if self.call.axes:
            _, first = asked[0]
            raise NotYetSupported(
                f"{first.what} may treat a batch of one sample differently", where=first.where,
                why=f"it {first.why}; of samples that are rows the code is not run on one alone", fix=first.fix,
            )  # fmt: skip
        self.noise = NOISE if self.takes_noise(gm) else 0.0
        return "; ".join(filter(None, (ask(gm, doubt) for ask, doubt in asked)))

    def takes_noise(self, gm: GraphModule) -> bool:
        """Whether the code runs on other values than it was given: labels of 0 and 1 may be checked."""
        inputs = self.sample(0)
        try:
            with undisturbed(inputs), self.packed(True):
                self.run(perturbed(gm, self.program), inputs)
        except Exception:
            return False
        return True

    def single(self, gm: GraphModule, doubt: Doubt) -> str:
        """The graph beside the code, on the first and the last sample alone; and on these with ones for masks, labels
        and other whole numbers, which code may refuse.
        """
        state = perturbed(gm, self.program)
        for index in sorted({0, max(self.call.batch_size() - 1, 0)}):
            inputs = self.sample(index)
            ones = [t if facts.is_differentiable(t) else torch.ones_like(t) for t in inputs]
            error = self.compare(gm, state, inputs, doubt)
            if error is not None:
                return doubt.unsaid(error)
            self.compare(gm, state, ones, doubt)
            for given in (inputs, ones):
                self.compare_calls(state, given, doubt)
        return ""

    def compare(
        self, gm: GraphModule, state: Mapping[str, Tensor], inputs: Sequence[Tensor], doubt: Doubt
    ) -> Exception | None:
        """Refuse what the graph gives otherwise than the code; the error of code that does not run on these inputs, by
        which nothing is said.
        """
        try:
            with undisturbed(inputs):
                found = results(gm, state, inputs)
            with undisturbed(inputs), self.packed(True):
                expected = self.run(dict(state), inputs)[: len(found)]
        except Exception as error:
            return error
        if not all_equal(found, expected):
            raise doubt.refusal()
        return None

    def compare_calls(self, state: dict[str, Tensor], inputs: Sequence[Tensor], doubt: Doubt) -> None:
        """Refuse code of which a call gives something else where squeezes and copies are those of two samples."""
        two = [t if d is None else torch.cat([t, t], d) for t, d in zip(inputs, self.call.dims, strict=True)]
        made, several, alone = AsOfSeveral(), Calls(), Calls()
        try:
            with undisturbed(inputs), self.packed(True), made:
                self.run(state, two)
            with undisturbed(inputs), self.packed(True), made.again(), several, made.memory as memory:
                returned = self.run(state, inputs)
            with undisturbed(inputs), self.packed(True), alone:
                self.run(state, inputs)
        except Exception:  # nothing is said by code that does not run
            return
        if (at := several.other_than(alone, equal)) is not None:
            raise doubt.refusal(at)
        if (at := memory.read_late(returned)) is not None:
            raise doubt.refusal(at, "reads what is written before for a batch of one alone")


__all__ = ["Alone"]
