"""What code sets up in its first forward pass: it adds hooks to modules, or takes some off, and remembers that it has.

An ordinary forward leaves that there once.  So does a capture: it keeps all that such a run has changed, but tensors,
which every call stores, and captures anew with the model as it is then.  The two must be one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.changes.holders import REGISTER, Holder, Hooks
from psg_fx.program.changes.reached import Reached
from psg_fx.program.code import line_naming
from psg_fx.program.objects import MISSING
from psg_fx.program.reads.observed import Observed
from psg_fx.torch_private.fakes import FakeTensor


@dataclass(frozen=True)
class Kept:
    """What a holder had after the run, and what of it stays there."""

    holder: Holder
    now: Any
    held: Any


@dataclass(frozen=True)
class SetUp:
    """What a run has changed for good; nothing where it has left hooks alone."""

    kept: Sequence[Kept] = ()

    def keep(self) -> None:
        """All is as the code has left it."""
        for one in self.kept:
            one.holder.write(one.held)

    def undo(self) -> None:
        """All is as it was before."""
        for one in self.kept:
            one.holder.write(one.holder.before)

    def keeps(self, holder: Holder, key: Any = None) -> bool:
        """Whether a change stays: the one of a key, or of a list."""
        one = next((one for one in self.kept if one.holder is holder), None)
        if one is None or not isinstance(one.now, dict):
            return one is not None
        return one.held.get(key, MISSING) is one.now.get(key, MISSING)

    def refused(self, observed: Observed, why: str) -> NotYetSupported:
        """The error that says why such a program is refused."""
        label = next(one.holder.label for one in self.kept if one.holder.kind is Hooks)
        return NotYetSupported(
            f"the code changes the {label}", where=line_naming(iter(observed.code), REGISTER) or label, why=why,
            fix="call the model once before the first call of the step: what it sets up is there then; or register "
            "hooks outside of forward",
        )  # fmt: skip


EVERY_CALL = "it does so in every forward pass, and a graph runs no Python"
ANOTHER = "its first forward pass computes something else than the next one does, and a step has one graph for both"
_TENSORS = "it keeps tensors of that forward pass in an object, and a graph has others at every call"


def set_up(changes: Sequence[tuple[Holder, Any]], observed: Observed) -> SetUp:
    """Of what the code has changed, what it need not change again; nothing if it has left hooks alone.

    Raises:
        NotYetSupported: among it are objects that hold tensors of the capture.
    """
    if not any(holder.kind is Hooks for holder, _ in changes):
        return SetUp()
    kept = SetUp([Kept(holder, now, _without_tensors(holder, now)) for holder, now in changes if _stays(now)])
    objects = [value for one in kept.kept for value in _new(one)]
    if any(isinstance(t, FakeTensor) for t in Reached(objects, with_tensors=True).tensors):
        raise kept.refused(observed, _TENSORS)
    return kept


def _stays(now: Any) -> bool:
    """A list that grows by tensors of this call does not."""
    return isinstance(now, dict) or not any(map(_has_tensors, now))


def _without_tensors(holder: Holder, now: Any) -> Any:
    """What a holder has now, but values with tensors: in their place what was there before."""
    if not isinstance(now, dict):
        return now
    before = holder.before
    found = {
        key: before.get(key, MISSING) if before.get(key, MISSING) is not value and _has_tensors(value) else value
        for key, value in now.items()
    }
    return {key: value for key, value in found.items() if value is not MISSING}


def _new(one: Kept) -> list[Any]:
    """The values that stay and were not there before."""
    if not isinstance(one.held, dict):
        return list(one.held)
    return [value for key, value in one.held.items() if one.holder.before.get(key, MISSING) is not value]


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, (torch.Tensor, torch.SymInt)) for leaf in pytree.tree_leaves(value))
