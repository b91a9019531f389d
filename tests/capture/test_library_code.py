"""Code as libraries have it: products under vmap, conditions in bytes, comparisons of shapes, kinds of tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.torch_private.modes import levels_left_as_found
from support import oracle


class Irreps(tuple[Any, ...]):
    """A tuple that has no length, as e3nn's."""

    def __len__(self) -> int:
        raise NotImplementedError


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function, self.held = nn.Linear(4, 4).double(), function, torch.randn(4, 4).double()
        self.register_buffer("table", torch.randn(4, 4).double())
        self.irreps = Irreps((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.layer(x))


def each(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.vmap(f)


CODE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a matrix times a slice": lambda m, h: each(lambda u: m.held @ u)(h),
    "a turned matrix times a slice": lambda m, h: each(lambda u: torch.mv(m.held.T, u).sin())(h),
    "a matrix times slices of slices": lambda m, h: each(each(lambda u: m.held.T @ u))(
        torch.stack([h, h.sin()], 1)
    ).sum(1),
    "a buffer times a matrix": lambda m, h: each(lambda u: torch.matmul(m.table, torch.outer(u, u)).sum(0))(h),
    "a condition in bytes": lambda m, h: torch.where((h > 0).byte(), h, 0.1 * h) + h.where((h > 1).byte(), h * 2),
    "other shapes": lambda m, h: h * 2 if torch.equal(h, m.table[:, :3]) or h.equal(m.table[0]) else h.sin(),
    "a tuple without a length": lambda m, h: h * next(iter(m.irreps)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:where received a uint8 condition:UserWarning")
@pytest.mark.parametrize("name", CODE)
def test_code(name: str) -> None:
    torch.manual_seed(0)
    model = Model(CODE[name])
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (3, 1, 2):
        x, y = torch.randn(size, 4, dtype=torch.float64), torch.randint(0, 4, (size,))
        _, truth = oracle.loop_grads(model, F.cross_entropy, x, y)
        assert oracle.worst_error(step(x, y).grads, truth) < 1e-12


def test_no_level_is_left_open() -> None:
    """What raises in the midst of a graph that opens one leaves torch as it was."""

    def fails() -> None:
        with levels_left_as_found():
            torch._C._functorch._vmap_increment_nesting(2, "error")
            raise ValueError("in the midst")

    def inside(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="midst"):
            fails()
        return x.sin()

    with pytest.raises(ValueError, match="midst"):
        fails()
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch.zeros(2).requires_grad_().requires_grad
    assert torch.equal(torch.func.vmap(inside)(torch.ones(2)), torch.ones(2).sin())
