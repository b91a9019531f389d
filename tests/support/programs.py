"""Programs as rows: a model, a loss and a maker of batches, each held against the loop over samples, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, Gram, PsgError
from support import oracle

B, T, C = 3, 5, 3


class Program(nn.Module):
    """A function of data and parameters `[shape]`."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape)))

    def forward(self, *data: Tensor) -> Any:
        return self.function(*data, **dict(self._parameters))


@dataclass
class Row:
    """A model, a loss, and a maker of `(inputs, targets)` for a batch size."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    draw: Callable[[int], tuple[Any, Any]]


def head() -> nn.Module:
    return nn.Linear(4, C)


def program(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Program(function, **shapes)


def square(o: Tensor, *_: Tensor) -> Tensor:
    return o.square().mean()


def flat(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.randn(size, C).double()


def classes(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.randint(C, (size,))


def tokens(size: int) -> tuple[Tensor, None]:
    return torch.randn(size, T, 4).double(), None


def ids(*shape: int) -> Callable[[int], tuple[Tensor, None]]:
    return lambda size: (torch.randint(7, (size, *shape)), None)


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2, 5, 5).double(), torch.randn(size, 2, 5, 5).double()


Refused = tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], tuple[Any, Any]], type[PsgError], str]


def check_answer(row: Row, sizes: tuple[int, ...] = (B, 1)) -> None:
    """Every answer of the program equals the loop's, and its buffers are those of an ordinary forward."""
    torch.manual_seed(0)
    model = row.model().double()
    step = psg_fx.transform(model, row.loss, quantities=[Grads(), ClippedSum(0.3), Gram()], backend="eager")
    for size in sizes:
        x, y = row.draw(size)
        ordinary = copy.deepcopy(model)
        ordinary(*(x if isinstance(x, tuple) else (x,)))
        out = step(x) if y is None else step(x, y)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, ordinary.get_buffer(name), rtol=1e-9, atol=1e-12, equal_nan=True)
        losses, grads = oracle.loop_grads(model, row.loss, x, y)
        torch.testing.assert_close(out.losses, losses, rtol=1e-7, atol=1e-9, equal_nan=True)
        rows = torch.cat([g.flatten(1) for g in grads.values()], 1)
        for name, want in grads.items():
            torch.testing.assert_close(out.grads[name], want, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(out.norms, rows.norm(dim=1), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(out.gram, rows @ rows.T, rtol=1e-7, atol=1e-9)
        for name, want in oracle.clipped_sum(grads, 0.3).items():
            torch.testing.assert_close(out.clipped_sum[name], want, rtol=1e-7, atol=1e-9)


def check_refusal(row: Refused) -> None:
    """The program is refused with these words."""
    model, loss, draw, kind, words = row
    torch.manual_seed(0)
    x, y = draw(B)
    step = psg_fx.transform(model().double(), loss, backend="eager")
    with pytest.raises(kind) as caught:
        step(x) if y is None else step(x, y)
    assert words in str(caught.value)
