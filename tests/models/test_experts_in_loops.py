"""Experts in a loop, each with the rows that were sent to it, picked by a mask and put back where they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from models.test_experts import batch
from psg_fx import ClippedSum, Norms
from psg_fx.errors import PsgError
from support.rows_of_samples import check
from support.selection import selected

WIDTH, EXPERTS, CHOICES = 4, 3, 2


class Loop(nn.Module):
    """Each token goes to its two best experts."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.gate(flat).softmax(-1).topk(CHOICES, -1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out = self.add(out, e, expert, flat, weights, ids)
        return self.head((flat + out).view(x.shape).mean(1))

    def add(self, out: Tensor, e: int, expert: nn.Module, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Out, and what an expert adds to it."""
        token, choice = torch.where(ids == e)
        return out.index_add(0, token, expert(flat[token]) * weights[token, choice, None])


class OneHot(Loop):
    """As transformers wrote it: the choices come first in the mask, and rows are looked up behind a dim of one."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        choice, token = torch.where(F.one_hot(ids, EXPERTS).permute(2, 1, 0)[e])
        rows = expert(flat[None, token].reshape(-1, WIDTH)) * weights[token, choice, None]
        return out.index_add_(0, token, rows)


class Masked(Loop):
    """A mask of tokens picks and writes."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        hit, weight = (ids == e).any(-1), (weights * (ids == e)).sum(-1)
        out[hit] += weight[hit][:, None] * expert(flat[hit])
        return out


class Numbered(Loop):
    """The same by the numbers of tokens."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        rows, weight = (ids == e).any(-1).nonzero().squeeze(-1), (weights * (ids == e)).sum(-1)
        out[rows] = out[rows] + weight[rows, None] * expert(flat[rows])
        return out


class Written(Loop):
    """Rows of choices are written back with what was there."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        token, choice = torch.where(ids == e)
        out[token] += expert(flat[token]) * weights[token, choice, None]
        return out


class Twice(Written):
    """Tokens are sent to the same expert twice: the last choice stands, and each has the gradient."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        return super().add(out, e, expert, flat, weights, ids // 2)


class EachInOneWay(Loop):
    """Three experts, three ways."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        return (OneHot, Masked, Numbered)[e].add(self, out, e, expert, flat, weights, ids)  # type: ignore[arg-type]


class Replaced(Loop):
    """Rows of a choice are written where they are, and all choices added at the end."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.gate(flat).softmax(-1).topk(CHOICES, -1)
        out = torch.zeros(flat.shape[0], CHOICES, WIDTH, dtype=x.dtype)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out[token, choice] = expert(flat[token]) * weights[token, choice, None]
        return self.head((flat + out.sum(1)).view(x.shape).mean(1))


class OfImages(Loop):
    """A mask `[B, T]` over tokens that were never flattened."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            out[mask] = expert(x[mask]) * weights[mask][:, None]
        return self.head((x + out).mean(1))


def made(kind: type[nn.Module], *given: int) -> nn.Module:
    torch.manual_seed(0)
    return kind(*given).double()


KINDS = [Loop, OneHot, Masked, Numbered, Written, Twice, EachInOneWay, Replaced, OfImages]


@pytest.mark.parametrize("kind", selected(KINDS, {"Twice", "EachInOneWay", "Replaced", "OfImages"}))
def test_norms_and_sums(kind: type[nn.Module]) -> None:
    """One step for all batch sizes."""
    check(made(kind), F.cross_entropy, [batch(4), batch(1)], quantities=[Norms(), ClippedSum(0.1)])


class Logarithms(Loop):
    """Rows that are not sent to the last expert are where it is not defined."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        hit = flat[:, 0] > 0.1 * e
        rows = flat[hit]
        return out.index_put((hit,), expert(rows) * (rows[:, :1] - 0.1 * e).log() + out[hit])


@pytest.mark.slow
def test_rows_that_are_not_picked_leave_no_trace() -> None:
    """An expert is computed from rows that were sent to it alone, so nothing is infinite or no number."""
    check(made(Logarithms, 2), F.cross_entropy, [batch(5)], quantities=[Norms()])


class Elsewhere(Loop):
    """What an expert says of a token is added to another one."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        token, _ = torch.where(ids == e)
        return out.index_add(0, token.flip(0), expert(flat[token]))


class Statistic(Loop):
    """An expert normalises its rows over all samples."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        token, _ = torch.where(ids == e)
        rows = flat[token]
        return out.index_add(0, token, expert(rows - rows.mean(0)))


class Counted(Loop):
    """What an expert says is divided by the number of its rows."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        token, _ = torch.where(ids == e)
        return out.index_add(0, token, expert(flat[token]) / token.shape[0])


class First(Loop):
    """An expert takes no more than two rows of the batch."""

    def add(self, out, e, expert, flat, weights, ids):  # type: ignore[no-untyped-def]
        token, _ = torch.where(ids == e)
        place = torch.ones_like(token).cumsum(0)
        return out.index_add(0, token, torch.where((place <= 2)[:, None], expert(flat[token]), 0.0))


@pytest.mark.parametrize("kind", selected([Elsewhere, Statistic, Counted, First], {"Elsewhere", "Statistic", "First"}))
def test_what_joins_rows_is_refused(kind: Callable[[], nn.Module]) -> None:
    step = psg_fx.transform(made(kind, 2), F.cross_entropy, quantities=Norms(), backend="eager")  # type: ignore[arg-type]
    given = batch(3).whole
    with pytest.raises(PsgError):
        step(given.inputs[0], given.targets[0])
