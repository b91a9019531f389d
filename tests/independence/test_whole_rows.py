"""Rows picked number by number, by a mask that is the same along them, and put in rows again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import CaptureFailed, PsgError
from support import oracle
from support.selection import on_two_backends

BOXES, CLASSES = 5, 6
torch.manual_seed(0)
X = torch.randn(4, 3, dtype=torch.float64)
LABELS, WANTED = torch.randint(0, CLASSES, (4, BOXES)), torch.randn(4, BOXES, CLASSES, dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]).bool()
SOME_NONE = MASK & torch.tensor([[1], [1], [0], [1]]).bool()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, BOXES * CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, (BOXES, CLASSES))


def of_boxes(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """As losses of single shot detectors (Liu et al. 2016)."""
    picked = m.unsqueeze(m.dim()).expand_as(o)
    return F.smooth_l1_loss(o[picked].view(-1, CLASSES), t[picked].view(-1, CLASSES), reduction="sum")


def of_tokens(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    rows = o.masked_select(m.unsqueeze(-1)).view(-1, CLASSES)
    return F.cross_entropy(rows, y.masked_select(m), reduction="sum")


def repeated(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    return F.cross_entropy(o[m[..., None].repeat(1, 1, CLASSES)].reshape(-1, CLASSES), y[m], reduction="sum")


def counted(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    rows = o[m.unsqueeze(-1).expand_as(o)].view(-1, CLASSES)
    return F.cross_entropy(rows, y[m], reduction="sum") / rows.size(0)


def meant(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    return F.cross_entropy(o[m.unsqueeze(-1).expand(-1, -1, CLASSES)].view(-1, CLASSES), y[m])


def two_dims(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    parts = o.unflatten(2, (2, 3))
    return parts[m[..., None, None].expand_as(parts)].view(-1, CLASSES).logsumexp(-1).sum()


def of_samples(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """A mask that is the same along more dims than the rows have."""
    return o[m[:, :1, None].expand_as(o)].view(-1, CLASSES).softmax(1).square().sum()


def by_their_own(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    picked = ((o.sum(-1, keepdim=True) > 0) | m.unsqueeze(-1)).expand_as(o)
    return o[picked].view(-1, CLASSES).square().sum()


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LOSSES: list[Loss] = [of_boxes, of_tokens, repeated, counted, meant, two_dims, of_samples, by_their_own]


@pytest.mark.parametrize(("loss", "backend"), on_two_backends(LOSSES))
def test_exact(loss: Loss, backend: str) -> None:
    if loss in (of_tokens, repeated, counted, meant) and torch.__version__ < "2.12":
        pytest.skip("its export compares the numbers of rows with those of labels, and gives up")
    targets = LABELS, WANTED, MASK if loss in (counted, meant) else SOME_NONE
    model = Heads()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend=backend)
    oracle.check_batches(step, model, loss, X, targets, (4, 2, 1) if backend == "eager" else (4,))


def test_numbers_of_several_rows_are_refused() -> None:
    def other(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
        return o[m.unsqueeze(-1).expand_as(o)].view(-1, 4).logsumexp(-1).sum()

    even = torch.ones_like(MASK) & (torch.arange(BOXES) < 4)
    with pytest.raises(PsgError, match="a mask picks"):
        psg_fx.transform(Heads(), other, quantities=psg_fx.Grads(), backend="eager")(X, (LABELS, WANTED, even))


OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda s: s.logsumexp(-1),
    "roll": lambda s: torch.einsum("ni,ni->n", s, s.roll(1, -1)),
    "cummax": lambda s: s.cummax(-1)[0],
    "group_norm": lambda s: F.group_norm(s, 3).square(),
    "triplets": lambda s: F.triplet_margin_loss(s, s.flip(1), s.roll(1, 1), reduction="sum"),
    "ones": lambda s: F.cosine_embedding_loss(s, s.flip(1), s.new_ones(s.shape[0]), reduction="sum"),
    "full": lambda s: F.cross_entropy(s, torch.full((s.shape[0],), 2)),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_ops_on_picked_rows(name: str) -> None:
    """Ops that ask whether there are rows at all, and tensors made for as many as there are."""

    def loss(o: Tensor, m: Tensor) -> Tensor:
        return OF_ROWS[name](o[m]).sum()

    model = Heads()
    found = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")(X, (MASK,))
    torch.testing.assert_close((found.losses, found.grads), oracle.loop_grads(model, loss, X, (MASK,)))


def test_a_length_in_python_names_the_shape() -> None:
    def loss(o: Tensor, m: Tensor) -> Tensor:
        return (o[m] * torch.ones(len(o[m]), 1)).sum()

    with pytest.raises(CaptureFailed, match=r"len\(\) makes an integer(?s:.)*x.shape\[0\]"):
        psg_fx.transform(Heads(), loss, quantities=psg_fx.Grads(), backend="eager")(X, (MASK,))
