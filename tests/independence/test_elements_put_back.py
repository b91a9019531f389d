"""Elements that a mask picks, computed with, and put back where they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psg_fx import PsgError
from support.programs import Refused, Row, check_answer, check_refusal, program, square, tokens


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`function(h)` for activations h [B, T, C]."""
    return program(lambda x, w: function(x @ w), w=(4, 3))


def scaled(h: Tensor) -> Tensor:
    h = h * 1
    h[h < 0] *= 0.1
    return h


def computed_again(h: Tensor) -> Tensor:
    h = h.clone()
    h[h < 0] = h[h < 0].exp()
    return h


def both_sides(h: Tensor) -> Tensor:
    inside, out = h.abs() < 0.5, torch.zeros_like(h)
    out[inside] = h[inside].square()
    out[~inside] = h[~inside] * 2 + 1
    return out


def of_two_values(h: Tensor) -> Tensor:
    """As bins of splines are: what is picked of one is computed with what is picked of another."""
    inside, out = h.abs() < 0.5, h.clone()
    out[inside] = (h.sin()[inside] * h.flip(1)[inside]).tanh() + h[inside]
    return out


def numbers(h: Tensor) -> Tensor:
    bins = (h.detach() * 3).floor().long()
    bins[bins < 0] -= 1
    bins[(bins > 0) * (bins == 2)] += 4
    return h * bins


def scattered(h: Tensor) -> Tensor:
    mask = h < 0.2
    return h.masked_scatter(mask, h.masked_select(mask) * 2) + torch.ones_like(h).masked_scatter(mask, h[mask].cos())


def added(h: Tensor) -> Tensor:
    mask = h > 0
    return h.index_put((mask,), h[mask].exp(), accumulate=True)


def in_the_last_dims(h: Tensor) -> Tensor:
    """The samples lie in the middle of the mask."""
    turned = h.transpose(0, 1).contiguous()
    turned[turned < 0] = turned[turned < 0].sin() - 1
    return turned.transpose(0, 1)


def of_more_dims(h: Tensor) -> Tensor:
    pairs = (h.unsqueeze(-1) - h.unsqueeze(-2)).contiguous()
    pairs[pairs > 0] = pairs[pairs > 0].log1p()
    return pairs.sum(-1)


def by_places(h: Tensor) -> Tensor:
    i, j, k = torch.where(h < 0)
    out = h.clone()
    out[i, j, k] = out[i, j, k].exp()
    return out


PUT_BACK = {
    f.__name__: Row(of(f), square, tokens)
    for f in (
        scaled, computed_again, both_sides, of_two_values, numbers, scattered, added, in_the_last_dims, of_more_dims,
        by_places,
    )
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", PUT_BACK)
def test_equals_the_loop(name: str) -> None:
    check_answer(PUT_BACK[name])


def by_the_mean(h: Tensor) -> Tensor:
    h = h.clone()
    h[h < 0] = h[h < 0] - h[h < 0].mean()
    return h


def of_another_mask(h: Tensor) -> Tensor:
    """As many only where it happens to be."""
    h = h.clone()
    h[h < 0] = h[h < 0.0001].exp()
    return h


def turned_round(h: Tensor) -> Tensor:
    h = h.clone()
    h[h < 0] = h[h < 0].flip(0)
    return h


REFUSED: dict[str, Refused] = {
    f.__name__: (of(f), square, tokens, PsgError, words)
    for f, words in ((by_the_mean, ""), (of_another_mask, "a mask picks"), (turned_round, "a mask picks"))
}


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
