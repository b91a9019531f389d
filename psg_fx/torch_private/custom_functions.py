"""Calls of custom `torch.autograd.Function`s, by whichever name they are known.

`apply` may have another name (`ste = Ste.apply`) and a class may have one of its own; from torch 2.14 on it is C++.
All of them come to the same C++, which asks the class for `_backward_cls`, makes the context of that, and then asks for
`forward`, and `setup_context` behind it.  So what the class answers then decides what is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionMeta

from psg_fx.torch_private.modes import grad_mode_unseen
from psg_fx.torch_private.patching import patched_here

_APPLY: Any = vars(Function)["apply"]
_WITHOUT_SETUP = Function.setup_context


def without_tracer(value: Any) -> Any:
    """A module among a function's arguments without what a tracer puts around one that has several names: the function
    is called under other tracers, too.
    """
    base: Any = getattr(value, "get_base", None) if isinstance(value, nn.Module) else None
    return value if base is None else base()


def apply(function: type[Function], *args: Any, **named: Any) -> Any:
    """`function.apply(*args, **named)`, of a class that may have written an `apply` of its own."""
    return _APPLY.__get__(None, function)(*args, **named)


@contextlib.contextmanager
def forward_replaced_here(forward: Callable[[type[Function], tuple[Any, ...]], Any]) -> Iterator[None]:
    """While open, where a custom function is applied in this thread, `forward(function, arguments)` is run in place of
    its `forward` and `setup_context`, with gradients enabled where the caller has them.  Functions that are applied
    meanwhile are as they are.
    """
    calls = _Calls(forward)

    def looked_up(cls: Any, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        return calls.look_up(cls, name, found) if name in _ASKED and not calls.running else found

    with patched_here(FunctionMeta, "__getattribute__", looked_up):
        yield


_ASKED = ("_backward_cls", "forward", "setup_context")


class _Calls:
    """Where C++ is, in the calls of one thread."""

    def __init__(self, forward: Callable[[type[Function], tuple[Any, ...]], Any]) -> None:
        self.forward, self.running = forward, False
        self._begun: type[Function] | None = None
        self._run: type[Function] | None = None
        self._grad = True

    def look_up(self, cls: Any, name: str, found: Any) -> Any:
        """What C++ finds in place of `found`."""
        if name == "_backward_cls":
            self._grad = torch.is_grad_enabled()
            self._begun = cls if issubclass(cls, Function) else None  # torch.func makes classes that are none
        elif name == "forward" and self._begun is cls:
            self._begun = None
            return lambda *given: self._instead(cls, given)
        elif name == "setup_context" and self._run is cls:
            self._run = None
            return lambda *given: None
        return found

    def _instead(self, cls: Any, given: tuple[Any, ...]) -> Any:
        has_setup = type.__getattribute__(cls, "setup_context") is not _WITHOUT_SETUP
        self.running = True
        try:
            with grad_mode_unseen(self._grad):
                result = self.forward(cls, given if has_setup else given[1:])
        finally:
            self.running = False
        self._run = cls if has_setup else None
        return result
