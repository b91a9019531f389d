"""Reads and writes at places that a mask picks: losses of detectors, whose boxes are matched to padded targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.selection import on_two_backends

QUERIES, TARGETS, CLASSES = 5, 3, 4
torch.manual_seed(0)
X = torch.randn(4, 6, dtype=torch.float64)
MATCHED = torch.stack([torch.randperm(QUERIES)[:TARGETS] for _ in X])
VALID = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
LABELS, BOXES = torch.randint(0, CLASSES - 1, (4, TARGETS)), torch.rand(4, TARGETS, 4, dtype=torch.float64)
OF_QUERIES, POSITIVE = torch.randint(0, CLASSES, (4, QUERIES)), torch.rand(4, QUERIES) > 0.5
Out = tuple[Tensor, Tensor]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.query, self.layer = nn.Embedding(QUERIES, 8), nn.Linear(6, 8)
        self.classes, self.boxes = nn.Linear(8, CLASSES), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Out:
        h = (self.query.weight + self.layer(x)[:, None]).tanh()
        return self.classes(h), self.boxes(h).sigmoid()


def of_samples(places: Tensor) -> Tensor:
    return torch.arange(places.shape[0])[:, None].expand_as(places)


def of_a_set(out: Out, labels: Tensor, boxes: Tensor, places: Tensor, valid: Tensor) -> Tensor:
    """As DETR's (Carion et al. 2020), of targets that are padded."""
    (logits, found), b = out, of_samples(places)
    classes = torch.full(logits.shape[:2], CLASSES - 1)
    classes[b[valid], places[valid]] = labels[valid]
    loss = F.cross_entropy(logits.transpose(1, 2), classes, torch.tensor([1, 1, 1, 0.1], dtype=logits.dtype))
    distance = F.l1_loss(found[b[valid], places[valid]], boxes[valid], reduction="none").sum()
    return loss + distance / valid.sum().clamp(min=1)


def of_ones(out: Out, labels: Tensor, positive: Tensor) -> Tensor:
    target = torch.zeros_like(out[0])
    target[positive, labels[positive]] = 1
    return F.binary_cross_entropy_with_logits(out[0], target)


def of_chosen(out: Out, labels: Tensor, positive: Tensor) -> Tensor:
    return -out[0].log_softmax(-1)[positive, labels[positive]].sum() / QUERIES


def of_flat_places(out: Out, labels: Tensor, positive: Tensor) -> Tensor:
    b, q = of_samples(labels).flatten(), positive.flatten()
    return out[0][b[q], labels.flatten()[q]].square().sum()


def of_sums(out: Out, boxes: Tensor, places: Tensor, valid: Tensor) -> Tensor:
    target, b = torch.zeros_like(out[1]), of_samples(places)
    target = target.index_put((b[valid], places[valid]), boxes[valid], accumulate=True)
    return (out[1] - target).square().mean()


def of_angles(out: Out, labels: Tensor) -> Tensor:
    """As ArcFace's (Deng et al. 2019) in InsightFace: a margin for those that have a label."""
    cosine, index = out[0].mean(1).tanh(), torch.where(labels != -1)[0]
    angles = cosine[index, labels[index].view(-1)].acos() + 0.5
    cosine = cosine.clone()
    cosine[index, labels[index].view(-1)] = angles.cos()
    return F.cross_entropy(cosine * 8, labels, ignore_index=-1, reduction="sum")


def of_cosines(out: Out, labels: Tensor) -> Tensor:
    """As CosFace's (Wang et al. 2018) there."""
    cosine, index = out[0].mean(1).tanh(), torch.where(labels != -1)[0]
    margins = torch.zeros(index.size()[0], CLASSES, dtype=cosine.dtype).scatter_(1, labels[index, None], 0.5)
    cosine = cosine.clone()
    cosine[index] -= margins
    return F.cross_entropy(cosine * 8, labels, ignore_index=-1, reduction="sum")


LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a-set": (of_a_set, (LABELS, BOXES, torch.where(VALID, MATCHED, -1), VALID)),
    "from-the-end": (of_a_set, (LABELS, BOXES, torch.where(VALID, MATCHED - QUERIES, 7), VALID)),
    "ones": (of_ones, (OF_QUERIES, POSITIVE)),
    "chosen": (of_chosen, (OF_QUERIES, POSITIVE)),
    "flat": (of_flat_places, (OF_QUERIES, POSITIVE)),
    "angles": (of_angles, (torch.tensor([1, -1, 3, 0]),)),
    "cosines": (of_cosines, (torch.tensor([-1, 2, 3, 0]),)),
    "sums": (of_sums, (BOXES, torch.where(VALID, MATCHED % 2, 9), VALID)),
}


@pytest.mark.parametrize(("way", "backend"), on_two_backends(LOSSES))
def test_exact(way: str, backend: str) -> None:
    loss, targets = LOSSES[way]
    model = Detector()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend=backend)
    oracle.check_batches(step, model, loss, X, targets, (4, 2, 1) if backend == "eager" else (4, 1))


def test_rows_of_others_are_refused() -> None:
    def mixed(out: Out, places: Tensor, valid: Tensor) -> Tensor:
        b = torch.arange(places.shape[0]).flip(0)[:, None].expand_as(places)
        return out[1][b[valid], places[valid]].sum()

    with pytest.raises((psg_fx.SamplesMixed, psg_fx.NotYetSupported)):
        psg_fx.transform(Detector(), mixed, backend="eager")(X, (MATCHED, VALID))
