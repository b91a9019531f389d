"""Code that pads to the longest sample, on samples that alone are shorter than their padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.program.arguments.packed import kept_in

from .calls import Calls
from .code import Code
from .doubts import Doubt
from .lengths import Sizes, cut, fewer
from .runs import WithoutDropout, all_equal, perturbed, same_beginning, undisturbed

_SHORTER, _STATES = 3, 4
"""How many samples are tried as they are; with how many parameters."""


@dataclass(frozen=True)
class Padded:
    """What a program returns, what its calls of torch gave, and to what it padded."""

    returned: list[Tensor]
    calls: Calls
    sizes: Sizes


class Trimmed:
    """Compares code that pads as its input is, as its graph has it, with the code as it is."""

    def __init__(self, code: Code, gm: GraphModule, doubt: Doubt) -> None:
        self.code, self.gm, self.doubt = code, gm, doubt
        self.count = sum(spec.kind in ("loss", "output") for spec in facts.graph_facts(gm).outputs)

    def tried(self) -> str:
        """Refuse what a padding changes, of samples that are shorter, as they are and cut to fewer steps; or a note.
        With several parameters: a padding may win a maximum for some of them only.
        """
        state, chosen = perturbed(self.gm, self.code.program), []
        longest: tuple[tuple[bool, int], list[Tensor], Sizes] = ((False, 0), [], ())
        for inputs in self.code.samples():
            sizes = self.compared(state, inputs)
            if isinstance(sizes, Exception):
                return self.doubt.unsaid(sizes)
            if _is_shorter(sizes):
                chosen.append(inputs)
            steps = max((own for _, own in sizes), default=0)
            longest = max(longest, ((_is_shorter(sizes), steps), inputs, sizes), key=lambda each: each[0])
            if len(chosen) == _SHORTER:
                break
        for inputs in self.cut(*longest):
            sizes = self.compared(state, inputs)
            if not isinstance(sizes, Exception) and _is_shorter(sizes):  # other inputs may be as long as it was
                chosen.append(inputs)
        if not chosen:
            raise self.unseen()
        for seed in range(1, _STATES):
            state = perturbed(self.gm, self.code.program, seed)
            for inputs in chosen[: _SHORTER + 1]:
                self.compared(state, inputs)  # or they are not in its domain
        return f"{self.doubt.where} {self.doubt.note}; that this does not matter was found by trying it out"

    def cut(self, rank: tuple[bool, int], inputs: Sequence[Tensor], sizes: Sizes) -> Iterator[list[Tensor]]:
        """A sample with fewer steps.  Of one that fills its padding only where it is packed: what padding is there
        elsewhere is not known.  rank: whether it is shorter, and its steps.
        """
        is_shorter, steps = rank
        packed = [kept.lengths for kept in kept_in(self.code.call.rebuild(inputs))] if inputs else []
        if packed or is_shorter:
            yield from (cut(inputs, sizes, fewest, packed) for fewest in fewer(steps))

    def compared(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Sizes | Exception:
        """The paddings of a run on these inputs, in which trimming them changes nothing; the error of code that does
        not run.
        """
        try:
            padded, trimmed = (self.padded(state, inputs, trims) for trims in (False, True))
        except Exception as error:
            return error
        if not all_equal(padded.returned[: self.count], trimmed.returned[: self.count]):
            raise self.doubt.refusal()
        if (at := padded.calls.other_than(trimmed.calls, same_beginning, longer=True)) is not None:
            raise self.doubt.refusal(at)
        return trimmed.sizes

    def padded(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], trims: bool) -> Padded:
        """The program without dropout, which draws by places."""
        with undisturbed(inputs), self.code.packed(trims) as padding, WithoutDropout(), Calls() as calls:
            return Padded(self.code.run(dict(state), inputs), calls, padding.sizes)

    def unseen(self) -> NotYetSupported:
        """The refusal of what no sample shows."""
        return NotYetSupported(
            f"{self.doubt.what} without a total_length, and no sample of the first batch is shorter",
            where=self.doubt.where,
            why="alone, a sample is padded to its own length, and whether that matters is seen of a shorter one only",
            fix=self.doubt.fix,
        )  # fmt: skip


def _is_shorter(sizes: Sizes) -> bool:
    return any(own < padded for padded, own in sizes)


__all__ = ["Trimmed"]
