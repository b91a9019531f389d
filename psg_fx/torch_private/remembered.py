"""Results of ops on fake tensors, remembered from one capture to the next.

Torch computes the sizes and strides of every result from the symbols among those of its operands, in Python: a
millisecond or more an op.  One capture runs the same ops in three traces, and deep models, other quantities and other
programs run them again.  The result is a function of

    the op, its plain arguments, the dtypes, devices, sizes and strides of its tensors,
    what is known of the symbols (their values in the example, ranges, guards and replacements so far),
    and torch's settings that its kernels read,

so that is the key here, in full.  Torch's own memory of such results lives for one capture, and takes as long to make
an entry as the op takes.  What is not such a function is not remembered: ops that write, ops whose result depends on
values, constants, ops of others, and whatever made a new symbol or a new guard.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.sym_node import SymNode

from psg_fx.torch_private.fake_keys import (
    Cannot,
    Knowledge,
    Operands,
    forget,
    is_available,
    is_function,
    settings_of,
    size_key,
    values_of,
)
from psg_fx.torch_private.fakes import empty_fake
from psg_fx.torch_private.patching import patched_here

_MOST = 20_000
"""How many results are kept; then all are forgotten.  A result takes about two kilobytes."""


_open = threading.local()


@contextlib.contextmanager
def remembered_results() -> Iterator[None]:
    """While open, ops on fake tensors in this thread have their results from memory where these are known."""
    if getattr(_open, "dispatch", None) is not None or not is_available():
        yield
        return
    _open.dispatch = _Dispatch(FakeTensorMode.dispatch)
    try:
        with patched_here(FakeTensorMode, "dispatch", _open.dispatch):
            yield
    finally:
        _open.dispatch = None


@dataclass(frozen=True)
class _Made:
    """How a result is made.

    shape, stride, offset: numbers; an expression; or, as tracers know symbols by identity, the very symbol that an
    operand is, `(k,)`, or has, `(k, "size", d)`.  view: the operand whose memory it lies in.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    view: int | None
    in_order: bool

    def tensor(self, mode: Any, operands: Sequence[Any]) -> torch.Tensor:
        """A new fake tensor like this."""
        env = mode.shape_env
        shape = tuple([_number(s, operands, env) for s in self.shape])
        stride = tuple([_number(s, operands, env) for s in self.stride])
        if self.view is None:  # in order: the strides are numbers, and those that follow from the shape
            return empty_fake(mode, shape, None if self.in_order else stride, self.dtype, self.device)
        with in_kernel_invocation_manager(mode), contextlib.nullcontext() if env is None else env.suppress_guards():
            part = operands[self.view].as_strided(shape, stride, _number(self.offset, operands, env))
        return FakeTensor(mode, part, self.device)


def _number(recipe: Any, operands: Sequence[Any], env: Any) -> Any:
    if type(recipe) is int:
        return recipe
    if type(recipe) is tuple:
        k, *place = recipe
        if not place:
            return operands[k]
        of, d = place
        return getattr(operands[k], of)()[d] if of != "numel" else operands[k].numel()
    value = recipe.xreplace(values_of(env))
    return torch.SymInt(SymNode(recipe, env, int, None if value.free_symbols else int(value)))


@dataclass(frozen=True)
class _Several:
    """Several results, as `kind` has them."""

    kind: Callable[[Sequence[Any]], Any]
    made: tuple[_Made | None, ...]


_RESULTS: dict[Hashable, _Made | _Several | object | None] = {}
"""Key -> how the result is made; None: nothing results; `_UNKNOWN` where it cannot be remembered."""
_UNKNOWN = object()
_ABSENT = object()


class _Dispatch:
    """`FakeTensorMode.dispatch` with a memory.  Ops inside of an op's computation are computed."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original, self.inside = original, False
        self.known: dict[int, Knowledge] = {}

    def __get__(self, mode: Any, owner: Any = None) -> Any:
        return lambda *args, **kwargs: self(mode, *args, **kwargs)

    def __call__(
        self, mode: Any, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if self.inside:
            return self.original(mode, func, types, args, kwargs)
        if func is torch.ops.higher_order.invoke_subgraph:
            return self._called(mode, func, types, args, kwargs)
        if not is_function(func):
            return self._compute(mode, func, types, args, kwargs)
        operands = Operands(mode)
        try:
            known = self._knowledge(mode)
            if known.number < 0:
                raise Cannot
            key = (func, known.number, *settings_of(func), operands.described((args, kwargs or {})))
            found = _RESULTS.get(key, _ABSENT)
        except Cannot:
            return self._compute(mode, func, types, args, kwargs)
        if found is _ABSENT:
            result = self._compute(mode, func, types, args, kwargs)
            _remember(key, result, mode, operands.found, known.number == self._knowledge(mode).number)
            return result
        if found is _UNKNOWN:
            return self._compute(mode, func, types, args, kwargs)
        if isinstance(found, _Several):
            return found.kind([None if made is None else made.tensor(mode, operands.found) for made in found.made])
        return found.tensor(mode, operands.found) if isinstance(found, _Made) else None

    def _compute(self, mode: Any, *call: Any) -> Any:
        self.inside = True
        try:
            return self.original(mode, *call)
        finally:
            self.inside = False

    def _called(self, mode: Any, *call: Any) -> Any:
        """A call of a graph: torch remembers the results of calls; the ops inside are asked for at the first."""
        mode.cache_enabled = True
        try:
            return self.original(mode, *call)
        finally:
            mode.cache_enabled = False

    def _knowledge(self, mode: Any) -> Knowledge:
        env = mode.shape_env
        found = self.known.get(id(env))
        if found is None or not found.is_of(env):
            found = self.known[id(env)] = Knowledge(env)
            mode.cache_enabled = False  # torch's own memory, now and whenever this mode is used again
        return found


def _remember(key: Hashable, result: Any, mode: Any, operands: Sequence[Any], same: bool) -> None:
    """same: the op added nothing to what is known of the symbols."""
    if len(_RESULTS) >= _MOST:
        _RESULTS.clear()
        forget()
    try:
        if not same:
            raise Cannot
        if isinstance(result, (tuple, list)):
            made = tuple([None if r is None else _recipe(r, mode, operands) for r in result])
            places = [_place(r) for r, m in zip(result, made, strict=True) if m is not None and m.view is None]
            if len({*places}) < len(places):
                raise Cannot
            _RESULTS[key] = _Several(getattr(type(result), "_make", type(result)), made)
        else:
            _RESULTS[key] = None if result is None else _recipe(result, mode, operands)
    except Cannot:
        _RESULTS[key] = _UNKNOWN


def _recipe(result: Any, mode: Any, operands: Sequence[Any]) -> _Made:
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        raise Cannot
    if any(result is operand for operand in operands) or result.requires_grad:
        raise Cannot
    names: dict[int, tuple[Any, ...]] = {}
    for k, operand in reversed([*enumerate(operands)]):
        if isinstance(operand, torch.SymInt):
            names[id(operand.node)] = (k,)
            continue
        for of, sizes in (("numel", [operand.numel()]), ("stride", operand.stride()), ("size", operand.size())):
            names.update({id(s.node): (k, of, d) for d, s in enumerate(sizes) if type(s) is not int})

    def recipe(size: Any) -> Any:
        return size if type(size) is int else names.get(id(size.node), size.node.expr)

    place = _place(result)
    tensors = [k for k, operand in enumerate(operands) if isinstance(operand, torch.Tensor)]
    view = next((k for k in tensors if _place(operands[k]) == place), None)
    made = _Made(
        tuple([recipe(s) for s in result.shape]), tuple([recipe(s) for s in result.stride()]),
        recipe(result.storage_offset()), result.dtype, result.fake_device, view,
        view is None and all(type(s) is int for s in result.stride()) and result.stride() == _in_order(result.shape),
    )  # fmt: skip
    again: Any = made.tensor(mode, operands)
    if _seen(again) != _seen(result):
        raise Cannot
    return made


def _in_order(shape: Sequence[Any]) -> tuple[int, ...] | None:
    """The strides of a tensor that lies in its memory in order, if they are numbers."""
    strides = [1]
    for size in reversed(shape[1:]):
        if type(size) is not int:
            return None
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def _place(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _seen(tensor: Any) -> Hashable:
    """What can be seen of a fake tensor."""
    memory = tensor.untyped_storage()
    return (
        tensor.dtype, tensor.fake_device, *[size_key(s) for s in (*tensor.shape, *tensor.stride())],
        size_key(tensor.storage_offset()), size_key(memory.nbytes()), tensor.is_inference(),
        str(torch._C._dispatch_keys(tensor)),
    )  # fmt: skip
