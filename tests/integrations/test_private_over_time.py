"""What changes while private training runs: layers that are frozen, thawed and replaced, values of the optimizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psg_fx import BadArgument
from support.small import mlp

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")

DATA = TensorDataset(torch.randn(30, 4), torch.randint(3, (30,)))


def private(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    from psg_fx.integrations.opacus import PrivateTraining

    usual: Any = {"backend": "eager", "noise_multiplier": 0.8, "max_grad_norm": 0.5, "accountant": "rdp"}
    return PrivateTraining(
        model, F.cross_entropy, optimizer or torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        options.pop("loader", DataLoader(DATA, 5)), **usual | options,
    )  # fmt: skip


class Thawed(nn.Module):
    """A layer of half precision that is frozen at first, in front of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).bfloat16().requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.bfloat16()).float())


def test_half_precision_that_is_thawed_is_refused() -> None:
    model = Thawed()
    train = private(model)
    train.step(*DATA[:6])
    model.body.requires_grad_(True)
    before, steps = model.head.weight.clone(), train.accountant.history[0][2]
    with pytest.raises(BadArgument, match="weight is bfloat16"):
        train.step(*DATA[:6])
    assert torch.equal(model.head.weight, before)
    assert train.accountant.history[0][2] == steps
    model.body.float()
    model.forward = lambda x: model.head(model.body(x))  # type: ignore[method-assign]
    train.step(*DATA[:6])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_that_are_frozen_stay(make: Any) -> None:
    model = mlp()
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    train = private(model, make(model.parameters(), lr=0.1, **options))
    train.step(*DATA[:6])
    model[0].requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    train.step(*DATA[:6])
    assert [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)] == [True] * 2 + [False] * 2
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    train.step(*DATA[:6])
    assert not torch.equal(model[0].weight, before[0])


def test_a_step_under_inference_mode_leaves_no_trace() -> None:
    train = private(mlp())
    with torch.inference_mode():
        train.step(*DATA[:6])
    train.step(*DATA[:6])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("how", ["layer", "assigned"])
def test_parameters_that_the_model_has_no_more_are_refused(how: str, steps: int) -> None:
    model = mlp()
    train = private(model)
    for _ in range(steps):
        train.step(*DATA[:6])
    if how == "layer":
        model[2] = nn.Linear(model[2].in_features, 3)
    else:
        model.load_state_dict(mlp().state_dict(), assign=True)
    with pytest.raises(BadArgument, match=r"the model does not have[^\0]*accountant=private.accountant"):
        train.step(*DATA[:6])
    assert len(train.accountant) == steps
    again = private(model, accountant=train.accountant)
    again.step(*DATA[:6])
    assert train.accountant.history == [(0.8, 1 / 6, steps + 1)]


def test_a_group_that_is_added_is_trained() -> None:
    model = mlp()
    train = private(model, torch.optim.SGD(model[2].parameters(), lr=0.3))
    train.step(*DATA[:6])
    train.optimizer.original_optimizer.add_param_group({"params": [*model[0].parameters()]})
    before = model[0].weight.clone()
    train.step(*DATA[:6])
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("noise", [-1.0, float("nan"), float("inf"), "1", None])
def test_noise_that_is_none_any_more(noise: Any) -> None:
    model = mlp()
    train = private(model)
    train.step(*DATA[:6])
    before = model[0].weight.clone()
    train.optimizer.noise_multiplier = noise
    with pytest.raises(BadArgument, match="is no standard deviation"):
        train.step(*DATA[:6])
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_in_words(how: Any) -> None:
    train = private(mlp())
    train.step(*DATA[:6])
    with pytest.raises(BadArgument, match=r"not copied or pickled[^\0]*accountant.state_dict\(\)"):
        how(train)
    train.step(*DATA[:6])


def test_a_run_that_is_saved_goes_on_as_one_that_was_not() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        return private(mlp(), generator=torch.Generator().manual_seed(7))

    train, fresh = run(), run()
    train.step(*DATA[:6])
    parts = train.model, train.optimizer, train.accountant
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    noise = train.optimizer.generator.get_state()
    train.step(*DATA[6:9])
    for part, state in zip((fresh.model, fresh.optimizer, fresh.accountant), saved, strict=True):
        part.load_state_dict(state)
    fresh.optimizer.generator.set_state(noise)
    fresh.step(*DATA[6:9])
    assert all(map(torch.equal, train.model.parameters(), fresh.model.parameters()))
    assert train.epsilon(1e-5) == fresh.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
@pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning")
def test_without_noise_anything_may_be_known(accountant: str) -> None:
    train = private(mlp(), noise_multiplier=0.0, accountant=accountant)
    train.step(*DATA[:6])
    assert train.epsilon(1e-5) == float("inf")


@pytest.mark.parametrize("delta", [0, 1, -1.0, float("nan"), None])
def test_a_delta_that_is_no_probability(delta: Any) -> None:
    with pytest.raises(BadArgument, match="is no probability"):
        private(mlp()).epsilon(delta)
