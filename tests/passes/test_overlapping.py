"""Inductor writes into memory of its own for each element, also where rows or windows share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.torch_private.overlapping import may_overlap
from support import oracle

Change = Callable[[Tensor, Tensor], Tensor]
TWO, ODD = torch.tensor([1, 3]), torch.arange(48).view(6, 8) % 2 == 1
X = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))


class Changed(nn.Module):
    """`change(h, x)` of rows h `[B, 6, 8]` that lie in one, or of windows `[B, 4, 8, 3]` of rows."""

    def __init__(self, change: Change, windows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change, self.windows = nn.Linear(8, 8), change, windows

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = self.change(h.unfold(1, 3, 1) if self.windows else h[:, :1].expand(-1, 6, -1), x).flatten(1)
        return (h.tanh() * torch.arange(h.shape[1]).cos()).sum(1)


def put(h: Tensor, x: Tensor) -> Tensor:
    h[:, [1, 4]] = x[:, :2]
    return h


ROWS: dict[str, Change] = {
    "times ones": lambda h, x: put(h * torch.ones_like(x), x),
    "plus zeros": lambda h, x: put(h + torch.zeros(6, 1), x),
    "index_add": lambda h, x: h.index_add(1, TWO, x[:, :2]),
    "index_copy": lambda h, x: h.index_copy(1, TWO, x[:, :2]),
    "index_fill": lambda h, x: h.index_fill(1, TWO, 0.5),
    "scatter_add": lambda h, x: h.scatter_add(1, TWO[None, :, None].expand(x.shape[0], 2, 8), x[:, :2]),
    "masked_fill": lambda h, x: h.masked_fill(ODD, 2.0),
    "slice_scatter": lambda h, x: h.slice_scatter(x[:, :2], 1, 2, 4),
    "select_scatter": lambda h, x: h.select_scatter(x[:, 0], 1, 3),
    "diagonal_scatter": lambda h, x: h.diagonal_scatter(x[:, 0, :6], 0, 1, 2),
}
WINDOWS: dict[str, Change] = {
    "index_add": lambda h, x: h.index_add(1, TWO, x[:, :2, :, None].expand(-1, -1, -1, 3)),
    "index_copy": lambda h, x: h.index_copy(1, TWO, x[:, :2, :, None].expand(-1, -1, -1, 3)),
    "index_fill": lambda h, x: h.index_fill(3, torch.tensor([0]), 2.0),
}
CASES = [(False, name) for name in ROWS] + [(True, name) for name in WINDOWS]


@pytest.mark.inductor
@pytest.mark.parametrize(("windows", "name"), CASES, ids=[f"{name}, {'windows' * w or 'rows'}" for w, name in CASES])
def test_what_is_written_is_exact(windows: bool, name: str) -> None:
    model, y = Changed((WINDOWS if windows else ROWS)[name], windows), torch.ones(3)
    losses, grads = oracle.loop_grads(model, F.mse_loss, X, y)
    out = psg_fx.transform(model, F.mse_loss, options={"psg_fx.compare_first": False})(X, y)
    torch.testing.assert_close(out.losses.double(), losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.grads["layer.weight"].double(), grads["layer.weight"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("value", "shared"),
    [
        (torch.empty(3, 4, 5), False),
        (torch.empty(3, 4, 5).permute(2, 0, 1)[:, :, ::2], False),
        (torch.empty(0, 4), False),
        (torch.empty(()), False),
        (torch.empty(3, 1).expand(3, 4), True),
        (torch.empty(3, 1).expand(1, 3, 1), False),
        (torch.empty(9).unfold(0, 3, 1), True),
        (torch.empty(9).unfold(0, 3, 3), False),
        (torch.empty(9).as_strided((3, 3), (2, 1)), True),
    ],
)
def test_which_elements_share_memory(value: Tensor, shared: bool) -> None:
    assert may_overlap(value) is shared
