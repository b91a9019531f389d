"""Where code could be another program for a batch of one sample, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass

from psg_fx.errors import NotYetSupported


@dataclass(frozen=True)
class Doubt:
    """Why a graph could give something else than the code for one sample, in the words of a refusal and of a note."""

    what: str
    where: str
    why: str
    fix: str
    note: str

    def refusal(self, at: str = "", does: str = "gives another value") -> NotYetSupported:
        """at: the call that does something else, in these words."""
        there = f", where {at} {does}" if at else ""
        return NotYetSupported(
            f"{self.what} treats a batch of one sample differently", where=self.where,
            why=f"it {self.why}: the loss of a sample is that of a batch of one{there}", fix=self.fix,
        )  # fmt: skip

    def unsaid(self, error: Exception) -> str:
        """The note on code that does not run on one sample, by which nothing is said."""
        return f"{self.where} {self.note}, on which the code does not run ({type(error).__name__}); it is kept"


def squeezed(where: str) -> Doubt:
    """An op keeps the sample dim where the code drops it."""
    return Doubt(
        "squeeze", where, "takes the sample dim of a batch of one, and what follows then means something else",
        "name the dim: x.squeeze(1), or x.flatten(1)", "takes the sample dim of a batch of one",
    )  # fmt: skip


def copied(where: str) -> Doubt:
    """The code writes where a value and its copy are one for some batch sizes only."""
    return Doubt(
        "a write in place", where, "changes a value or its copy, which `contiguous` or `reshape` makes of a batch; of "
        "a batch of one, whose memory needs no copy, the two are one",
        "write it without the underscore, x.contiguous().relu(), or copy by x.clone()",
        "writes where a batch of several has a copy and a batch of one has none",
    )  # fmt: skip


def trimmed(where: str) -> Doubt:
    """The code pads to the longest sample, the graph as far as the input was padded."""
    return Doubt(
        "pad_packed_sequence", where, "pads to the longest sample, which alone is the sample itself, and what follows "
        "depends on how long the padding is",
        "say to what length: pad_packed_sequence(.., total_length=x.shape[1]), which is the same for each sample; or "
        "mask what is beyond the lengths", "pads a batch of one to its own length",
    )  # fmt: skip


__all__ = ["Doubt", "copied", "squeezed", "trimmed"]
