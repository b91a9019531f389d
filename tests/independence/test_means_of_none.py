"""Means of what a mask picks, behind a branch on whether it picks anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import PsgError
from support import oracle
from support.selection import on_two_backends

PLACES, CLASSES = 4, 5
torch.manual_seed(0)
X, LABELS = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 3, (5, PLACES))
MASK = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, PLACES * CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, (PLACES, CLASSES))


def each(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), y, reduction="none")


def zero_instead(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    if m.sum() == 0:
        return o.sum() * 0
    return F.cross_entropy(o[m], y[m])


def a_number_instead(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return o.square().mean() + (each(o, y)[m].mean() if m.any() else torch.tensor(0.0, dtype=o.dtype))


def zeros_instead(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return o.square().mean() + (each(o, y)[m].mean() if m.any() else o.new_zeros(()))


def added(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    loss = o.square().mean()
    if m.any():
        loss = loss + o[m].square().mean()
    return loss


def nothing_instead(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    loss = F.cross_entropy(o[m], y[m]) if m.any() else None
    return o.exp().mean() if loss is None else loss + o.exp().mean()


def divided(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    loss, n = (each(o, y) * m).sum(), m.sum()
    if n > 0:
        loss = loss / n
    return loss


def by_one_more(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    n = m.sum()
    if n == 0:
        n = n + 1
    return (each(o, y) * m).sum() / n


def of_classes(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    loss: Tensor | float = 0.0
    for c in range(3):
        own = y == c
        if own.sum() > 0:
            loss = loss + o[own].square().mean() * (c + 1)
    return loss + o.mean()


def counted_by_rows(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    picked = o[m]
    if picked.numel() == 0:
        return 0.0 * o.sum()
    return F.mse_loss(picked, torch.zeros_like(picked))


def listed(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    places = torch.where(m)
    if len(places[0]) == 0:
        return o.sum() * 0
    return F.cross_entropy(o[places], y[places])


def of_squares(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    loss, n = (F.mse_loss(o, torch.ones_like(o), reduction="none") * m[..., None]).sum(), m.sum()
    return loss / (n * 3) if n > 0 else loss


def by_a_share(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    loss = ((o - 1) ** 2 * m[..., None]).sum()
    return loss / m.double().mean() if m.any() else (o / 0.5).pow(2).sum() * 0


def of_labels(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    labels = torch.where(m, y, -100)
    if (labels != -100).sum() == 0:
        return o.sum() * 0
    return F.cross_entropy(o.reshape(-1, CLASSES), labels.reshape(-1))


def divided_also_of_all(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """What is no zero where the mask picks nothing."""
    loss, n = o.square().sum(), m.sum()
    if n > 0:
        loss = loss / n
    return loss


def of_centres(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """The focal loss of CenterNet (Zhou et al. 2019, arXiv:1904.07850)."""
    p, picked = o[..., 0].sigmoid().clamp(1e-4, 1 - 1e-4), m.double()
    of_picked = (p.log() * (1 - p) ** 2 * picked).sum()
    of_others = ((1 - p).log() * p**2 * (1 - picked)).sum()
    n = picked.sum()
    if n == 0:
        return -of_others
    return -(of_picked + of_others) / n


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: list[Loss] = [
    zero_instead, a_number_instead, zeros_instead, added, nothing_instead, divided, by_one_more, of_classes,
    counted_by_rows, listed, of_squares, by_a_share, of_labels, divided_also_of_all, of_centres,
]  # fmt: skip


@pytest.mark.parametrize(("loss", "backend"), on_two_backends(LOSSES))
def test_exact(loss: Loss, backend: str) -> None:
    sizes = (5, 2, 1) if backend == "eager" else (5,)
    model = Heads()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend=backend)
    oracle.check_batches(step, model, loss, X, (LABELS, MASK), sizes)


def of_some(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Not a number where the mask picks something, of which nothing counts."""
    return each(o, y)[m & (y == 2)].mean() if m.any() else o.sum() * 0


def weighted(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    if m.sum() == 0:
        return o.sum() * 0
    return F.cross_entropy(o[m], y[m], weight=torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0], dtype=o.dtype))


def ignored(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return F.cross_entropy(o[m], torch.where(y[m] == 0, -100, y[m])) if m.any() else o.sum() * 0


def signed(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    w = m * (1 - y)
    return (each(o, y) * w).sum() / w.sum() if w.any() else o.sum() * 0


@pytest.mark.parametrize("loss", [of_some, weighted, ignored, signed])
def test_what_is_not_a_number_stays_so(loss: Loss) -> None:
    """Divisors that are zero also where the mask of the branch picks something."""
    model, labels = Heads(), torch.tensor([[1] * 4, [0] * 4, [2, 0, 0, 0], [0, 0, 0, 2], [0] * 4])
    found = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")(X, (labels, MASK))
    expected = oracle.loop_grads(model, loss, X, (labels, MASK))
    assert not expected[0].isfinite().all()
    torch.testing.assert_close(found.losses, expected[0], equal_nan=True)
    finite = expected[0].isfinite()
    grads = [{n: g[finite] for n, g in of.items()} for of in (found.grads, expected[1])]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_held_in_float32(dtype: torch.dtype) -> None:
    """3000 values of 75 are more than float16 has."""

    def loss(o: Tensor, m: Tensor) -> Tensor:
        return o[m].mean() if m.any() else o.sum() * 0

    model, x, m = nn.Linear(1, 3000).to(dtype), torch.ones(2, 1, dtype=dtype), torch.ones(2, 3000).bool()
    with torch.no_grad():
        model.weight.fill_(75.0)
        model.bias.zero_()
    found = psg_fx.transform(model, loss, quantities=psg_fx.Norms(), backend="eager")(x, m)
    torch.testing.assert_close(found.losses, torch.full((2,), 75.0, dtype=dtype))


def only_the_first(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Another loss where one of three masks picks something, and the others nothing."""
    losses = {k: o[y == k].square().mean() for k in range(3) if (y == k).any()}
    total = sum(losses.values(), o.mean())
    return total * 0.1 if list(losses) == [0] else total


def one_instead(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return each(o, y)[m].mean() if m.any() else o.square().mean()


def meant_all_the_same(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Not a number where the mask picks nothing, in both arms."""
    loss = each(o, y)[m].mean()
    return loss * 2 if m.any() else loss


def of_another_mask(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    other = y == 1
    return each(o, y)[other].mean() if m.any() else o.sum() * 0


def not_finite(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """The derivative of a logarithm of zero, times zero, is not a number."""
    loss, n = (o.relu().log() * m[..., None]).sum(), m.sum()
    return loss / n if n > 0 else o.sum() * 0


@pytest.mark.parametrize("loss", [only_the_first, one_instead, meant_all_the_same, of_another_mask, not_finite])
def test_refused(loss: Loss) -> None:
    with pytest.raises(PsgError, match="whether a mask picks anything"):
        psg_fx.transform(Heads(), loss, quantities=psg_fx.Grads(), backend="eager")(X, (LABELS, MASK))
