"""A step of gradient descent on each task by `vmap(grad)`, whose inner losses pick by labels (Finn et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import psg_fx
from support import oracle

Inner = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def picked(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(1, y.unsqueeze(1)).mean()


def indexed(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1)[torch.arange(5), y].mean()


def weighted(z: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(z.log_softmax(-1), y, WEIGHTS, ignore_index=2)


def summed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum") / 7 + F.cross_entropy(z, y, ignore_index=0, reduction="none").mean()


def one_by_one(z: Tensor, y: Tensor) -> Tensor:
    return vmap(F.cross_entropy)(z, y).mean()


class Learner(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), inner

    def forward(self, x: Tensor, y: Tensor, later: Tensor) -> Tensor:
        parameters = dict(self.net.named_parameters())

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self.inner(functional_call(self.net, parameters, (x,)), y)

        def task(x: Tensor, y: Tensor, later: Tensor) -> Tensor:
            step = grad(loss)(parameters, x, y)
            return loss({name: p - 0.5 * step[name] for name, p in parameters.items()}, later, y)

        return vmap(task)(x, y, later)


def by_old_names(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, size_average=False) / 3


@pytest.mark.parametrize("inner", [F.cross_entropy, picked, indexed, weighted, summed, one_by_one])
def test_gradients(inner: Inner) -> None:
    model = Learner(inner).double()
    step = psg_fx.transform(model, torch.clone, quantities=psg_fx.Grads(), backend="eager")
    for count in (3, 5, 1):
        x, y = torch.randn(2, count, 5, 4, dtype=torch.float64), torch.randint(3, (count, 5))
        found = step((x[0], y, x[1]))
        losses, grads = oracle.loop_grads(model, torch.clone, (x[0], y, x[1]))
        torch.testing.assert_close(found.losses, losses)
        assert oracle.worst_error(found.grads, grads) < 1e-12
    assert len(step.captures) <= 2  # one for a sample alone


def test_a_label_that_is_none_shows() -> None:
    step = psg_fx.transform(Learner(F.cross_entropy), torch.clone, quantities=psg_fx.Norms(), backend="eager")
    x, y = torch.randn(2, 3, 5, 4), torch.randint(3, (3, 5))
    step((x[0], y, x[1]))
    y[1, 2] = 3
    assert step((x[0], y, x[1])).losses.isnan().tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_other_arguments_are_left_to_torch() -> None:
    step = psg_fx.transform(Learner(by_old_names), torch.clone, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match="another one for another batch size"):
        step((torch.randn(3, 5, 4), torch.randint(3, (3, 5)), torch.randn(3, 5, 4)))
