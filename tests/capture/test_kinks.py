"""Losses that are written out have torch's gradient where they have a kink: logits that are whole numbers meet it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

LOGITS = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, -1.0, 0.0], [2.0, 1.0, 1.0, 3.0]])
CLASSES, LABELS = torch.tensor([0, 1, 3]), torch.tensor([[0, 2, -1, 0], [1, -1, 0, 0], [3, 0, -1, 2]])
SIGNS = torch.tensor([1.0, -1.0, 1.0])[:, None].expand(3, 4)
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "multi margin": (F.multi_margin_loss, CLASSES),
    "multi margin, squared": (lambda o, y: F.multi_margin_loss(o, y, p=2), CLASSES),
    "multilabel margin": (F.multilabel_margin_loss, LABELS),
    "hinge embedding": (lambda o, y: F.hinge_embedding_loss(o, y, margin=2.0), SIGNS),
    "margin ranking": (lambda o, y: F.margin_ranking_loss(o, o.flip(1), y, margin=1.0), SIGNS),
    "smooth l1": (lambda o, y: F.smooth_l1_loss(o, y + 1), SIGNS),
    "huber": (lambda o, y: F.huber_loss(o, y + 1), SIGNS),
    "l1": (lambda o, y: F.l1_loss(o, y), SIGNS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_at_a_kink(name: str) -> None:
    loss, y = LOSSES[name]
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
        model.bias.zero_()
    x, y = LOGITS.double(), y.double() if y.is_floating_point() else y
    out = psg_fx.transform(model, loss, backend="eager")(x, y)
    losses, grads = oracle.loop_grads(model, loss, x, y)
    torch.testing.assert_close(out.losses, losses)
    for parameter, grad in grads.items():
        torch.testing.assert_close(out.grads[parameter], grad)


def test_a_weight_of_the_wrong_size_is_refused_as_by_torch() -> None:
    step = psg_fx.transform(
        nn.Linear(4, 4), lambda o, y: F.multi_margin_loss(o, y, weight=torch.ones(7)), backend="eager"
    )
    with pytest.raises(psg_fx.BadArgument, match="weight"):
        step(LOGITS, CLASSES)
