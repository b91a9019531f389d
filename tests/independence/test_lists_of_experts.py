"""Loops over the experts that somebody has chosen: `for k in hit.nonzero():`, `if counts[k] == 0: continue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, PsgError
from support import oracle
from support.programs import square

EXPERTS, CHOSEN = 3, 2


class Experts(nn.Module):
    """Each token goes to two of three experts; `loop(self, chosen, weights, x)` says what becomes of them."""

    def __init__(self, loop: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loop, self.gate = loop, nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))
        self.stacked = nn.Parameter(torch.randn(EXPERTS, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 4)
        weights, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        return self.loop(self, chosen, weights, tokens).view_as(x)


def one_hot(chosen: Tensor) -> Tensor:
    return F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)


def add(out: Tensor, mask: Tensor, weights: Tensor, x: Tensor, expert: Callable[[Tensor], Tensor]) -> None:
    place, rows = torch.where(mask)
    out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])


def in_a_column(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = one_hot(chosen)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for k in hit:
        k = k[0]
        if k == EXPERTS:
            continue
        add(out, mask[k], weights, x, lambda rows, k=k: F.linear(rows, model.stacked[k]))
    return out


def by_modules(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), one_hot(chosen)
    for k in (mask.sum((1, 2)) > 0).nonzero().squeeze(-1):
        add(out, mask[k], weights, x, model.experts[k])
    return out


def as_python_has_it(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen[..., None] == torch.arange(EXPERTS)
    for k in mask.any(dim=(0, 1)).nonzero().flatten().tolist():
        rows, place = torch.where(mask[..., k])
        out.index_add_(0, rows, model.experts[k](x[rows]) * weights[rows, place, None])
    return out


def of_one_mask(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), (chosen[..., None] == torch.arange(EXPERTS)).any(1)
    (hit,) = torch.where(mask.any(dim=0))
    for k in hit:
        rows = mask[:, k].nonzero().squeeze(1)
        out[rows] += model.experts[int(k)](x[rows])
    return out


def counts(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), one_hot(chosen)
    count = mask.sum((1, 2))
    for k in range(EXPERTS):
        if count[k] == 0:
            continue
        add(out, mask[k], weights, x, model.experts[k])
    return out


def by_their_numbers(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    first, out = chosen[:, 0], torch.zeros_like(x)
    for k in (F.one_hot(first, EXPERTS).sum(0) > 0).nonzero():
        k = k[0]
        (rows,) = torch.where(first == k)
        out.index_add_(0, rows, model.experts[k](x[rows]))
    return out


def turned(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k in one_hot(chosen).any((-1, -2)).nonzero().flatten().tolist():
        rows, place = torch.where(chosen == k)
        out.index_add_(0, rows, model.experts[k](x[rows]) * weights[rows, place, None])
    return out


LOOPS = [by_their_numbers, turned, in_a_column, by_modules, as_python_has_it, of_one_mask, counts]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_gradients(loop: Any) -> None:
    torch.manual_seed(0)
    model = Experts(loop).double()
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    for count in (5, 1, 2):
        x = torch.randn(count, 2, 4, dtype=torch.float64)
        oracle.check_call(step, model, square, x)
    assert len(step.captures) == 1


def how_many(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """What comes out depends on how many samples are in a batch together."""
    out, mask, met = torch.zeros_like(x), one_hot(chosen), 0
    for k in (mask.sum((1, 2)) > 0).nonzero().squeeze(-1):
        add(out, mask[k], weights, x, model.experts[k])
        met += 1
    return out / met


def not_chosen(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    mask = one_hot(chosen)
    for k in (mask.sum((1, 2)) == 0).nonzero().squeeze(-1):
        x = model.experts[k](x)
    return x


def of_numbers_that_may_cancel(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), one_hot(chosen) * x.sign().long().sum(1)
    for k in (mask.sum((1, 2)) > 0).nonzero().squeeze(-1):
        add(out, mask[k], weights, x, model.experts[k])
    return out


def another_shape(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """The rows of a mask in another shape are other rows."""
    out, mask = torch.zeros_like(x), (chosen[..., None] == torch.arange(EXPERTS)).any(1)
    turned = mask.T.contiguous().view(EXPERTS, -1).reshape(-1, EXPERTS)
    for k in turned.any(0).nonzero().squeeze(-1):
        rows = mask[:, k].nonzero().squeeze(1)
        out[rows] += model.experts[k](x[rows])
    return out


def numbers_written_since(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    first, out = chosen[:, 0].clone(), torch.zeros_like(x)
    hit = (F.one_hot(first, EXPERTS).sum(0) > 0).nonzero().flatten()
    first.clamp_(max=1)
    for k in hit:
        (rows,) = torch.where(first == k)
        out.index_add_(0, rows, model.experts[k](x[rows]))
    return out


def of_another_class(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    first, out = chosen[:, 0], torch.zeros_like(x)
    for k in (F.one_hot(first, EXPERTS).sum(0) > 0).nonzero().flatten():
        (rows,) = torch.where(first == EXPERTS - 1 - k)
        out.index_add_(0, rows, model.experts[k](x[rows]))
    return out


def written_since(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), one_hot(chosen)
    hit = (mask.sum((1, 2)) > 0).nonzero().squeeze(-1)
    mask[0] = 1
    for k in hit:
        add(out, mask[k], weights, x, model.experts[k])
    return out


def samples(model: Any, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """As many turns as a batch has samples."""
    out = x.clone()
    for k in (x[:, 0] > 0).nonzero():
        out[k] = model.experts[0](x[k])
    return out


REFUSED = [
    numbers_written_since,
    of_another_class,
    how_many,
    not_chosen,
    of_numbers_that_may_cancel,
    another_shape,
    written_since,
    samples,
]


@pytest.mark.parametrize("loop", REFUSED, ids=lambda f: f.__name__)
def test_refused(loop: Any) -> None:
    step = psg_fx.transform(Experts(loop).double(), square, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError) as error:
        step(torch.randn(5, 2, 4, dtype=torch.float64))
    assert "test_lists_of_experts.py" in error.value.where
