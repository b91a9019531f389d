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
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd import Function
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph.facts import is_differentiable
from psg_fx.graph.same_op import draws
from psg_fx.graph.strides import free_of_strides
from psg_fx.graph.tracing import trace
from psg_fx.ops.define import define_function
from psg_fx.ops.of_users.argument_objects import are_the_same, held_by
from psg_fx.ops.of_users.argument_sizes import has_symbols, of_call, without_symbols
from psg_fx.tensors import SYMBOLS
from psg_fx.torch_private.custom_functions import apply
from psg_fx.torch_private.modes import autocast_now, autocast_unseen, no_modes, not_recorded
from psg_fx.torch_private.patching import code_replaced_here

_CALLS: WeakValueDictionary[Any, CustomCall] = WeakValueDictionary()
"""Of each op, as long as somebody keeps the call: it may hold the model, as an argument of the function."""


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom function: arguments that are no tensors are fixed, `call(*tensors)` fills in the others.

    needs: which of the tensors require a gradient in the program (`ctx.needs_input_grad`).  casts: its autocast.
    """

    function: type[Function]
    constants: tuple[tuple[int, Any], ...]
    spec: pytree.TreeSpec
    needs: tuple[bool, ...]
    casts: Mapping[str, torch.dtype]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Its result: a tensor, or a tuple of several."""
        found = [v for v in _list(self.result(tensors)) if isinstance(v, torch.Tensor)]
        return found[0] if len(found) == 1 else tuple(found)

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Its result as it returns it."""
        args = self._filled(tensors)
        before = held_by(args)
        with autocast_unseen(self.casts):
            result = apply(self.function, *args)
        if not are_the_same(before, held_by(args)):
            raise self.refusal("it changes a list, a dict or an object among its arguments", "return what it finds")
        return result

    def under_autograd(self, *tensors: torch.Tensor) -> Any:
        """`call(*tensors)` where the parameters among them, which do not require gradients here, are said to."""
        return self(*(t.detach().requires_grad_() if n and not t.requires_grad else t
                      for n, t in zip(self.needs, tensors, strict=True)))  # fmt: skip

    def _filled(self, tensors: Sequence[Any]) -> list[Any]:
        fixed = {i: of_call(kept, tensors) for i, kept in self.constants}
        rest = iter(tensors)
        count = len(fixed) + len(self.needs)
        args: list[Any] = pytree.tree_unflatten(
            [fixed[i] if i in fixed else next(rest) for i in range(count)], self.spec
        )
        return args

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def title(self) -> str:
        """What it is for the user, who may have written something else."""
        names: tuple[str, str] | None = getattr(self.function, "_psg_fx_names", None)
        return names[0] if names else f"the custom function {self.name}"

    @property
    def fixed(self) -> tuple[Any, ...]:
        """What is not a tensor: the function, and its arguments with their places."""
        return (self.function, self.spec, self.needs, *itertools.chain(*self.constants, *self.casts.items()))

    def refusal(self, why: str, fix: str = "write the function with ordinary differentiable ops") -> NotYetSupported:
        """The error for a function that cannot be part of a graph."""
        kind = self.function
        _, where = getattr(kind, "_psg_fx_names", ("", f"{kind.__module__}.{kind.__qualname__}.apply"))
        return NotYetSupported(f"{self.title} is not supported", where=where, why=why, fix=fix)


def custom_call(target: Any) -> CustomCall | None:
    """The custom function that an op of a graph stands for."""
    return _CALLS.get(target)


def as_one_op(function: type[Function], args: Sequence[Any], keep: Callable[[CustomCall], None]) -> Any:
    """`function.apply(*args)` as one op, which a tracer records as it is.

    keep: is given the call, which must live as long as graphs with the op.
    """
    flat, spec = _flattened(list(args))
    inputs = [v for v in flat if isinstance(v, torch.Tensor)]
    others = ((i, v) for i, v in enumerate(flat) if not isinstance(v, torch.Tensor))
    constants = tuple((i, without_symbols(v, inputs)) for i, v in others)
    needs = tuple(t.requires_grad and is_differentiable(t) for t in inputs)
    call = CustomCall(function, constants, spec, needs, autocast_now())
    if any(has_symbols(kept) for _, kept in constants):
        raise call.refusal(
            "a number made of the batch size is among its arguments", "let it read the size of a tensor: x.shape[0]"
        )
    result = _first_result(call, inputs)
    outputs = _list(result)
    _check_outputs(call, outputs)
    count = sum(isinstance(v, torch.Tensor) for v in outputs)
    op = define_function(call.name, len(inputs), _schema(count), lambda *given: _forward(_CALLS[op], given))
    _CALLS[op] = call
    keep(call)
    made = op(*inputs)
    rest = iter([made] if count == 1 else made)
    found = tuple(next(rest) if isinstance(v, torch.Tensor) else v for v in outputs)
    return found if isinstance(result, tuple) else found[0]


def _flattened(args: list[Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """A shape is one argument: what `pytree` would put together again is a tuple."""
    return pytree.tree_flatten(args, is_leaf=lambda value: isinstance(value, torch.Size))


def _check_outputs(call: CustomCall, outputs: Sequence[Any]) -> None:
    for value in outputs:
        inside = [] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
        if any(isinstance(v, torch.Tensor) for v in inside):
            raise call.refusal("it returns a tensor within something else", "return all tensors in one tuple")
        if any(isinstance(v, SYMBOLS) for v in inside):
            raise call.refusal("it returns the batch size", "take it of a tensor, outside: x.shape[0]")
    tensors = [id(v) for v in outputs if isinstance(v, torch.Tensor)]
    if not tensors:
        raise call.refusal("it returns no tensor")
    if len(set(tensors)) < len(tensors):
        raise call.refusal("it returns one tensor twice", "return it once")


def _schema(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _first_result(call: CustomCall, tensors: Sequence[torch.Tensor]) -> Any:
    with not_recorded(), torch.no_grad():  # a tensor that forward makes of a number is fake, like those it is given
        versions = [t._version for t in tensors]
        result = call.result(tensors)
        if versions != [t._version for t in tensors]:
            raise call.refusal("it writes into its input")
    return result


def _forward(call: CustomCall, given: Sequence[torch.Tensor]) -> Any:
    """What the op `psg_fx_functions::name_k(Tensor, ..) -> Tensor or (Tensor, ..)` computes."""
    with torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if _is_any(t, given) else t, call(*given))


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
    needs = [i in wanted or (need and is_differentiable(values[i])) for i, need in enumerate(call.needs)]
    backward, places = _backward(call, needs), [sum(needs[:i]) for i in wanted]

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
    if any(n.args[0].op == "placeholder" for n in traced.graph.find_nodes(op="call_function", target=_COPY)):
        raise call.refusal("its backward writes into a tensor that it is given", "let it return new ones")
    return traced


_COPY = torch.ops.aten.copy_.default


@contextlib.contextmanager
def _without_backward(call: CustomCall) -> Iterator[None]:
    """Refuse a backward that runs another one: it would add to `.grad`, and return nothing of it."""

    def refused(*_: Any, **__: Any) -> Any:
        raise call.refusal("its backward runs a backward pass of its own, which adds to .grad", _BY_RETURN)

    with code_replaced_here(torch.autograd.backward, lambda _: refused):  # `Tensor.backward` calls it
        yield


@contextlib.contextmanager
def _own_gradients_told(call: CustomCall) -> Iterator[None]:
    """Refuse a backward that differentiates what was computed outside of it, or by tensors that are others here; or
    that is kept what torch does not give back.
    """
    try:
        yield
    except RuntimeError as error:
        if "created in no_grad mode" in str(error):
            raise call.refusal(
                "its forward writes into a view and keeps it for the backward, which torch does not give back here",
                "keep a copy: ctx.save_for_backward(view.clone())",
            ) from error
        if not any(text in str(error) for text in ("does not require grad", "not have been used in the graph")):
            raise
        raise call.refusal(
            "its backward calls torch.autograd.grad, and is recorded apart from the forward: a value that is "
            "differentiated, or a parameter that it is differentiated by, is not the same tensor there",
            "compute what is differentiated inside of it, under torch.enable_grad(), from its own arguments alone",
        ) from error


_BY_RETURN = "give it the parameters as arguments, and return their gradients (torch.autograd.grad computes some)"


def _backward(
    call: CustomCall, needs: Sequence[bool], used: Sequence[int] | None = None
) -> Callable[..., list[torch.Tensor]]:
    """used: the outputs that have cotangents; None: all."""

    def backward(*args: torch.Tensor) -> list[torch.Tensor]:
        """(inputs.., cotangents..) -> the gradient of each input that needs one."""
        inputs = [t.detach().requires_grad_(need) for t, need in zip(args, needs, strict=False)]
        with torch.enable_grad():
            outputs = _list(call(*inputs))
        outputs = outputs if used is None else [outputs[k] for k in used]
        pairs = [(o, g) for o, g in zip(outputs, args[len(needs) :], strict=True) if o.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not pairs or not wanted:
            return [torch.zeros_like(t) for t in wanted]
        with _without_backward(call), _own_gradients_told(call):
            found = torch.autograd.grad(*([o for o, _ in pairs], wanted, [g for _, g in pairs]), materialize_grads=True)
        return list(found)

    return backward


def _list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _check_gradients(call: CustomCall, *graphs: GraphModule) -> None:
    """Refuse gradients that are not those of the arguments, or not dense."""
    for graph in graphs:
        for node in graph.graph.find_nodes(op="get_attr"):
            if getattr(getattr(graph, str(node.target)), "requires_grad", False):
                raise call.refusal(
                    "it reads a parameter that is no argument, and its gradient may be that of one",
                    "read parameters from the arguments",
                )
    for value in _values_of_outputs(graphs[-1]):
        if value.layout is not torch.strided:
            raise call.refusal("its backward returns a sparse gradient", "return a dense one")


def _values_of_outputs(graph: GraphModule) -> list[torch.Tensor]:
    """The fake values of what a graph returns."""
    found = pytree.tree_leaves(graph.graph.output_node().args[0])
    return [n.meta["val"] for n in found if isinstance(n, Node) and isinstance(n.meta.get("val"), torch.Tensor)]


def differentiable(
    call: CustomCall, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], parameters: Sequence[bool],
    used: Sequence[int],
) -> Callable[..., Any]:  # fmt: skip
    """The call for inputs of these shapes as a function that `torch.func` and `vmap` understand.

    parameters: which inputs gradients are asked for.  used: the outputs that are.
    """
    plain: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    with no_modes():
        inputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        needs = [
            (n or asked) and is_differentiable(t) for n, asked, t in zip(call.needs, parameters, inputs, strict=True)
        ]
        forward = free_of_strides(make_fx(lambda *t: _list(call(*t)), {}, **plain)(*inputs))
        outputs = [value.detach() for value in forward(*inputs)]
        cotangents = [outputs[k] for k in used]
        backward = free_of_strides(make_fx(_backward(call, needs, used), {}, **plain)(*inputs, *cotangents))
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        if draws(node):
            raise call.refusal("it draws random numbers, and a parameter is among its arguments")
    _check_gradients(call, forward, backward)

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
            found = iter(backward(*ctx.saved_tensors, *(cotangents[k] for k in used)))
            return tuple(next(found) if need else None for need in needs)

    def run(*given: torch.Tensor) -> Any:
        results = apply(Traced, *given)
        return results if len(results) > 1 else results[0]

    return run
