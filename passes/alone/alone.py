"""What may be another program for a batch of one sample: `x.squeeze()` takes the sample dim too, and later dims have
other numbers; `x.contiguous().relu_()` writes into x where that is contiguous as it lies; `pad_packed_sequence(packed)`
pads to the longest sample.

The graph keeps the sample dim, has the copy, and keeps the padding as it was given.  The loss of a sample is by
definition what the code computes for it alone, so where the two could differ the code is run on single samples, and
must give what the graph gives.  Masks, labels and weights of one batch hide what another shows, so every call of torch
on the way must give the same as well, in the code as it is and as it runs on several samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import kept_in
from psg_fx.program.program import Program
from psg_fx.reference.state import called_with
from psg_fx.torch_private.modes import autocast_now

from .calls import AsOfSeveral, Calls
from .doubts import Doubt, copied, squeezed, trimmed
from .runs import NOISE, WithoutDropout, equal, one_of, perturbed, results, same_beginning, undisturbed

Packed = Callable[[bool], contextlib.AbstractContextManager[Any]]

_LOOKED_AT, _SHORTER, _STATES = 64, 3, 4
"""Samples of a batch among which some are looked for that are shorter than their padding; with how many parameters."""


@dataclass(frozen=True)
class Padded:
    """What a program returns, what its calls of torch gave, and whether it trimmed a padding."""

    returned: list[Tensor]
    calls: Calls
    shorter: bool


class Alone:
    """Compares a graph with its program on single samples, under the autocast of the capture."""

    def __init__(self, program: Program, call: Call, packed: Packed) -> None:
        """packed: opens what packed sequences are in a capture, with paddings as they were or trimmed (True)."""
        self.program, self.call, self.packed = program, call, packed
        self.asked = False  # whether the code has been run
        self.casts = autocast_now()
        self.noise = NOISE

    def __call__(self, gm: GraphModule, squeezes: Sequence[Node]) -> str:
        """Refuse a graph that gives something else than the code for one sample; a note where the code does not run so.

        squeezes: the ops of the graph that keep the sample dim where the code drops it.
        """
        self.asked, info = True, facts.graph_facts(gm)
        asked: list[tuple[Callable[[GraphModule, Doubt], str], Doubt]] = []
        if squeezes:
            asked.append((self.single, squeezed(squeezes[0])))
        if info.written_copy:
            asked.append((self.single, copied(info.written_copy)))
        if info.trims:
            asked.append((self.shorter, trimmed(info.trims)))
        if self.call.axes:
            _, first = asked[0]
            raise NotYetSupported(
                f"{first.what} may treat a batch of one sample differently", where=first.where,
                why=f"it {first.why}; of samples that are rows the code is not run on one alone", fix=first.fix,
            )  # fmt: skip
        self.noise = NOISE if self.takes_noise(gm) else 0.0
        return "; ".join(filter(None, (ask(gm, doubt) for ask, doubt in asked)))

    def sample(self, index: int) -> list[Tensor]:
        """A sample alone."""
        pairs = zip(self.call.tensors, self.call.dims, strict=True)
        return [one_of(t, d, index, self.noise) for t, d in pairs]

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
        and other whole numbers.
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
        if not _all_equal(found, expected):
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

    def shorter(self, gm: GraphModule, doubt: Doubt) -> str:
        """The code with paddings as they are given, as the graph has them, beside the code as it is, on samples alone
        that are shorter.  With several parameters: a padding may win a maximum for some of them only.
        """
        chosen: list[list[Tensor]] = []
        count = sum(spec.kind in ("loss", "output") for spec in facts.graph_facts(gm).outputs)
        state = perturbed(gm, self.program)
        for inputs, is_cut in self.samples():
            if len(chosen) == _SHORTER or (is_cut and chosen):
                break
            try:
                padded, trimmed = (self.padded(state, inputs, trims) for trims in (False, True))
            except Exception as error:
                if is_cut:  # other inputs are as long as it was
                    break
                return doubt.unsaid(error)
            if trimmed.shorter:
                _require_alike(padded, trimmed, count, doubt)
                chosen.append(inputs)
        for seed in range(1, _STATES):
            state = perturbed(gm, self.program, seed)
            for inputs in chosen:
                try:
                    padded, trimmed = (self.padded(state, inputs, trims) for trims in (False, True))
                except Exception:  # such parameters are not in its domain
                    continue
                _require_alike(padded, trimmed, count, doubt)
        if chosen:
            return f"{doubt.where} {doubt.note}; that this does not matter was found by trying it out"
        raise NotYetSupported(
            f"{doubt.what} without a total_length, and no sample of the first batch is shorter", where=doubt.where,
            why="alone, a sample is padded to its own length, and whether that matters is seen of a shorter one only",
            fix=doubt.fix,
        )  # fmt: skip

    def samples(self) -> Iterator[tuple[list[Tensor], bool]]:
        """Some samples of the batch, each alone; then those that are packed inputs with half of their steps (True)."""
        size, some = self.call.batch_size(), []
        for index in range(0, size, max(-(-size // _LOOKED_AT), 1)):
            some.append(self.sample(index))
            yield some[-1], False
        for inputs in some:
            lengths = {id(kept.lengths) for kept in kept_in(self.call.rebuild(inputs))}
            if lengths:
                yield [(t + 1) // 2 if id(t) in lengths else t for t in inputs], True

    def padded(self, state: dict[str, Tensor], inputs: Sequence[Tensor], trims: bool) -> Padded:
        """The program without dropout, which draws by places."""
        with undisturbed(inputs), self.packed(trims) as padding, WithoutDropout(), Calls() as calls:
            return Padded(self.run(state, inputs), calls, padding.shorter)

    def run(self, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the program returns; what is known of it stays what its capture has found."""
        program, given = self.program.like(), ([t.clone() for t in inputs],)
        with contextlib.ExitStack() as stack:
            stack.enter_context(program.stand_ins.expected(program))
            for kind, dtype in self.casts.items():
                stack.enter_context(torch.autocast(kind, dtype))
            found = called_with(program, state, given, tie_weights=False)
        return [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]


def _require_alike(padded: Padded, trimmed: Padded, count: int, doubt: Doubt) -> None:
    """Refuse what a padding changes; of what is returned, so many are losses or outputs."""
    if not _all_equal(padded.returned[:count], trimmed.returned[:count]):
        raise doubt.refusal()
    if (at := padded.calls.other_than(trimmed.calls, same_beginning, longer=True)) is not None:
        raise doubt.refusal(at)


def _all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(equal, found, expected))


__all__ = ["Alone"]
