"""What code sets up in its first forward pass, and leaves alone in all others: hooks on modules, and what says so.

An ordinary forward leaves them there once.  So does a capture: it keeps them, and begins anew with the model as it is
then.  Hooks that are added at every call are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psg_fx.errors import NotYetSupported
from psg_fx.program.changes.holders import REGISTER, Holder, Hooks
from psg_fx.program.code import line_naming
from psg_fx.program.objects import MISSING
from psg_fx.program.reads.observed import Observed


class Hooked(NotYetSupported):
    """The code has added hooks to modules: it may have set itself up."""

    def as_known(self) -> NotYetSupported:
        """The error as users know it."""
        return NotYetSupported(self.what, where=self.where, why=self.why, fix=self.fix)


@dataclass(frozen=True)
class SetUp:
    """Hooks that the code has added, and the flags that it has set meanwhile."""

    changes: Sequence[tuple[Holder, Any, Any]] = ()

    def keep(self) -> None:
        """All is as the code has left it."""
        for holder, key, value in self.changes:
            holder.put(key, value)

    def undo(self) -> None:
        """All is as it was before."""
        for holder, _, _ in self.changes:
            holder.write(holder.before)


def set_up(changes: Sequence[tuple[Holder, Any]]) -> SetUp:
    """Of what the code has changed, what it need not change again; nothing if it has added no hooks."""
    if not any(holder.kind is Hooks and now.keys() - holder.before.keys() for holder, now in changes):
        return SetUp()
    return SetUp([
        (holder, key, value)
        for holder, now in changes if holder.keyed
        for key, value in now.items()
        if holder.before.get(key, MISSING) is not value and (holder.kind is Hooks or isinstance(value, bool))
    ])  # fmt: skip


def hooked(found: SetUp, observed: Observed) -> Hooked:
    """The error that says so."""
    label = next(holder.label for holder, _, _ in found.changes if holder.kind is Hooks)
    return Hooked(
        f"the code changes the {label}", where=line_naming(iter(observed.code), REGISTER) or label,
        why="it does so in every forward pass, and a graph runs no Python",
        fix="register hooks before the step is made; or once, and keep in an attribute that it is done",
    )  # fmt: skip
