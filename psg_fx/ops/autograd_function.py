"""Custom `torch.autograd.Function`s: one opaque op of the captured graph each, with the user's backward kept beside it.

A captured graph would hold what a function's forward computes and lose its backward.  So a call becomes an op of its
own, and differentiation runs the function itself.  `vmap` and `torch.func` need more than most functions offer;
for them its forward and backward are traced into plain ops once their sizes are known.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.autograd import Function
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph.facts import is_differentiable
from psg_fx.graph.same_op import draws
from psg_fx.graph.strides import free_of_strides
from psg_fx.graph.tracing import trace
from psg_fx.ops.define import define_function
from psg_fx.torch_private.modes import no_modes, not_recorded
from psg_fx.torch_private.patching import as_it_is, code_replaced_here

APPLY: FunctionType = vars(Function)["apply"].__func__
"""The method of all of them, whose code is replaced while a model is captured."""
_APPLY = as_it_is(APPLY)
_CALLS: dict[Any, CustomCall] = {}


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom function: arguments that are no tensors are fixed, `call(*tensors)` fills in the others."""

    function: type[Function]
    constants: tuple[tuple[int, Any], ...]
    spec: pytree.TreeSpec
    tensors: int

    def __call__(self, *tensors: torch.Tensor) -> Any:
        fixed, rest = dict(self.constants), iter(tensors)
        count = len(fixed) + self.tensors
        args, named = pytree.tree_unflatten([fixed[i] if i in fixed else next(rest) for i in range(count)], self.spec)
        return _APPLY(self.function, *args, **named)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def fixed(self) -> tuple[Any, ...]:
        """What is not a tensor: the function, and its arguments with their places."""
        return (self.function, self.spec, self.tensors, *itertools.chain(*self.constants))

    def refusal(self, why: str, fix: str = "write the function with ordinary differentiable ops") -> NotYetSupported:
        """The error for a function that cannot be part of a graph."""
        kind = self.function
        return NotYetSupported(
            f"the custom function {self.name} is not supported", where=f"{kind.__module__}.{kind.__qualname__}.apply",
            why=why, fix=fix,
        )  # fmt: skip


def custom_call(target: Any) -> CustomCall | None:
    """The custom function that an op of a graph stands for."""
    return _CALLS.get(target)


def as_one_op(function: type[Function], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """`function.apply(*args, **named)` as one op, which a tracer records as it is."""
    flat, spec = pytree.tree_flatten((args, dict(named)))
    constants = tuple((i, v) for i, v in enumerate(flat) if not isinstance(v, torch.Tensor))
    tensors = [v for v in flat if isinstance(v, torch.Tensor)]
    call = CustomCall(function, constants, spec, len(tensors))
    if any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for _, v in constants):
        raise call.refusal("the batch size is one of its arguments", "let it read the size of a tensor: x.shape[0]")
    op = _define(call, tensors)
    _CALLS[op] = call
    return op(*tensors)


def _define(call: CustomCall, tensors: Sequence[torch.Tensor]) -> Any:
    """A new op `psg_fx_functions::name_k(Tensor, ..) -> Tensor or (Tensor, ..)`."""

    def forward(*given: torch.Tensor) -> Any:
        with torch.no_grad():
            return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if _is_any(t, given) else t, call(*given))

    with not_recorded():  # a tensor that forward makes of a number is fake, like those it is given
        versions = [t._version for t in tensors]
        result = forward(*tensors)
        if versions != [t._version for t in tensors]:
            raise call.refusal("it writes into its input")
    several = isinstance(result, (tuple, list))
    if not all(isinstance(r, torch.Tensor) for r in (result if several else [result])):
        raise call.refusal("it returns something that is not a tensor")
    outputs = f"({', '.join(['Tensor'] * len(result))})" if several else "Tensor"
    return define_function(call.name, len(tensors), outputs, forward)


def _is_any(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def forward_graph(call: CustomCall, values: Sequence[torch.Tensor]) -> GraphModule:
    """(inputs..) -> outputs, on fake tensors, in plain ops."""

    def forward(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return _list(call(*inputs))

    return trace(forward, list(values))


def backward_graph(
    call: CustomCall, values: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], wanted: Sequence[int]
) -> GraphModule:
    """(inputs.., cotangents..) -> the gradients of the inputs `wanted`, on fake tensors, in plain ops."""
    backward = _backward(call, len(values))
    places = [sum(map(is_differentiable, values[:i])) for i in wanted]

    def some(*args: torch.Tensor) -> list[torch.Tensor]:
        found = backward(*args)
        return [found[place] for place in places]

    try:
        traced = trace(some, [*values, *cotangents])
    except RuntimeError as error:
        if "mutating a non-functional tensor" not in str(error):
            raise
        raise call.refusal("its backward writes into a tensor from outside, such as .grad", _BY_RETURN) from error
    traced.graph.eliminate_dead_code()
    return traced


@contextlib.contextmanager
def _without_backward(call: CustomCall) -> Iterator[None]:
    """Refuse a backward that runs another one: it would add to `.grad`, and return nothing of it."""

    def refused(*_: Any, **__: Any) -> Any:
        raise call.refusal("its backward runs a backward pass of its own, which adds to .grad", _BY_RETURN)

    with code_replaced_here(torch.autograd.backward, lambda _: refused):  # `Tensor.backward` calls it
        yield


_BY_RETURN = "give it the parameters as arguments, and return their gradients (torch.autograd.grad computes some)"


def _backward(call: CustomCall, count: int) -> Callable[..., list[torch.Tensor]]:
    def backward(*args: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of each input that can have one."""
        inputs = [t.detach().requires_grad_(is_differentiable(t)) for t in args[:count]]
        with torch.enable_grad():
            outputs = _list(call(*inputs))
        pairs = [(o, g) for o, g in zip(outputs, args[count:], strict=True) if o.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not pairs or not wanted:
            return [torch.zeros_like(t) for t in wanted]
        with _without_backward(call):
            found = torch.autograd.grad(*([o for o, _ in pairs], wanted, [g for _, g in pairs]), materialize_grads=True)
        return list(found)

    return backward


def _list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def differentiable(
    call: CustomCall, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> Callable[..., Any]:
    """The call for inputs of these shapes as a function that `torch.func` and `vmap` understand."""
    with no_modes():
        inputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        forward = free_of_strides(make_fx(lambda *t: _list(call(*t)), tracing_mode="fake")(*inputs))
        outputs = forward(*inputs)
        backward = free_of_strides(make_fx(_backward(call, len(inputs)), tracing_mode="fake")(*inputs, *outputs))
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        if draws(node):
            raise call.refusal("it draws random numbers, and a parameter is among its arguments")
    has_gradient = [is_differentiable(t) for t in inputs]

    class Traced(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(forward(*given))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            found = iter(backward(*ctx.saved_tensors, *cotangents))
            return tuple(next(found) if has else None for has in has_gradient)

    def run(*given: torch.Tensor) -> Any:
        results = _APPLY(Traced, *given)
        return results if len(results) > 1 else results[0]

    return run
