"""Inputs that carry autograd's graph, and labels of kinds that a loss does not take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_inputs import DTYPE, B, check, labels, mlp, x
from torch import Tensor, nn

import psg_fx

GRAPHS: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]] = {
    "an input made by a part of the model": lambda m, x: (m.get_submodule("0")(x)[:, :4], labels()),
    "an input that is a parameter": lambda m, x: (m.get_parameter("0.weight")[:4], labels()),
    "a target that the model has made": lambda m, x: (x, m(x).softmax(1)),
}


@pytest.mark.filterwarnings("ignore:one graph for each batch size")  # cross_entropy of torch 2.11
@pytest.mark.parametrize("name", GRAPHS)
def test_inputs_that_are_computed_from_parameters_are_refused(name: str) -> None:
    """Their gradient goes through the input, too."""
    model = mlp()
    given = GRAPHS[name](model, x(B, 4))
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match=r"(input|target)_0 is computed from the parameter \d\."):
        step(*given)
    with torch.no_grad():
        plain = [t.detach() for t in given]
    assert step(*plain).grads.keys() == dict(model.named_parameters()).keys()


def test_inputs_with_graphs_of_others_are_taken() -> None:
    model, before = mlp(), mlp()
    first = before(x(B, 4)).repeat(1, 2)[:, :4]
    assert first.requires_grad
    check(model, F.cross_entropy, first, labels())
    frozen = mlp()
    frozen.get_submodule("0").requires_grad_(False)
    check(frozen, F.cross_entropy, frozen.get_submodule("0")(x(B, 4).requires_grad_())[:, :4], labels())


def test_without_a_loss_such_inputs_are_taken_where_nothing_is_differentiated() -> None:
    model = nn.Linear(4, 4).to(DTYPE)
    step, first = psg_fx.transform(model, backend="eager"), model(x(B, 4))
    with pytest.raises(psg_fx.NotYetSupported, match="is computed from the parameter"):
        step(first)
    with torch.no_grad():
        torch.testing.assert_close(step(first), model(first))


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda o, y: F.nll_loss(o.log_softmax(1), y)])
def test_labels_of_kinds_that_the_loss_does_not_take(loss: Callable[..., Tensor]) -> None:
    check(mlp(), loss, x(B, 4), labels().to(torch.uint8))
    with pytest.raises(psg_fx.BadArgument, match="the loss does not run on a batch of one sample"):
        psg_fx.transform(mlp(), loss, backend="eager")(x(B, 4), labels().int())
