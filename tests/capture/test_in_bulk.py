"""Functions of lists of tensors at once, by which libraries compute with dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import SamplesMixed
from support import oracle
from support.selection import one_in


def in_place(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    found = [a.clone(), b.clone()]
    torch._foreach_mul_(found, 2.0)
    torch._foreach_add_(found, [b, a], alpha=3)
    torch._foreach_addcmul_(found, [a, b], [b, a], 0.5)
    torch._foreach_lerp_(found, [a, b], 0.3)
    torch._foreach_zero_([found[0]])
    return found


IN_BULK: dict[str, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {
    "a number": lambda a, b: torch._foreach_mul([a, b], 2.0),
    "numbers": lambda a, b: torch._foreach_mul([a, b], [2.0, 3.0]),
    "a tensor": lambda a, b: torch._foreach_mul([a, b], torch.tensor(2.0, dtype=torch.float64)),
    "tensors": lambda a, b: torch._foreach_div((a, b), (b, a)),
    "a factor": lambda a, b: torch._foreach_add([a, b], [b, a], alpha=0.5),
    "named": lambda a, b: torch._foreach_sub(self=[a, b], other=[b, b]),
    "three": lambda a, b: torch._foreach_addcmul([a, b], [b, b], [a, a], 0.5),
    "powers": lambda a, b: torch._foreach_pow(2.0, torch._foreach_pow([a, b], 2)),
    "bounds": lambda a, b: torch._foreach_maximum(torch._foreach_minimum([a, b], [b, a]), 0.7),
    "one by one": lambda a, b: torch._foreach_exp((a, b)),
    "in place": in_place,
}


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 3).double(), nn.Linear(4, 3).double(), function

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.function(self.first(x).sigmoid() + 0.5, self.second(x).sigmoid() + 0.5)
        return a - 2 * b


@pytest.mark.parametrize("name", one_in(2, list(IN_BULK)))
def test_lists_of_tensors(name: str) -> None:
    model = Model(IN_BULK[name])
    step = psg_fx.transform(model, F.mse_loss, backend="eager")
    for size in (4, 1):
        x, y = torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64)
        _, truth = oracle.loop_grads(model, F.mse_loss, x, y)
        assert oracle.worst_error(step(x, y).grads, truth) < 1e-12


def normed(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    return torch._foreach_div([a, b], list(torch._foreach_norm([a, b])))


def test_norms() -> None:
    """Each is of a whole tensor, and so of all samples."""
    step = psg_fx.transform(Model(normed), F.mse_loss, backend="eager")
    with pytest.raises(SamplesMixed):
        step(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64))
