"""Values that several processes compute together, one slice each: ops between what each has and what all have.

A value is *one of all* (equal in every process of the group) or *each its own* (a slice, or a part of a sum).  Each op
leads from one to the other, and its backward leads back:

    op            forward                           gradient of its input
    enter         y_r = x                           Σ_r ȳ_r
    sum_across    y = Σ_r x_r                       x̄_r = ȳ
    gather        y = [x_0 .. x_n] along a dim      x̄_r = slice r of ȳ
    own_slice     y_r = slice r of x                [ȳ_0 .. ȳ_n]
    sum_slice     y_r = slice r of Σ_s x_s          x̄_r = [ȳ_0 .. ȳ_n]
    index         r                                 -

`psg_fx/passes/spread.py` proves that nothing else leads from one to the other, so that gradients are those of the whole
computation (Shoeybi et al. 2019, arXiv:1909.08053, have the first two as f and g).  In a finished graph the ops are
functional collectives (`written`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from psg_fx.op_table import prefix_formula
from psg_fx.torch_private.tensor_parallel import rank_in

_CONTIGUOUS = torch.contiguous_format


@torch.library.custom_op("psg_fx::enter", mutates_args=())
def enter(x: Tensor, group: str) -> Tensor:
    """y_r = x."""
    return x.clone(memory_format=_CONTIGUOUS)


@torch.library.custom_op("psg_fx::sum_across", mutates_args=())
def sum_across(x: Tensor, group: str) -> Tensor:
    """y = Σ_r x_r."""
    return _summed(x, group)


@torch.library.custom_op("psg_fx::gather", mutates_args=())
def gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """y = [x_0 .. x_n] along a dim (not negative).  size: of the group."""
    return _gathered(x, dim, size, group)


@torch.library.custom_op("psg_fx::own_slice", mutates_args=())
def own_slice(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """y_r = slice r of x along a dim."""
    return _sliced(x, dim, size, group).clone(memory_format=_CONTIGUOUS)


@torch.library.custom_op("psg_fx::sum_slice", mutates_args=())
def sum_slice(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """y_r = slice r of Σ_s x_s along a dim."""
    return _sliced(_summed(x, group), dim, size, group).clone(memory_format=_CONTIGUOUS)


@torch.library.custom_op("psg_fx::index", mutates_args=())
def index(like: Tensor, group: str) -> Tensor:
    """r, int64, on the device of `like`."""
    return _index(like, group)


@torch.library.custom_op("psg_fx::lies", mutates_args=())
def lies(x: Tensor, cut: bool) -> Tensor:
    """x, said to be each process's own (cut), or one of all.  `spread` sees whether it is, and takes the op out."""
    return x.clone(memory_format=_CONTIGUOUS)


def _summed(x: Tensor, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    found: Tensor = ops.wait_tensor(ops.all_reduce(x.clone(memory_format=_CONTIGUOUS), "sum", group))
    return found


def _gathered(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    first = x.movedim(dim, 0).clone(memory_format=_CONTIGUOUS)
    found: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(first, size, group))
    return found.movedim(0, dim).clone(memory_format=_CONTIGUOUS)


def _sliced(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    length = x.shape[dim] // size
    return x.narrow(dim, rank_in(group) * length, length)


def _index(like: Tensor, group: str) -> Tensor:
    return torch.full((), rank_in(group), dtype=torch.int64, device=like.device)


def _longer(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return x.new_empty([n * size if d == dim else n for d, n in enumerate(x.shape)])


def _shorter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return x.new_empty([n // size if d == dim else n for d, n in enumerate(x.shape)])


def _like(x: Tensor, said: Any) -> Tensor:
    return torch.empty_like(x, memory_format=_CONTIGUOUS)


enter.register_fake(_like)
lies.register_fake(_like)
sum_across.register_fake(_like)
gather.register_fake(_longer)
own_slice.register_fake(_shorter)
sum_slice.register_fake(_shorter)
index.register_fake(lambda like, group: torch.empty((), dtype=torch.int64, device=like.device))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rest = inputs[1:]


def _differentiable(op: Any, back: Callable[..., Tensor] | None) -> None:
    """back: (ȳ, the further arguments) -> the gradient of the input; None for ȳ itself."""

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return (g if back is None else back(g, *ctx.rest), *[None] * len(ctx.rest))

    op.register_autograd(backward, setup_context=_keep)


_differentiable(enter, sum_across)
_differentiable(lies, None)
_differentiable(sum_across, None)
_differentiable(gather, own_slice)
_differentiable(own_slice, gather)
_differentiable(sum_slice, gather)

_ops: Any = torch.ops.psg_fx
ENTER: OpOverload = _ops.enter.default
SUM: OpOverload = _ops.sum_across.default
GATHER: OpOverload = _ops.gather.default
OWN_SLICE: OpOverload = _ops.own_slice.default
SUM_SLICE: OpOverload = _ops.sum_slice.default
INDEX: OpOverload = _ops.index.default
LIES: OpOverload = _ops.lies.default
ONE_OF_ALL = frozenset({SUM, GATHER})
"""What they give is equal in every process."""

EACH_ITS_OWN = frozenset({ENTER, OWN_SLICE, SUM_SLICE, INDEX})
"""What they give is another value in every process."""

JOINING = frozenset({SUM, GATHER, SUM_SLICE})
"""They read what each process has of its own."""


class _Sum(torch.autograd.Function):
    """`sum_across` where torch.func differentiates and maps it, which it does not do with custom ops."""

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        found: Tensor = sum_across(x, group)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, group: str) -> Any:
        """The same of all at once."""
        return _sum(x, group), dims[0]


class _Enter(torch.autograd.Function):
    """`enter`, likewise."""

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """The group is kept."""
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _sum(g, ctx.group), None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, group: str) -> Any:
        """The same of all at once."""
        return _parameter_enters(x, group), dims[0]


def _sum(x: Tensor, group: str) -> Tensor:
    apply: Callable[..., Tensor] = _Sum.apply
    return apply(x, group)


@prefix_formula(ENTER)
def _parameter_enters(x: Tensor, group: str) -> Tensor:
    apply: Callable[..., Tensor] = _Enter.apply
    return apply(x, group)


def _scattered(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    first = x.movedim(dim, 0).clone(memory_format=_CONTIGUOUS)
    found: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(first, "sum", size, group))
    return found.movedim(0, dim).clone(memory_format=_CONTIGUOUS)


_WRITTEN: dict[object, Callable[..., Tensor]] = {
    ENTER: lambda x, group: x,
    SUM: _summed,
    GATHER: _gathered,
    OWN_SLICE: _sliced,
    SUM_SLICE: _scattered,
    INDEX: _index,
}


def written(target: object) -> Callable[..., Tensor] | None:
    """What one of these ops is in a finished graph of this process: functional collectives, and its own place."""
    return _WRITTEN.get(target)
