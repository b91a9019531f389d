"""The user's own backward passes: those of custom functions are kept, hooks of modules on gradients are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from psg_fx.errors import NotYetSupported
from psg_fx.ops.of_users.custom_call import as_one_op
from psg_fx.program.code import names_of
from psg_fx.program.reads.observed import Observed
from psg_fx.torch_private.custom_functions import forward_replaced_here
from psg_fx.torch_private.export import BackwardHookFunction, without_reentrant_checkpoints
from psg_fx.torch_private.patching import patched_here

from ..unseen import line_of_call
from .writes import unwatched


@contextlib.contextmanager
def keep_custom_backward(observed: Observed) -> Iterator[None]:
    """Custom autograd functions become ops of their own: export would follow their forward and drop their backward."""

    def forward(cls: type[torch.autograd.Function], given: tuple[Any, ...]) -> Any:
        _require_plain(cls, given)
        observed.functions([cls.forward, cls.backward, cls.setup_context])
        with unwatched(given) as wrote:
            return as_one_op(cls, given, observed.calls.append, wrote, line_of_call(cls.apply))

    def hooked(cls: Any, *given: Any) -> Any:
        raise NotYetSupported(
            "a module has a backward hook", where="register_full_backward_hook",
            why="a captured graph has no modules, and the hook may change the gradient",
            fix="remove it; where it changes the gradient, let a forward hook of the module put it on what it is given "
            "or returns, by tensor.register_hook; of a model in Opacus' GradSampleModule take model._module, of one "
            "in BackPACK's extend() the model before it",
        )  # fmt: skip

    with (
        forward_replaced_here(forward),
        without_reentrant_checkpoints(),
        patched_here(BackwardHookFunction, "apply", classmethod(hooked)),
    ):
        yield


def _require_plain(cls: type[torch.autograd.Function], arguments: Sequence[Any]) -> None:
    """Refuse a function that asks for what only the user's own tensors are or have: in the graph it has others."""
    codes = [f.__code__ for f in (cls.forward, cls.backward, cls.setup_context) if isinstance(f, FunctionType)]
    names = [names_of(code) for code in codes]
    asked = frozenset().union(*(n.attributes | n.read for n in names))
    for tensor in (a for a in arguments if isinstance(a, torch.Tensor)):
        if found := sorted(asked & vars(tensor).keys()):
            raise NotYetSupported(
                f"the custom function {cls.__name__} reads {found[0]} of a tensor", where=cls.__qualname__,
                why="it is an op of the graph, whose tensors have no attributes of their own",
                fix="read the attribute outside, and pass its value as an argument",
            )  # fmt: skip
        if isinstance(tensor, nn.Parameter) and "Parameter" in asked:
            raise NotYetSupported(
                f"the custom function {cls.__name__} asks whether a tensor is a Parameter", where=cls.__qualname__,
                why="it is an op of the graph, whose tensors are all alike",
                fix="ask outside, and pass the answer as an argument",
            )  # fmt: skip
