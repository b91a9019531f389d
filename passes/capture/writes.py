"""What changes a gradient behind autograd's back while the model is captured: refused, or put into words it follows.

A captured graph has no order of reading and writing, and differentiates every value that is written. Autograd does not
see a write under `torch.no_grad()`, nor one through `h.detach()`: the value changes, and its gradient is the old one.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import line_of
from psg_fx.program.objects import describe
from psg_fx.program.program import Program
from psg_fx.source import is_library
from psg_fx.torch_private.export import without_checkpoints
from psg_fx.torch_private.modes import is_transformed, untransformed, without_functions
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.tracer import known_as_before

from . import own_gradients


class _Writes(TorchFunctionMode):
    """Refuses an op that writes, unseen by autograd, into the memory of a tensor with a gradient.

    learning: the memory of such tensors, kept so that no other tensor takes its place.  detached: what was detached:
    a tensor of its own to autograd, in the memory of another one.  changed: memory that was written to through a
    detached tensor, and the refusal of whatever reads the tensor with a gradient there from then on.  given_values:
    detached tensors that values with gradients were written into, through which autograd would follow these; and the
    refusal of whatever reads one.
    """

    watching = True

    def __init__(self) -> None:
        super().__init__()
        self.learning: dict[int, torch.UntypedStorage] = {}
        self.detached: dict[int, torch.Tensor] = {}
        self.changed: dict[int, NotYetSupported] = {}
        self.given_values: dict[int, tuple[torch.Tensor, NotYetSupported]] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watching:
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return own_gradients.recorded(*args, **kwargs)
        if func == _SET_DATA and _is_all_of(args[1], args[0]):  # as `module.to(x.dtype)` where that changes nothing
            return None
        _require_no_switch(func, args, kwargs)
        func = torch.Tensor.detach if func == _DATA else func
        args, kwargs = self._values_alone(func, args, kwargs)
        with without_functions():
            given = [t for t in _given(func, args, kwargs) if not t.is_inference()]
            versions = [t._version for t in given]
        with contextlib.nullcontext() if torch.is_grad_enabled() else known_as_before():
            result = func(*args, **kwargs)
        with without_functions():
            self._note_writes(func, args, [t for t, v in zip(given, versions, strict=True) if t._version != v])
            self._note_result(func, given, result)
        return result

    def _values_alone(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """The arguments, without gradients where a buffer is written through `.data` (`self.mean.data.lerp_(h, 0.1)`):
        the buffer has none then either.  What was written, which has one, may be written again, and not read.
        """
        with without_functions():
            target = next(iter(_targets(func, args, kwargs)), None)
            read = [t for t in _tensors((args, kwargs)) if t is not target]
            self.require_own_gradients(read)
            if target is None or id(target) not in self.detached or target.requires_grad:
                return args, kwargs
            if _place(target) in self.learning or not any(t.requires_grad for t in read):
                return args, kwargs
            self.given_values[id(target)] = target, _hidden_write(func)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.detach() if t.requires_grad else t, (args, kwargs))  # type: ignore[no-any-return]

    def _note_writes(self, func: Any, args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        """Refuse a write that autograd does not see into memory of a tensor with a gradient, or note it."""
        target = args[0] if args and any(t is args[0] for t in written) else None
        for tensor in written:
            if target is not None and tensor is not target and _place(tensor) == _place(target):
                continue  # another tensor of the memory that is written, as in `q -= q.detach()`
            hidden = not (torch.is_grad_enabled() and tensor.requires_grad)
            own = id(_seen_through(tensor)) in self.detached
            if hidden and own and not tensor.requires_grad:
                self.changed.setdefault(_place(tensor), _hidden_write(func))
            elif own or (hidden and (tensor.requires_grad or _place(tensor) in self.learning)):
                raise _hidden_write(func)

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
        """Refuse to read a tensor whose value has changed and whose gradient has not."""
        for tensor in _tensors(given) if self.changed else ():
            if tensor.requires_grad and _place(tensor) in self.changed:
                raise self.changed[_place(tensor)]


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""`x.data` leaves no trace in a graph; `x.detach()` is the same value."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DETACH = (torch.Tensor.detach_, torch.detach_)
_INIT = nn.init.__file__
_SWITCHES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_BACKWARD = (torch.autograd.backward, torch.Tensor.backward)


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


def _given(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function reads or writes: none with a gradient from outside, and none from outside written."""
    given = _tensors((args, kwargs))
    if outside := [t for t in given if _is_real(t) and t.grad_fn is not None and type(t) is torch.Tensor]:
        raise computed_outside(outside[0])
    if any(_is_real(t) for t in _targets(func, args, kwargs)):
        raise _written_outside(func)
    return given


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


def computed_outside(value: torch.Tensor) -> NotYetSupported:
    """The refusal of a tensor that is made of parameters before the program runs."""
    return NotYetSupported(
        "the loss or the model reads a tensor that was computed outside of it and requires gradients",
        where=f"a tensor of shape {tuple(value.shape)}",
        why="the way from the parameters to it is not part of the graph",
        fix="compute it inside the model or the loss, or detach it if it is meant as a constant",
    )


def _written_outside(func: Callable[..., Any]) -> NotYetSupported:
    return NotYetSupported(
        "the code writes into a tensor that is no buffer of the model or the loss", where=line_of_call(func),
        why="a step writes the buffers of modules and what lies in attributes, and this would be written once, now",
        fix="register it: self.register_buffer(name, tensor); or put a new tensor in its place (self.x = self.x * 0.9)",
    )  # fmt: skip


def _hidden_write(func: Callable[..., Any]) -> NotYetSupported:
    if any(frame.f_code.co_filename == _INIT for frame, _ in traceback.walk_stack(sys._getframe(1))):
        return NotYetSupported(
            "a layer with parameters is made while the model runs", where=line_of_call(func),
            why="they are none of the model's, so that no step asks for their gradients, and drawn anew at every call",
            fix="make it in __init__; a layer without parameters (elementwise_affine=False) may be made here",
        )  # fmt: skip
    return NotYetSupported(
        "a tensor is written into where autograd does not see it",
        where=line_of_call(func),
        why="under torch.no_grad(), or through .detach() or .data, its value changes and its gradient does not",
        fix="write into a clone, or say what is meant: h + (new - h).detach() has the value new and the gradient of h",
    )  # fmt: skip


def _require_no_switch(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a backward pass, a tensor that becomes another, and to switch the gradient of a parameter, or of what
    depends on some, on or off.
    """
    if func in _BACKWARD:
        raise _own_backward(func)
    if func == _SET_DATA or (func in _DETACH and args[0].requires_grad):
        raise _becomes_another(func)
    if func not in _SWITCHES:
        return
    tensor, on = args[0], bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    if on != tensor.requires_grad and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
        raise NotYetSupported(
            f"the code switches a gradient {'on' if on else 'off'}", where=line_of_call(func),
            why="which parameters have gradients is known before a graph is made, and holds for all of it",
            fix="where a module is to be frozen for some uses: torch.func.functional_call(module, {name: p.detach() "
            "for name, p in module.named_parameters()}, x); switch it between calls, and the step follows",
        )  # fmt: skip


def _becomes_another(func: Callable[..., Any]) -> NotYetSupported:
    detached = func in _DETACH
    what = "detaches a tensor in place" if detached else "assigns to the .data of a tensor"
    return NotYetSupported(
        f"the code {what}", where=line_of_call(func),
        why="a captured graph has values, and no tensors that become others",
        fix="z = z.detach() instead of z.detach_()" if detached
        else "use the new tensor instead; h + (new - h).detach() has the value new and the gradient of h",
    )  # fmt: skip


def _own_backward(func: Callable[..., Any]) -> NotYetSupported:
    return NotYetSupported(
        "the code runs a backward pass of its own", where=line_of_call(func),
        why="it adds to the .grad of parameters and tensors, and a step leaves these alone",
        fix="take the gradients by torch.autograd.grad(..., create_graph=True)",
    )  # fmt: skip


def line_of_call(func: Callable[..., Any]) -> str:
    """The user's line that calls `func`."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    own = next((f for f in frames if not is_library(f.f_code.co_filename)), None)
    return line_of(own) if own is not None else getattr(func, "__name__", str(func))


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """For code whose backward is known otherwise: a custom function's own forward."""
    with patched_here(_Writes, "watching", False):
        yield


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
        without_checkpoints(), writes,
    ):  # fmt: skip
        yield
