"""Hooks that the code puts on gradients of activations (`h.register_hook(f)`): f is an op on the way back.

A hook sees the whole gradient of a value, wherever in the code it is registered: what was computed of the value before
goes through it, too.  So the value is marked where it is registered, and at the end of the forward pass, where a hook's
variables are what they are in the backward pass, the hook is recorded as a custom function that returns its argument
(`ops/of_users/autograd_function.py`).  Once the graph is functional, all that reads the value reads what that returns.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.nodes import in_order
from psg_fx.graph.same_op import draws
from psg_fx.ops.of_users.custom_call import as_one_op
from psg_fx.ops.of_users.own_gradient import own_gradient
from psg_fx.program.changes.closures import Closure, changes_state
from psg_fx.program.program import Program
from psg_fx.program.reads.observed import Observed
from psg_fx.source import locate
from psg_fx.torch_private.graphs import unread_ops
from psg_fx.torch_private.modes import is_transformed, without_functions
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.tracer import node_of

from ..unseen import line_of_call
from .own_gradients import way

_INSIDE = "the gradient is a value inside of a compiled graph"


class Mark(torch.autograd.Function):
    """A value where a hook is registered."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients


class Hook(torch.autograd.Function):
    """A value as it is, whose gradient a hook may replace."""

    _psg_fx_names = ("a hook on a gradient", "register_hook")

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, hook: Closure, line: str, *read: torch.Tensor) -> torch.Tensor:
        ctx.hook, ctx.line = hook, line
        ctx.save_for_backward(*read)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = _run(ctx.hook.on(ctx.saved_tensors), gradients[0], ctx.line)
        return found, None, None, *(None for _ in ctx.saved_tensors)


def _run(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor, line: str) -> torch.Tensor:
    """What a hook makes of a gradient."""
    made = _Made(line)
    given = gradient.clone()
    version = given._version
    with made:
        found = hook(given)
    written = given._version != version
    made.refs.append(weakref.ref(given))
    del given
    made.require_gone(found)
    if found is None and not written:
        return gradient
    if not isinstance(found, torch.Tensor):
        raise _refused("that returns no gradient, and writes into it" if written else "that returns no tensor", line)
    if found.shape != gradient.shape:
        raise _refused("that returns another shape", line, "a gradient has the shape of the value")
    return found


class _Made(TorchFunctionMode):
    """Tensors that are made while it is open, without keeping them."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line
        self.refs: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NUMBERS:
            raise _refused("that reads a number out of a tensor", self.line)
        if name == "register_hook":
            raise _refused("that registers another one", self.line)
        result = func(*args, **(kwargs or {}))
        given = {id(t) for t in pytree.tree_leaves((args, kwargs))}
        made = (t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and id(t) not in given)
        self.refs += map(weakref.ref, made)
        return result

    def require_gone(self, returned: Any) -> None:
        """Refuse a hook that has put one of them somewhere: it is what a capture computes with, not a gradient."""
        base = returned._base if isinstance(returned, torch.Tensor) else None
        if any((t := ref()) is not None and t is not returned and t is not base for ref in self.refs):
            raise _refused("that keeps a gradient, or what it computes of it", self.line)


_NUMBERS = ("item", "tolist", "numpy", "__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__")


@dataclass(frozen=True)
class _Registered:
    """A hook, the value it was put on and what marks it, and what its handle holds until it is removed."""

    hook: Callable[..., Any]
    value: torch.Tensor
    version: int
    mark: torch.Tensor
    handle: int
    holds: OrderedDict[int, Any]
    line: str


class Hooks:
    """Those of a capture.  ops: their ops, in the order in which they were registered.  marks: the ops of marks."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.ops: list[Any] = []
        self.marks: list[Any] = []
        self._registered: list[_Registered] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While open, a hook becomes an op, which stays though nothing reads it."""
        register: Callable[..., RemovableHandle] = torch.Tensor.register_hook
        own = Program.forward
        self.ops.clear()
        self.marks.clear()
        with unread_ops() as keep:

            def register_hook(tensor: torch.Tensor, hook: Any) -> RemovableHandle:
                line = line_of_call(register_hook)
                if not tensor.requires_grad and not is_transformed(tensor) and not _is_of_psg(tensor):
                    return register(tensor, hook)  # torch has the words
                _require_an_activation(tensor, hook, line)
                self.observed.functions([hook])
                holds: OrderedDict[int, Any] = OrderedDict()
                handle = RemovableHandle(holds)
                holds[handle.id] = hook
                with torch.enable_grad():
                    mark, op = self._recorded(keep, Mark, tensor)
                self.marks.append(op)
                found = _Registered(hook, tensor, tensor._version, mark, handle.id, holds, line)
                self._registered.append(found)
                return handle

            def forward(program: Program, tensors: list[torch.Tensor]) -> Any:
                self._registered.clear()
                results = own(program, tensors)
                for found in self._registered:
                    self.ops += self._finished(found, keep)
                self._registered.clear()
                return results

            with patched_here(torch.Tensor, "register_hook", register_hook), patched_here(Program, "forward", forward):
                yield

    def _recorded(
        self, keep: Callable[[Any], None], function: type[torch.autograd.Function], *given: Any, line: str = ""
    ) -> tuple[torch.Tensor, Any]:
        """What a custom function returns, and the op that it is."""
        made = as_one_op(function, given, self.observed.calls.append, line=line)
        node = node_of(made)
        assert node is not None, "an op that is not recorded"
        keep(node.target)
        return made, node.target

    def _finished(self, found: _Registered, keep: Callable[[Any], None]) -> list[Any]:
        """The op of a hook whose variables have their last values; none if it was removed."""
        with without_functions():
            if found.value._is_view() and found.value._version != found.version:
                raise _refused("on a view that is written into later", found.line, "torch drops such a hook")
        if found.handle not in found.holds:
            return []
        try:
            closure = Closure(found.hook, lambda value: node_of(value) is not None)
        except ValueError:  # an empty cell
            raise _refused("that reads a variable which has no value", found.line, "torch would fail, too") from None
        read = [tensor.detach() for tensor in closure.read]
        return [self._recorded(keep, Hook, found.mark, closure, found.line, *read, line=found.line)[1]]

    def put_in_place(self, gm: GraphModule) -> None:
        """All that reads a value reads it behind its hooks, of which the one that was registered first is the last."""
        for op in reversed(self.ops):
            (node,) = gm.graph.find_nodes(op="call_function", target=op)
            mark = cast("Node", node.args[0])
            if mark.target not in self.marks:
                raise _refused("where its gradient is cut off", locate(node), "something detaches the value there")
            node.replace_input_with(mark, cast("Node", mark.args[0]))
            _put_in_place(gm, node)
        for op in reversed(self.marks):
            for mark in gm.graph.find_nodes(op="call_function", target=op):
                gm.graph.erase_node(mark)


def _is_of_psg(tensor: torch.Tensor) -> bool:
    """Whether it is what an op of psg_fx returns, which has its gradient only once it is written out."""
    node = node_of(tensor)
    above = () if node is None else facts.ancestors([node])
    return any(str(getattr(n.target, "namespace", "")).startswith("psg_fx") for n in above)


def _require_an_activation(tensor: torch.Tensor, hook: Any, line: str) -> None:
    if is_transformed(tensor):
        raise _refused("inside of a function of torch.func", line, "put it on a tensor outside of that")
    if not tensor.requires_grad:
        raise _refused("on what a recurrent layer returns", line, "it is written out after the capture; use a cell")
    if isinstance(tensor, torch.nn.Parameter):
        raise _refused("on the gradient of a parameter", line, "a step returns that gradient: apply it to this")
    if not tensor.ndim:
        raise _refused("on a scalar", line, "losses of samples have no gradient together: put it on what is reduced")
    if not callable(hook):
        raise _refused("that is no function", line)
    if changes_state(hook):
        raise _refused("that changes variables or attributes", line, "it runs when a graph is made, not at every step")


def _put_in_place(gm: GraphModule, node: Node) -> None:
    """What the hook itself reads is computed of the value before it, once more where it is made of that."""
    value, *read = cast("tuple[Node, ...]", node.args)
    for call in gm.graph.find_nodes(op="call_function", target=own_gradient):
        outputs, inputs, _ = cast("Any", call.args)
        if value in {*inputs, *way(gm.graph.nodes, inputs, outputs)}:
            raise _refused("beside torch.autograd.grad", locate(node), "that gradient would go through it, too")
    drawn = [n for n in gm.graph.nodes if draws(n)]
    before: dict[Node, Node] = {}
    with gm.graph.inserting_before(node):
        for each in way(gm.graph.nodes, [value], read):
            before[each] = gm.graph.node_copy(each, lambda n: before.get(n, n))
    node.args = (value, *(before.get(n, n) for n in read))
    behind = {node, *before.values()}
    value.replace_all_uses_with(node, delete_user_cb=lambda user: user not in behind)
    in_order(gm)
    if any(map(draws, before)) or drawn != [n for n in gm.graph.nodes if draws(n)]:
        raise _refused("that reads what is drawn", locate(node), "it would be drawn at another place")


def _refused(what: str, line: str, why: str = _INSIDE) -> NotYetSupported:
    return NotYetSupported(
        f"the code puts a hook {what}", where=line, why=why,
        fix="remove it, or write what it does to the gradient as a custom autograd.Function",
    )  # fmt: skip
