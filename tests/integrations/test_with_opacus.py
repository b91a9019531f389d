"""Private training through the helper is Opacus' own, from the same seeds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from psg_fx import BadArgument, Norms, NotYetSupported
from support import oracle
from support.selection import one_in
from support.small import mlp

opacus = pytest.importorskip("opacus")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the (largest|smallest):UserWarning"),
]

DATA = TensorDataset(torch.randn(30, 4), torch.randint(3, (30,)))


def loader(size: int = 5) -> Any:
    return DataLoader(DATA, size, generator=torch.Generator().manual_seed(3))


def optimizer(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def private(model: nn.Module, size: int = 5, **options: Any) -> Any:
    from psg_fx.integrations.opacus import PrivateTraining

    usual: Any = {"backend": "eager", "noise_multiplier": 0.8, "max_grad_norm": 0.5}
    usual["generator"] = torch.Generator().manual_seed(7)
    return PrivateTraining(
        model, F.cross_entropy, options.pop("optimizer", optimizer(model)), options.pop("loader", loader(size)),
        **usual | options,
    )  # fmt: skip


class Stream(IterableDataset[Any]):
    """Samples without a number."""

    def __iter__(self) -> Any:
        return iter(DATA)


class Batches(BatchSampler):
    """A choice of the user's."""


def padded(samples: Any) -> Any:
    """Five places, however many samples there are."""
    x, y = (torch.stack([part] * 5) for part in samples[0])
    return x.T, y


def by_opacus(model: nn.Module, size: int = 5, epochs: int = 2, accountant: str = "prv") -> Any:
    engine = opacus.PrivacyEngine(accountant=accountant)
    module, optimizer_, batches = engine.make_private(
        module=model, optimizer=optimizer(model), data_loader=loader(size), noise_multiplier=0.8, max_grad_norm=0.5,
        noise_generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in batches:
            optimizer_.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer_.step()
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(("size", "part"), one_in(3, [(5, None), (5, 3), (1, None), (1, 3)]))
def test_the_weights_and_epsilon_are_those_of_opacus_hooks(size: int, part: int | None) -> None:
    """With an expected batch of one sample, a third of the batches are empty."""
    model = mlp()
    other = copy.deepcopy(model)
    train = private(model, size, part=part)
    sizes = []
    for _ in range(2):
        for x, y in train.loader:
            out = train.step(x, y)
            sizes.append(len(out.losses))
            assert out.clip_factors.shape == out.norms.shape == (len(x),)
    assert (0 in sizes) == (size == 1)
    engine = by_opacus(other, size)
    for (name, value), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert oracle.relative_error(value, want) < 1e-4, name
    assert train.epsilon(1e-4) == pytest.approx(engine.get_epsilon(1e-4))


def test_an_accountant_with_a_history_goes_on() -> None:
    accountant = opacus.accountants.RDPAccountant()
    accountant.step(noise_multiplier=0.8, sample_rate=1 / 6)
    train = private(mlp(), accountant=accountant)
    for x, y in train.loader:
        train.step(x, y)
    assert accountant.history == [(0.8, 1 / 6, 7)]
    assert train.epsilon(1e-4) == accountant.get_epsilon(1e-4)


def test_a_scheduler_on_the_optimizer_is_followed() -> None:
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    from psg_fx.integrations.opacus import PrivateTraining

    train = PrivateTraining(
        model, F.cross_entropy, own, loader(), noise_multiplier=0.8, max_grad_norm=0.5, backend="eager"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: float(step == 1))
    for moves in (False, True, False):
        before = copy.deepcopy(model.state_dict())
        train.step(*DATA[:4])
        schedule.step()
        assert torch.equal(model[0].weight, before["0.weight"]) != moves


def test_the_bound_holds_for_each_sample() -> None:
    train = private(mlp())
    out = train.step(*DATA[:6])
    assert (out.norms * out.clip_factors <= 0.5 + 1e-6).all()
    assert train.transformed.validate(*DATA[:6]).ok


def test_the_bound_is_the_one_that_noise_follows() -> None:
    train = private(mlp())
    schedule = opacus.schedulers.ExponentialGradClip(train.optimizer, gamma=0.1)
    for bound in (0.5, 0.05, 0.005):
        out = train.step(*DATA[:6])
        assert float((out.norms * out.clip_factors).max()) == pytest.approx(bound, rel=1e-4)
        schedule.step()
    train.optimizer.max_grad_norm = float("inf")
    with pytest.raises(BadArgument, match="is not one finite number"):
        train.step(*DATA[:6])


def test_no_sum_lies_in_grad_without_noise() -> None:
    model = mlp()
    train = private(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    train.step(*DATA[:6])
    assert all(p.grad is not None for p in model[0].parameters())
    assert all(p.grad is None for p in model[2].parameters())


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_no_step_has_cost_nothing(accountant: str) -> None:
    assert private(mlp(), accountant=accountant).epsilon(1e-5) == 0.0


@pytest.mark.parametrize("noise", [-1.0, float("nan"), float("inf"), "1"])
def test_noise_that_is_none(noise: Any) -> None:
    with pytest.raises(BadArgument, match="is no standard deviation"):
        private(mlp(), noise_multiplier=noise)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf is not one finite number"),
        ({"max_grad_norm": float("inf"), "noise_multiplier": 0.0}, r"one finite number[^\0]*larger than all norms"),
        ({"max_grad_norm": torch.tensor(float("inf"))}, "is not one finite number"),
        ({"max_grad_norm": -1.0}, "max_norm=-1.0 is not a bound on norms"),
        ({"params": "2.*"}, r"params= is not an option[^\0]*requires_grad_\(False\)"),
        ({"quantities": Norms()}, "quantities= is not an option"),
        ({"accountant": "other"}, "accountant='other' is unknown"),
        ({"loader": [DATA[:3]]}, "the loader is a list"),
        ({"loader": DataLoader(Stream(), 3)}, "the loader's data set is a stream"),
        ({"loader": DataLoader(DATA, 40, drop_last=True)}, "the loader has no batches"),
        ({"loader": DataLoader(DATA, 5, sampler=SubsetRandomSampler(range(9)))}, r"SubsetRandomSampler[^\0]*Subset\("),
        ({"loader": DataLoader(DATA, batch_sampler=Batches(range(30), 5, False))}, "the loader has a Batches"),
        ({"loader": DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler([3]), 5, False))}, "SubsetRandom"),
        ({"loader": DataLoader(DATA, 5, sampler=SequentialSampler(range(9)))}, "the loader has a SequentialSampler"),
        ({"loader": DataLoader(DATA, 5, sampler=RandomSampler(range(9)))}, "the loader has a RandomSampler"),
        ({"batch_dim": (1, 0), "loader": DataLoader(DATA, 5, collate_fn=padded)}, "no entries in the first dim"),
        ({"loader": DataLoader(range(9), 3)}, r"a sample is of type int[^\0]*\(sample,\)"),
        ({"optimizer": 3}, "the optimizer is of type int"),
        ({"generator": 3}, "generator=3 is of type int"),
        ({"accountant": None}, "accountant=None is none"),
        ({"accountant": opacus.accountants.RDPAccountant}, "RDPAccountant'> is none"),
        ({"optimizer": torch.optim.LBFGS(mlp().parameters())}, "the optimizer is a LBFGS"),
        ({"optimizer": private(mlp()).optimizer}, "the optimizer is already a DPOptimizerFastGradientClipping"),
        ({"optimizer": optimizer(mlp())}, "the optimizer has parameters that the model does not have"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(BadArgument, match=text):
        private(mlp(), **given)


@pytest.mark.parametrize(("samples", "size", "expected"), [(30, 4, 3.75), (49, 1, 1.0), (30, 5, 5.0)])
def test_sums_are_divided_by_the_expected_number_of_samples(samples: int, size: int, expected: float) -> None:
    """49 times 1 / 49 is less than 1 in floats."""
    model, data = mlp(), TensorDataset(torch.randn(samples, 4), torch.randint(3, (samples,)))
    before = copy.deepcopy(model.state_dict())
    train = private(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loader=DataLoader(data, size),
        noise_multiplier=0.0,
    )  # fmt: skip
    total = train.step(*data[:6]).clipped_sum
    for name, value in model.state_dict().items():
        assert torch.allclose(before[name] - value, total[name] / expected, atol=1e-6), name


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(NotYetSupported, match="PrivateTraining in several processes"):
        private(mlp())


def test_parameters_of_half_precision_are_refused() -> None:
    model = nn.Linear(4, 3).bfloat16()
    with pytest.raises(BadArgument, match="weight is bfloat16"):
        private(model)


def test_a_first_batch_without_samples_has_the_form_of_the_others() -> None:
    """Opacus knows the form of dicts and nested tuples from a batch that it has seen."""
    from psg_fx.integrations.opacus import PrivateTraining

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.layer(x), y)

    rows: Any = [{"x": torch.randn(4), "y": k % 3} for k in range(5)]
    model = Labelled()
    made = PrivateTraining(
        model, lambda loss: loss, optimizer(model), DataLoader(rows, 1), noise_multiplier=1.0, max_grad_norm=1.0,
        backend="eager",
    )  # fmt: skip
    empty = made.loader.collate_fn([])
    assert {name: len(value) for name, value in empty.items()} == {"x": 0, "y": 0}
    made.step(empty)
