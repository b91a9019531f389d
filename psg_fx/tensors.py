"""Sizes, dtypes and layouts of tensors; permute and reshape without leaving no-ops in a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""What numbers are that follow the batch size."""
_PLAIN: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
Size = Any
"""An int, or a sympy expression."""


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, 1 for none."""
    return reduce(operator.mul, sizes, 1)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal as written; asks nothing about symbols, so it never specialises one."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def as_int(value: Any) -> int | None:
    """What may count things, as an int; None for what may not: bools, floats, several numbers."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_of_ints(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype are whole ones; bools are none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def number_at(value: Any, sizes: Mapping[Any, int]) -> Any:
    """A number that follows sizes, as Python's number for these: symbol -> size."""
    return _PLAIN[type(value)](value.node.expr.subs(sizes))


def short_name(kind: torch.dtype | torch.layout) -> str:
    """`float32` of `torch.float32`."""
    return str(kind).removeprefix("torch.")


def place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where a tensor lies, and how: the same for two that are one view of one memory.  None where nothing lies."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def written_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the numbers in memory that it has: a view may be negated or conjugated by a bit alone, which
    compiled code does not read.
    """
    return tensor.resolve_conj().resolve_neg()


def apart_from(held: Iterable[torch.Tensor], values: Iterable[Any]) -> list[Any]:
    """The values; copies of those that lie in the memory of tensors that are held."""
    places = places_of(held)
    return [value.clone() if storage_of(value) in places else value for value in values] if places else list(values)


def places_of(values: Iterable[Any]) -> set[int]:
    """The memory that the tensors among these values lie in."""
    return {place for value in values if (place := storage_of(value)) is not None}


def storage_of(value: Any) -> int | None:
    """What tells a tensor's memory from others; None for what has none: sparse ones, those that torch.func wraps."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        place: int = value.untyped_storage()._cdata
    except NotImplementedError:
        return None
    return place


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether it is a view that is negated or conjugated by a bit."""
    return tensor.layout is torch.strided and (tensor.is_neg() or tensor.is_conj())


def permute(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`x.permute(order)`, or x itself where that changes nothing."""
    order = list(order)
    return x if order == list(range(x.ndim)) else x.permute(order)


def reshape(x: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """`x.reshape(shape)`, or x itself where that changes nothing."""
    if len(shape) == x.ndim and all(same_size(a, b) for a, b in zip(x.shape, shape, strict=True)):
        return x
    return x.reshape(list(shape))


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x.contiguous()`, or x itself where that changes nothing; asks nothing about symbols."""
    return x if is_contiguous(x) else x.contiguous()


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether its elements lie in the order of its dims; asks nothing about symbols."""
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not same_size(size, 1):
            if not same_size(stride, expected):
                return False
            expected = expected * size
    return True


def has_rows(x: torch.Tensor) -> bool:
    """Whether the elements along its last dim lie side by side; asks nothing about symbols."""
    return same_size(x.stride(-1), 1)


def memory_order(x: torch.Tensor) -> list[int]:
    """The dims of x from the slowest to the fastest in memory."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda d: -hint(strides[d]))


def hint(size: int | torch.SymInt) -> int:
    """A size as it is for the inputs that a graph is traced with; asks nothing about symbols."""
    if not isinstance(size, torch.SymInt):
        return size
    known: int | None = size.node.hint
    return 1 if known is None else known  # None: of rows that are counted when the graph is run


HALF = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""

ALIGNED = 8
"""Columns in whole multiples of which cuBLAS writes a float32 result of half-precision operands with its fast kernels.
With 197 columns (the positions of a vision transformer) it took one for unaligned memory, 85 µs a product on an H100,
half of the device's time in a step of norms (bench/results/kernels-cuda-nvidia-h100-80gb-hbm3.md).
"""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of half-precision values are kept in float32."""
    return torch.float32 if dtype in HALF else dtype


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape and hold the same values; NaN equals itself here."""
    return a.shape == b.shape and (torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True))


def leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of autograd's graph that a tensor is computed from; itself if it is one."""
    if tensor.grad_fn is None:
        yield tensor
        return
    waiting: list[Any] = [tensor.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None and not node.next_functions:
            yield leaf
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(new)
        waiting += new


def picked_first(mask: torch.Tensor) -> torch.Tensor:
    """Of each row of a mask `[B, N]` the places that it picks, in their order, and behind them the others."""
    return torch.sort((~mask).to(torch.int8), dim=1, stable=True).indices
