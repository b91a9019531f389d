"""Arguments that a call does not take, and the whole text that each of them gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import psg_fx
from psg_fx import BadArgument
from psg_fx.algebra.asks import Materialized
from support.small import WithLayer, mlp, step
from support.texts import Row, check_refusal

X, Y = torch.zeros(3, 4), torch.tensor([0, 1, 2])


class OneAsk(psg_fx.Quantity):
    field = "one"

    def asks(self) -> Any:
        return Materialized()


class Shifted(WithLayer):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + by
        return out


def in_its_own_model() -> psg_fx.PerSampleModule:
    model = mlp()
    model.step = step = psg_fx.transform(model, F.cross_entropy)
    return step


ROWS: dict[str, Row] = {
    "gradients-of-a-name": (
        lambda: psg_fx.distributed.set_grad("m", {}), BadArgument,  # type: ignore[arg-type]
        "model is a str", "psg_fx.distributed.set_grad(model, values)", "its parameters are found by name",
        "pass the module that the step was made of",
    ),
    "gradients-times-no-number": (
        lambda: psg_fx.distributed.set_grad(mlp(), {}, math.nan), BadArgument,
        "scale=nan is no finite number", "psg_fx.distributed.set_grad(model, values, scale)",
        "every value is multiplied by it", "pass a float, such as 1 / (expected number of samples)",
    ),
    "a-step-in-its-own-model": (
        lambda: in_its_own_model()(X, Y), BadArgument,
        "the model has its own step as its module step", "model.step = psg_fx.transform(model, ...)",
        "a step has the modules of its model, and would be one of its own: train() and state_dict() go through all of "
        "them, and would never end",
        "keep it outside of the model, or in a list: self.steps = [psg_fx.transform(self, ...)]; and del model.step",
    ),
    "a-loss-that-is-none": (
        lambda: psg_fx.benchmark(mlp(), None, X, Y), BadArgument,  # type: ignore[arg-type]
        "loss_fn is None", "benchmark(model, loss_fn, inputs, targets)",
        "the ordinary step, which all others are timed beside, is the gradient of a loss",
        "pass the loss: benchmark(model, F.cross_entropy, x, y)",
    ),
    "a-bound-at-the-call": (
        lambda: step(quantities=psg_fx.ClippedSum(1.0))(X, Y, max_norm=2.0), BadArgument,
        "step() got max_norm", "step(inputs, targets, ...)", "no quantity of this step reads it",
        "set it where the quantity is made: ClippedSum(max_norm=...)",
    ),
    "a-tolerance-cut-short": (
        lambda: step().validate(X, Y, tol=1.0), BadArgument, "step.validate() got tol",
        "step.validate(inputs, targets, ...)", "did you mean tolerance?",
        "step.validate(inputs, targets, tolerance=...)",
    ),
    "a-keyword-that-a-file-does-not-read": (
        lambda: step(quantities=psg_fx.WeightedSum()).export("no.pt2", X, Y, wieghts=Y), BadArgument,
        "step.export() got wieghts", "step.export(path, inputs, targets, ...)", "did you mean weights?",
        "step.export(path, inputs, targets, weights=...)",
    ),
    "one-ask-that-is-no-tuple": (
        lambda: step(quantities=OneAsk()), BadArgument, "OneAsk.asks() gives g[b]", "transform(quantities=...)",
        "a quantity may ask for several contractions of the gradients",
        "return a tuple of psg_fx.algebra.asks: (SquaredNorm(),)",
    ),
    "dims-without-those-of-keywords": (
        lambda: step(Shifted(), loss=None, batch_dim=(0,))(X, by=Y[:1]), BadArgument,
        "batch_dim=((0,), None) does not fit the arguments", "transform(batch_dim=...)",
        "it has 1 entry for 1 positional argument and the keyword by",
        "give one int for everything, or (inputs_dims, targets_dims), each an int, None, or ints and Nones arranged "
        "like the arguments; of a call with keywords, their dims come last: (0, {'by': None})",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_text(name: str) -> None:
    check_refusal(ROWS[name])


def test_names_that_are_no_text() -> None:
    with pytest.raises(BadArgument, match=r"it is called with the keyword 0"):
        step()({0: X}, Y)


def test_dims_of_keywords_beside_positions() -> None:
    model = Shifted()
    by = torch.randn(3)
    found = step(model, loss=None, batch_dim=(0, {"by": None}))(X, by=by)
    torch.testing.assert_close(found, model(X, by))
