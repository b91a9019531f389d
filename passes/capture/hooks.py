"""Hooks that the code puts on gradients of activations (`h.register_hook(f)`): f is an op on the way back.

A hook sees the whole gradient of a value, wherever in the code it is registered: what was computed of the value before
goes through it, too.  So it is recorded as a custom function that returns its argument, and nothing reads
(`psg_fx/ops/autograd_function.py`), and once the graph is functional, all that reads the value reads that.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from psg_fx.errors import NotYetSupported
from psg_fx.graph.same_op import draws
from psg_fx.ops.autograd_function import as_one_op
from psg_fx.ops.own_gradient import own_gradient
from psg_fx.program.observed import Observed
from psg_fx.source import locate
from psg_fx.torch_private.graphs import unread_ops
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.tracer import node_of

from .own_gradients import way


class Hook(torch.autograd.Function):
    """A value as it is, whose gradient a hook may replace."""

    _psg_fx_names = ("a hook on a gradient", "register_hook")

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, hook: _Alike, *read: torch.Tensor) -> torch.Tensor:
        ctx.hook = hook
        ctx.save_for_backward(*read)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hook = ctx.hook.on(ctx.saved_tensors)
        with _Made() as made:
            found = hook(gradients[0].view_as(gradients[0]))
        made.require_gone(found)
        return gradients[0] if found is None else found, None, *(None for _ in ctx.saved_tensors)


class _Made(TorchFunctionMode):
    """Tensors that are made while it is open, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _NUMBERS:
            raise _refused("on a gradient that reads a number out of it", _INSIDE)
        result = func(*args, **(kwargs or {}))
        self.refs += [weakref.ref(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result

    def require_gone(self, returned: Any) -> None:
        """Refuse a hook that has put one of them somewhere: it is what a capture computes with, not a gradient."""
        if any(ref() is not None and ref() is not returned for ref in self.refs):
            raise _refused("on a gradient that keeps it, or what it computes of it", _INSIDE)


_NUMBERS = ("item", "tolist", "numpy", "__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__")
_INSIDE = "the gradient is a value inside of a compiled graph"


class Hooks:
    """Those of a capture.  registered: their ops, with their handles and what these hold until they are removed."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.registered: list[tuple[Any, RemovableHandle, OrderedDict[int, Any]]] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While open, a hook becomes an op, which stays though nothing reads it."""
        register: Callable[..., RemovableHandle] = torch.Tensor.register_hook
        self.registered.clear()
        with unread_ops() as keep:

            def register_hook(tensor: torch.Tensor, hook: Any) -> RemovableHandle:
                if not tensor.requires_grad:
                    return register(tensor, hook)  # torch has the words
                if isinstance(tensor, torch.nn.Parameter):
                    raise _refused("on the gradient of a parameter", "a step returns that gradient: apply it to this")
                self.observed.functions([hook])
                holds: OrderedDict[int, Any] = OrderedDict()
                handle = RemovableHandle(holds)
                holds[handle.id] = hook
                alike = _Alike(hook)
                made = as_one_op(Hook, (tensor, alike, *alike.read), self.observed.calls.append)
                node = node_of(made)
                assert node is not None, "an op that is not recorded"
                keep(node.target)
                self.registered.append((node.target, handle, holds))
                return handle

            with patched_here(torch.Tensor, "register_hook", register_hook):
                yield

    def put_in_place(self, gm: GraphModule) -> None:
        """All that reads a value reads it behind its hooks, of which the one that was registered first is the last."""
        ops = {op: handle.id in holds for op, handle, holds in self.registered}
        for node in [n for n in reversed(gm.graph.nodes) if n.target in ops]:
            if not ops[node.target]:
                gm.graph.erase_node(node)
            elif gm.graph.find_nodes(op="call_function", target=own_gradient):
                raise _refused("beside torch.autograd.grad", "which of the gradients go through it, no node says", node)
            else:
                _put_in_place(node)


def _put_in_place(node: Node) -> None:
    """What the hook itself reads is computed of the value before it, once more where it is made of that."""
    value, *read = cast("tuple[Node, ...]", node.args)
    drawn = [n for n in node.graph.nodes if draws(n)]
    before: dict[Node, Node] = {}
    with node.graph.inserting_before(node):
        for each in way(node.graph.nodes, [value], read):
            before[each] = node.graph.node_copy(each, lambda n: before.get(n, n))
    node.args = (value, *(before.get(n, n) for n in read))
    behind = {node, *before.values()}
    value.replace_all_uses_with(node, delete_user_cb=lambda user: user not in behind)
    _sort(node.graph)
    if any(map(draws, before)) or drawn != [n for n in node.graph.nodes if draws(n)]:
        raise _refused("that reads what is drawn", "it would be drawn at another place", node)


def _sort(graph: Graph) -> None:
    """Every node behind those that it reads, and otherwise in the order that there was."""
    done: dict[Node, None] = {}
    for node in graph.nodes:
        waiting = [node]
        while waiting:
            missing = [n for n in waiting[-1].all_input_nodes if n not in done]
            waiting.extend(reversed(missing))
            if not missing:
                done[waiting.pop()] = None
    last, *others = done
    for node in others:
        last.append(node)
        last = node


class _Alike:
    """A hook, with what its code has of the functions around it and by default.  It equals another one of the same code
    that has equal values: each capture makes functions anew.

    read: what is computed of that, which the op is given.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.held = _held(hook) if isinstance(hook, FunctionType) else []
        self.places = [k for k, v in enumerate(self.held) if isinstance(v, torch.Tensor) and node_of(v) is not None]
        self.read = [self.held[k] for k in self.places]

    def on(self, tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """The hook where these are what is computed."""
        if not self.places:
            return self.hook
        given = dict(zip(self.places, tensors, strict=True))
        return _holding(cast("FunctionType", self.hook), [given.get(k, v) for k, v in enumerate(self.held)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and (self.hook == other.hook or self._fixed() == other._fixed())

    def __hash__(self) -> int:
        return 0

    def _fixed(self) -> tuple[Any, ...]:
        held = (None if k in self.places else v for k, v in enumerate(self.held))
        return (getattr(self.hook, "__code__", self.hook), *held)


def _held(function: FunctionType) -> list[Any]:
    """What it has of the functions around it, and what its arguments are by default."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _holding(function: FunctionType, held: Iterable[Any]) -> FunctionType:
    """A function of the same code with other values for these."""
    values = iter(held)
    cells = tuple(CellType(next(values)) for _ in function.__closure__ or ())
    defaults = tuple(next(values) for _ in function.__defaults__ or ())
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    made.__kwdefaults__ = {name: next(values) for name in function.__kwdefaults__ or {}}
    return made


def _refused(where: str, why: str, node: Node | None = None) -> NotYetSupported:
    return NotYetSupported(
        f"the code puts a hook {where}", where="register_hook" if node is None else locate(node), why=why,
        fix="remove it, or write what it does to the gradient as a custom autograd.Function",
    )  # fmt: skip
