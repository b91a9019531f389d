"""Private training in Opacus' PrivacyEngine, with psg_fx and without, from the same seeds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("opacus")

from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

import psg_fx

SIGMA, MAX_NORM, CLASSES = 0.7, 0.4, 3


class Training:
    """The same weights, data, order of batches and noise for every way to train."""

    def __init__(self, batch: int = 8, count: int = 32, seed: int = 0, backend: str = "eager") -> None:
        self.backend = backend
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, CLASSES))
        draw = torch.Generator().manual_seed(1)
        images = torch.randn(count, 1, 6, 6, generator=draw)
        data = TensorDataset(images, torch.randint(CLASSES, (count,), generator=draw))
        self.batch = batch
        self.loader = DataLoader(data, batch, generator=torch.Generator().manual_seed(seed))
        self.noise = torch.Generator().manual_seed(2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.sizes: list[int] = []

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def run(self, loader: Any, step: Callable[[Tensor, Tensor], None], passes: int) -> None:
        for images, labels in itertools.chain.from_iterable(itertools.repeat(loader, passes)):
            self.sizes.append(len(labels))
            step(images, labels)


Run = Callable[[Training, int, int | None], float]
"""Trains for some passes, in parts of at most so many samples (None: whole batches); returns ε at δ = 1e-3."""


class Private:
    """What Opacus' PrivacyEngine makes of a training, by its own hooks or by what psg_fx leaves in grad_sample."""

    def __init__(self, t: Training, mode: str, wrapped: bool = True, accountant: str = "rdp", **options: Any) -> None:
        self.engine = PrivacyEngine(accountant=accountant)
        step = psg_fx.transform(t.model, loss_reduction="mean", backend=t.backend) if mode == "no_op" else t.model
        noise = {} if "target_epsilon" in options else {"noise_multiplier": SIGMA}
        make = self.engine.make_private if noise else self.engine.make_private_with_epsilon
        private, self.optimizer, self.loader = make(
            module=step if wrapped else t.model, optimizer=t.optimizer, data_loader=t.loader,
            noise_generator=t.noise, grad_sample_mode=mode, wrap_model=wrapped,
            **{"max_grad_norm": MAX_NORM, **noise, **options},
        )  # fmt: skip
        self.module = private if wrapped else step

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.module(images), labels).backward()
        self.optimizer.step()


def engine(mode: str, wrapped: bool = True, **options: Any) -> Run:
    """Trains in Opacus' PrivacyEngine; the options are those of `make_private`, or of `make_private_with_epsilon`."""

    def run(t: Training, passes: int, part: int | None) -> float:
        private = Private(t, mode, wrapped, **options)
        in_parts(t, private.loader, private.optimizer, private.step, passes, part)
        return float(private.engine.get_epsilon(1e-3))

    return run


def in_parts(t: Training, loader: Any, optimizer: Any, one: Any, passes: int, part: int | None) -> None:
    if part is None:
        return t.run(loader, one, passes)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=part, optimizer=optimizer) as parts:
        return t.run(parts, one, passes)


quiet = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),
]


def quietly(test: Any) -> Any:
    return functools.reduce(lambda t, mark: mark(t), quiet, test)


def trained(run: Run, passes: int, part: int | None = None, **kwargs: Any) -> tuple[Training, float]:
    t = Training(**kwargs)
    return t, run(t, passes, part)


def same(mine: tuple[Training, float], theirs: tuple[Training, float], rtol: float = 1e-5) -> None:
    (a, epsilon), (b, want) = mine, theirs
    assert epsilon == want > 0
    start = Training().weights()
    assert (b.weights() - start).norm() > 0.1 * start.norm()
    assert (a.weights() - b.weights()).norm() < rtol * b.weights().norm()
