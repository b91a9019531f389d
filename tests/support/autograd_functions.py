"""Custom autograd functions, a model that calls what it is given, and ways to write into tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Function = torch.autograd.Function
X = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Scaled(Function):
    """Its backward is not that of its forward, and it keeps a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 1.5 * g * x.sigmoid()


class SumAndProduct(Function):
    """Two inputs, two outputs, `setup_context`, and an argument that is no tensor."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x + y, scale * x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, None]:
        return g + h, ctx.scale * g - h, None


class Shifted(Function):
    """Writes into its argument and does not say so, as the sparsemax of TabNet does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.amax(-1, keepdim=True).detach()
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        found: Tensor = g * y + 0.1 * x
        return found


class Looked(Function):
    """An integer input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size = x.shape[-1]
        return x.gather(-1, ids)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return 3.0 * g.new_zeros(*g.shape[:-1], ctx.size).scatter_add(-1, ids, g), None


class Reversed(Function):
    """The gradient reversal of domain adaptation (Ganin, Lempitsky 2015, arXiv:1409.7495)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Turned(Function):
    """On complex values; its backward is twice the gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 1j

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * -2j


class Filled(Function):
    """It makes tensors of numbers, and expands them to the size of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: float) -> Tensor:
        ctx.power = torch.tensor(power, dtype=x.dtype).expand(*x.shape[:-1], 1)
        ctx.save_for_backward(x)
        return x.abs() ** ctx.power

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * g * x.sign() * ctx.power, None


class Sized(Function):
    """It reads the size of the batch where it should not: `forward` or `backward` is given the tensor and that size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
        ctx.backward_of = backward
        return forward(x, x.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(g, g.shape[0]), None, None


class Reshaped(Function):
    """3 x, given the shape that it has and a part of the one that it gets, with a backward that is 2 g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, rows: int) -> Tensor:
        ctx.shape = shape
        return (3 * x).reshape(rows, -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        assert isinstance(ctx.shape, torch.Size)
        return 2 * g.reshape(ctx.shape), None, None


class Wanted(Function):
    """x · wᵀ, with gradients that depend on which of them are wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        of_x, of_w = ctx.needs_input_grad
        return (
            (2.0 if of_w else 1.0) * g @ w if of_x else None,
            (3.0 if of_x else 1.0) * g.flatten(0, -2).T @ x.flatten(0, -2) if of_w else None,
        )


class ByOwnApply(Function):
    """An `apply` of its own, and results that are no tensors."""

    @classmethod
    def apply(cls, x: Tensor, scale: float = 2.0) -> Tensor:
        half, found, (name, size) = super().apply(x, scale)
        assert (half, name, size) == (0.5 * scale, "scaled", x.shape[-1])
        return found  # type: ignore[no-any-return]

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[float, Tensor, tuple[str, int]]:
        return 0.5 * scale, scale * x.sin(), ("scaled", x.shape[-1])

    @staticmethod
    def backward(ctx: Any, _: None, g: Tensor, *others: None) -> tuple[Tensor, None]:
        return 5 * g, None


class OneOfOne(Function):
    """A tuple with one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor]:
        return (2 * x,)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g


scaled = Scaled.apply


class Model(nn.Module):
    """`function(self, x)` with two linear layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, -1))


def as_real(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def written(write: Callable[[Tensor, Tensor], Any], grad: bool = False) -> Callable[[Any, Tensor], Tensor]:
    """A tensor without a gradient that is written into by what has one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h, target = m.a(x), torch.zeros_like(x)
        with torch.set_grad_enabled(grad):
            write(target, h)
        found: Tensor = m.b(x) * (h - target).square() + target
        return found

    return forward


def cut(t: Tensor) -> Tensor:
    t[..., 0] *= 2
    t[:, 1:3].clamp_(max=0.1)
    return t
