"""What changes a gradient behind autograd's back while the model is captured: refused, or put into words it follows.

A captured graph has no order of reading and writing, and differentiates every value that is written. Autograd does not
see a write under `torch.no_grad()`, nor one through `h.detach()`: the value changes, and its gradient is the old one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.decisions.flags import IN_BULK
from psg_fx.program.objects import describe
from psg_fx.program.program import Program
from psg_fx.torch_private.export import without_checkpoints
from psg_fx.torch_private.modes import is_transformed, reading, untransformed, without_functions
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.tracer import known_as_before

from ..unseen import SET_DATA, computed_outside, hidden_write, require_no_switch, written_outside
from . import own_gradients


class _Writes(TorchFunctionMode):
    """Refuses an op that writes, unseen by autograd, into the memory of a tensor with a gradient.

    learning: the memory of such tensors, kept so that no other tensor takes its place.  detached: what was detached:
    a tensor of its own to autograd, in the memory of another one.  changed: memory that was written to through a
    detached tensor, and the refusal of whatever reads the tensor with a gradient there from then on.  given_values:
    detached tensors that values with gradients were written into, through which autograd would follow these; and the
    refusal of whatever reads one.  read: detached tensors that were read.  lost: memory whose values the graph does not
    have, and the refusal of whatever reads it.
    """

    watching = True
    now: _Writes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.learning: dict[int, torch.UntypedStorage] = {}
        self.detached: dict[int, torch.Tensor] = {}
        self.changed: dict[int, NotYetSupported] = {}
        self.given_values: dict[int, tuple[torch.Tensor, NotYetSupported]] = {}
        self.read: set[int] = set()
        self.lost: dict[int, tuple[torch.Tensor, NotYetSupported]] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watching:
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return own_gradients.recorded(*args, **kwargs)
        if func == SET_DATA and _is_all_of(args[1], args[0]):  # as `module.to(x.dtype)` where that changes nothing
            return None
        require_no_switch(func, args, kwargs)
        func = torch.Tensor.detach if func == _DATA else func
        with without_functions():
            if func in _FILLING and args and _is_outside(args[0]):  # of which it takes the sizes
                args = (args[0].detach(), *args[1:])
            targets = _targets(func, args, kwargs)
        args, kwargs = self._values_alone(func, args, kwargs, targets)
        with without_functions():
            given = [t for t in _given(func, args, kwargs, targets) if not t.is_inference()]
            versions = [t._version for t in given]
        with contextlib.nullcontext() if torch.is_grad_enabled() else known_as_before():
            result = func(*args, **kwargs)
        with without_functions():
            bulk = targets if IN_BULK in getattr(func, "__name__", "") else ()
            pairs = zip(given, versions, strict=True)
            self._note_writes(func, args, [t for t, v in pairs if t._version != v or any(t is b for b in bulk)])
            self._note_result(func, given, result)
        return result

    def _values_alone(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]
    ) -> tuple[Any, Any]:
        """The arguments, without gradients where a buffer is written through `.data` (`self.mean.data.lerp_(h, 0.1)`):
        the buffer has none then either.  What was written, which has one, may be written again, and not read; nor may
        it have been read, since a view of it would have one, too.
        """
        with without_functions():
            target = next(iter(targets), None)
            read = [t for t in _tensors((args, kwargs)) if t is not target]
            self.require_own_gradients(read)
            self.read |= {id(t) for t in read if id(t) in self.detached}
            if target is None or not args or args[0] is not target:
                return args, kwargs
            if id(target) not in self.detached or id(target) in self.read:
                return args, kwargs
            if not torch.is_grad_enabled() or target.requires_grad or _place(target) in self.learning:
                return args, kwargs
            if not any(t.requires_grad for t in read):
                return args, kwargs
            self.given_values[id(target)] = target, hidden_write(func)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.detach() if t.requires_grad else t, (args, kwargs))  # type: ignore[no-any-return]

    def _note_writes(self, func: Any, args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        """Refuse a write that autograd does not see into memory of a tensor with a gradient, or note it."""
        if not written:
            return
        target = args[0] if args and any(t is args[0] for t in written) else None
        takes_gradients = target is None and torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args))
        for tensor in written:
            if target is not None and tensor is not target and _place(tensor) == _place(target):
                continue  # another tensor of the memory that is written, as in `q -= q.detach()`
            hidden = not (torch.is_grad_enabled() and tensor.requires_grad)
            own = id(_seen_through(tensor)) in self.detached
            if hidden and own and not tensor.requires_grad and not takes_gradients:
                self.changed.setdefault(_place(tensor), hidden_write(func))
            elif own or (hidden and (tensor.requires_grad or _place(tensor) in self.learning)):
                raise hidden_write(func)

    def _note_result(self, func: Any, given: Sequence[torch.Tensor], result: Any) -> None:
        """Where tensors with gradients lie, and what is detached."""
        made = _tensors(result)
        if made:
            self.require_unchanged(given)
        if func in (torch.Tensor.detach, torch.detach):
            self.detached[id(result)] = result
        for tensor in (*given, *made):
            if tensor.requires_grad:
                self.learning.setdefault(_place(tensor), _memory(tensor))

    def require_own_gradients(self, given: Any) -> None:
        """Refuse to read a tensor that has taken a gradient with a value."""
        for tensor in _tensors(given) if self.given_values else ():
            if id(tensor) in self.given_values:
                raise self.given_values[id(tensor)][1]

    def require_unchanged(self, given: Any) -> None:
        """Refuse to read a tensor whose value has changed and whose gradient has not, or the graph's value has not."""
        for tensor in _tensors(given) if self.changed or self.lost else ():
            if tensor.requires_grad and _place(tensor) in self.changed:
                raise self.changed[_place(tensor)]
            if _place(tensor) in self.lost:
                raise self.lost[_place(tensor)][1]


_FILLING = {
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like,
    torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.new_empty,
}  # fmt: skip
"""What makes a tensor like another one, whatever that holds."""

_FACTS = ("layout", "shape", "dtype", "device", "requires_grad", "ndim")
_ASKING = {
    *map(reading, _FACTS),
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
}  # fmt: skip
"""What asks of a tensor no number that it holds."""

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""`x.data` leaves no trace in a graph; `x.detach()` is the same value."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The strided tensors in a tree, in order: asked twice for each function and attribute, so not of torch's trees
    where Python's own containers hold them.
    """
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.layout is torch.strided else []
    if kind in (tuple, list, dict):
        parts = map(_tensors, tree.values() if kind is dict else tree)
        return [tensor for part in parts for tensor in part]
    if kind in _PLAIN:
        return []
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


_PLAIN = frozenset({int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device})


def _given(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors that a function reads or writes: none with a gradient from outside, and none from outside written."""
    given = _tensors((args, kwargs))
    outside = [t for t in given if _is_outside(t)]
    if outside and func not in _ASKING:
        raise computed_outside(outside[0])
    if any(map(_is_real, targets)):
        raise written_outside(func)
    return given


def _is_outside(tensor: torch.Tensor) -> bool:
    """Whether it was computed of something before the program runs."""
    return _is_real(tensor) and tensor.grad_fn is not None and type(tensor) is torch.Tensor


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether no capture has made a tensor: those that belong to the model have others in their places."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not is_transformed(tensor)


_OPERATORS = "add and div floordiv lshift mod mul or pow rshift sub truediv xor"
_NO_VALUES = ("requires_grad_", "detach_", "share_memory_")
_WRITING = {"__setitem__", *(f"__i{operator}__" for operator in _OPERATORS.split())}


def _targets(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a function writes to, by its name."""
    name = getattr(func, "__name__", "")
    out = kwargs.get("out")
    writes = name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _NO_VALUES)
    written = list(args[:1]) if writes else []
    return _tensors([*written, out])


def _seen_through(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which autograd takes this one for a view, or itself."""
    return tensor._base if tensor._base is not None else tensor


def _is_all_of(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a value is the tensor itself, or another one of the same memory."""
    with without_functions():
        return value is tensor or (
            isinstance(value, torch.Tensor) and value.layout is tensor.layout is torch.strided
            and _place(value) == _place(tensor) and describe(value)[1:5] == describe(tensor)[1:5]
            and value.storage_offset() == tensor.storage_offset()
        )  # fmt: skip


def _place(tensor: torch.Tensor) -> int:
    return int(_memory(tensor)._cdata)


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    return untransformed(tensor).untyped_storage()


@contextlib.contextmanager
def unwatched(given: Sequence[Any]) -> Iterator[Callable[[torch.Tensor, NotYetSupported], None]]:
    """For code whose backward is known otherwise: a custom function's own forward.  Yields what is to be told of a
    tensor that it has written into, with the refusal of whatever reads it afterwards.
    """
    writes = _Writes.now

    def wrote(tensor: torch.Tensor, refusal: NotYetSupported) -> None:
        if writes is None:
            raise refusal
        writes.lost[_place(tensor)] = tensor, refusal

    if writes is not None:
        with without_functions():
            writes.require_unchanged(given)
    with patched_here(_Writes, "watching", False):
        yield wrote


def _enter_inference(self: Any) -> None:
    self._grad = contextlib.ExitStack()
    if self.mode:
        self._grad.enter_context(torch.no_grad())


def _leave_inference(self: Any, *error: Any) -> None:
    self._grad.close()


@contextlib.contextmanager
def seen_by_autograd() -> Iterator[None]:
    """Refuse hidden writes; `torch.inference_mode()` is `torch.no_grad()`; checkpointed blocks run as they are."""
    inference, writes = torch.inference_mode, _Writes()

    def forward(program: Program, tensors: list[torch.Tensor]) -> Any:
        results = own(program, tensors)
        with without_functions():
            writes.require_unchanged(results)
            writes.require_own_gradients(results)
        return results

    own = Program.forward
    with (
        patched_here(inference, "__enter__", _enter_inference),
        patched_here(inference, "__exit__", _leave_inference), patched_here(Program, "forward", forward),
        patched_here(_Writes, "now", writes), without_checkpoints(), writes,
    ):  # fmt: skip
        yield
