"""The model's state, read at every call: parameters, buffers, and everything a capture depends on."""

from __future__ import annotations

import fnmatch
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from psg_fx.errors import BadArgument, NotYetSupported, first_line
from psg_fx.program.values import Once

IN_PLACE = threading.RLock()
"""Held by a capture while tensors of its own lie in the places of a model's parameters and buffers, and by whoever
reads those places: another thread's capture may be of the same model."""


def _in_a_forked_child() -> None:
    """A thread that captured is not there, and would hold the lock for ever."""
    if not IN_PLACE._is_owned():  # type: ignore[attr-defined]
        IN_PLACE._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)

ParamFilter = None | str | Iterable[str] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Tracked:
    """Which parameters are asked.

    aliases: every name of each -> the canonical (first) name; frozen ones are left out.  shapes: by canonical name, in
    the model's order.
    """

    aliases: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @functools.cached_property
    def key(self) -> Hashable:
        """What of it a captured graph depends on."""
        return Once(tuple(self.aliases.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, in the model's order."""
        return tuple(self.shapes)


def tracked_parameters(model: nn.Module, params: ParamFilter) -> Tracked:
    """Apply `params=` to the model.  Every glob must match something."""
    first: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        first.setdefault(id(parameter), name)
    wanted = _wanted(named, params)
    ids = {id(p) for name, p in named if p.requires_grad and name in wanted}
    aliases = {name: first[id(p)] if id(p) in ids else "" for name, p in named}
    if not any(aliases.values()):
        raise BadArgument(
            "no parameter is asked for", where="transform(params=...)",
            why="no parameter of the model requires gradients" if params is None
            else f"params={params!r} leaves none that requires gradients",
            fix="set requires_grad on some parameters, or widen params=; where none is wanted, call the model itself",
        )  # fmt: skip
    return Tracked(aliases, {name: tuple(p.shape) for name, p in named if aliases[name] == name})


def refuse_hooks(model: nn.Module, tracked: Tracked) -> None:
    """Refuse hooks on gradients of parameters that are asked."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if tracked.aliases[name] and parameter._backward_hooks:
            raise NotYetSupported(
                f"{name} has a hook on its gradient", where=f"{name}.register_hook",
                why="a hook may change the gradient, and a compiled step would not call it",
                fix="remove the hook, and apply it to what the step returns",
            )  # fmt: skip


def _wanted(named: Sequence[tuple[str, nn.Parameter]], params: ParamFilter) -> set[str]:
    if params is None:
        return {name for name, _ in named}
    if callable(params):
        try:
            return {name for name, parameter in named if params(name, parameter)}
        except TypeError as error:
            raise BadArgument(
                "params= cannot be asked of each parameter", where="transform(params=...)", why=first_line(error),
                fix="give a function of a name and a parameter: params=lambda name, parameter: ...",
            ) from error  # fmt: skip
    globs = [params] if isinstance(params, str) else list(params)
    found: set[str] = set()
    for glob in globs:
        matched = {name for name, _ in named if fnmatch.fnmatchcase(name, glob)}
        if not matched:
            listed = ", ".join(name for name, _ in named[:8]) + (", ..." if len(named) > 8 else "")
            raise BadArgument(
                f"params={glob!r} matches no parameter", where="transform(params=...)", why=f"the model has {listed}",
                fix="use names of model.named_parameters(), with * and ? as in file names",
            )  # fmt: skip
        found |= matched
    return found


def holder(model: nn.Module, loss_fn: Any, target: str) -> tuple[dict[str, Any], str]:
    """The dict that holds the parameter or buffer `target` ("model.fc.weight"), and its key there."""
    head, _, rest = target.partition(".")
    root: nn.Module = model if head == "model" else loss_fn
    path, _, name = rest.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if name in owner._parameters else owner._buffers), name
