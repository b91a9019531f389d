"""Custom `torch.autograd.Function`s in plain ops.

A call is an op of its own (`custom_call.py`), and differentiation runs the function itself.  `vmap` and `torch.func`
need more than most functions offer; for them its forward and backward are traced into plain ops once their sizes are
known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from psg_fx.graph.at_sizes import SEVERAL, runs_as_said
from psg_fx.graph.facts import is_differentiable
from psg_fx.graph.same_op import draws
from psg_fx.graph.squeezes import name_squeezed_dims
from psg_fx.graph.strides import free_of_strides
from psg_fx.graph.tracing import trace
from psg_fx.graph.written_copies import lost_write, writes_a_copy
from psg_fx.ops.of_users.custom_call import CustomCall, listed
from psg_fx.torch_private.custom_functions import apply
from psg_fx.torch_private.modes import TorchDispatchMode, no_modes
from psg_fx.torch_private.ops import writes
from psg_fx.torch_private.patching import code_replaced_here


def forward_graph(call: CustomCall, values: Sequence[torch.Tensor]) -> GraphModule:
    """(inputs..) -> outputs, on fake tensors, in plain ops."""

    def forward(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return listed(call(*inputs))

    return _traced(call, forward, values)


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
        traced = _traced(call, some, [*values, *cotangents])
    except RuntimeError as error:
        if "mutating a non-functional tensor" not in str(error):
            raise
        raise call.refusal("its backward writes into a tensor from outside, such as .grad", _BY_RETURN) from error
    traced.graph.eliminate_dead_code()
    if any(n.args[0].op == "placeholder" for n in traced.graph.find_nodes(op="call_function", target=_COPY)):
        raise call.refusal("its backward writes into a tensor that it is given", "let it return new ones")
    return traced


def _traced(call: CustomCall, function: Callable[..., Any], arguments: Sequence[Any]) -> GraphModule:
    """In plain ops, with what they may be for a batch of one sample."""
    copied: list[str] = []

    def look_at_writes(recorded: GraphModule) -> None:
        copied.append(writes_a_copy(recorded))
        if (lost := lost_write(recorded)) is not None:
            raise call.refusal(lost.why, lost.fix)

    sizes = _Sizes()

    def watched(*args: Any) -> Any:
        with sizes:
            return function(*args)

    traced = trace(watched, list(arguments), look_at_writes)
    name_squeezed_dims(traced)
    traced.meta[WRITES_A_COPY] = any(copied)
    traced.meta[OF_ONE] = sizes.unlike
    return traced


class _Sizes(TorchDispatchMode):
    """While open, the first op is noted that gives something of another size for one sample, or does not run on it,
    than its result for all batch sizes says; "" for none.  The trace has only those that something reads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unlike = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.unlike and func.namespace == "aten" and not writes(func):
            with no_modes():
                alike = [runs_as_said(func, args, kwargs or {}, found, size) for size in (SEVERAL, 1)]
            self.unlike = func.overloadpacket.__name__ if alike == [True, False] else ""
        return found


OF_ONE = "psg_fx_of_one"
"""Of such a graph: an op of another size for one sample."""
WRITES_A_COPY = "psg_fx_writes_a_copy"
"""Of such a graph: whether it writes into what is a copy of several samples alone."""


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
            "compute what is differentiated inside of it, under torch.enable_grad(), from its own arguments; in a hook "
            "from detached tensors that it closes over",
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
            outputs = listed(call(*inputs))
        outputs = outputs if used is None else [outputs[k] for k in used]
        pairs = [(o, g) for o, g in zip(outputs, args[len(needs) :], strict=True) if o.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not pairs or not wanted:
            return [torch.zeros_like(t) for t in wanted]
        with _without_backward(call), _own_gradients_told(call):
            found = torch.autograd.grad(*([o for o, _ in pairs], wanted, [g for _, g in pairs]), materialize_grads=True)
        return list(found)

    return backward


def _check_gradients(call: CustomCall, *graphs: GraphModule) -> None:
    """Refuse gradients that are not those of the arguments, or not dense."""
    for graph in graphs:
        for node in graph.graph.find_nodes(op="get_attr"):
            if getattr(getattr(graph, str(node.target)), "requires_grad", False):
                raise call.refusal(
                    "it reads a parameter by a module or a closure, and not from its arguments, where gradients go",
                    "compute with the arguments: torch.func.functional_call(module, dict(zip(names, params)), x)",
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
        forward = free_of_strides(make_fx(lambda *t: listed(call(*t)), {}, **plain)(*inputs))
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
