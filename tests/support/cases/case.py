"""What a row of the test matrix is: a small program, its data, and a loss to which every number contributes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
B = 3


@dataclass(frozen=True)
class Case:
    """One row.

    function: `function(*data, **params)`. module: makes the model instead (called as `model(*data)`).
    x, more: shapes of floating-point inputs, the samples in `batch_dim`. ids: shape of an integer input < `classes`.
    out_dim: where the samples lie in the output. loss: how the loss is reduced, "sum", "mean" or "none" (`[B]`).
    shift: added to the parameters (keeps denominators off zero). frozen: parameters that need no gradient.
    covers: names of rules that this row is for, beside that of its first word; they must answer for its parameters.
    fallback: parameters for which no rule answers at some use. dtype: where float64 cannot run.
    vmap: whether `vmap(grad)` can run it. penalty: the loss also has the squares of the named parameter.
    criterion: the loss of the output instead of the fixed one.  refused: words of the error, where this is not
    supported yet.
    """

    name: str
    function: Callable[..., Tensor] | None = None
    x: Shape | None = (B, 4)
    params: Mapping[str, Shape] = field(default_factory=dict)
    more: Sequence[Shape] = ()
    ids: Shape | None = None
    classes: int = 7
    batch_dim: Any = 0
    out_dim: int = 0
    loss: str = "mean"
    shift: float = 0.0
    frozen: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    module: Callable[[], nn.Module] | None = None
    vmap: bool = True
    penalty: str = ""
    train: bool = True
    refused: str = ""
    criterion: Callable[[Any], Tensor] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def seed(self) -> int:
        """A seed of the row's own."""
        return zlib.crc32(self.name.encode())

    @property
    def dims(self) -> Any:
        """`batch_dim` as `(inputs_dims, targets_dims)`."""
        whole = isinstance(self.batch_dim, int)
        return ((self.batch_dim,) * len(self.data()) if whole else self.batch_dim), None

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The module, with fixed random parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.module is not None:
                made = self.module()
            else:
                assert self.function is not None
                made = Tiny(self.function, self.params, self.shift)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return made.train(self.train).to(dtype)

    def data(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """The inputs, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shapes = ([] if self.x is None else [self.x]) + list(self.more)
        found = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
        if self.ids is not None:
            found.append(torch.randint(self.classes, self.ids, generator=generator))
        return tuple(found)

    def loss_fn(self, model: nn.Module) -> Callable[[Any], Tensor]:
        """The loss of an output of `model`."""
        if self.criterion is not None:
            return self.criterion
        extra = dict(model.named_parameters())[self.penalty] if self.penalty else None

        def loss(out: Tensor) -> Tensor:
            value = wavy(out, self.out_dim, self.loss)
            return value if extra is None else value + 0.3 * extra.square().sum()

        return loss


def wavy(out: Tensor, dim: int, reduction: str) -> Tensor:
    """A fixed nonlinear loss in which every element of a sample has a part of its own."""
    shape = [1 if d == dim else size for d, size in enumerate(out.shape)]
    places = torch.arange(1.0, math.prod(shape) + 1.0, dtype=out.dtype, device=out.device).reshape(shape)
    each = (out + places).sin()
    if reduction == "none":
        return each.movedim(dim, 0).reshape(out.shape[dim], -1).sum(1)
    return each.mean() if reduction == "mean" else each.sum()


class Tiny(nn.Module):
    """A function and its parameters as a module."""

    def __init__(self, function: Callable[..., Tensor], params: Mapping[str, Shape], shift: float) -> None:
        super().__init__()
        self.function = function
        for name, shape in params.items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape) + shift))

    def forward(self, *data: Tensor) -> Tensor:
        return self.function(*data, **dict(self._parameters))
