"""The callback in a Lightning Trainer: what it logs, where, and that training does not notice it."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support import oracle
from support.batches import samples

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

from external.torchvision_import import torchvision  # noqa: F401  (torchmetrics imports it)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Lightning, about its own code


def module(forward: bool = True) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if forward:
        Module.forward = lambda self, x: self.net(x)  # type: ignore[method-assign]
    torch.manual_seed(0)
    return Module()


def fit(model: Any, callbacks: Any = (), logger: Any = False, **options: Any) -> Any:
    import lightning.pytorch as pl

    torch.manual_seed(1)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, callbacks=list(callbacks), logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(*samples(22)), 4))
    return trainer


def statistics(every: int = 2, **options: Any) -> Any:
    from psg_fx.integrations.lightning import GradientStatistics

    return GradientStatistics(F.cross_entropy, every, **{"backend": "eager"} | options)


class Kept:
    """A logger that keeps what it gets."""

    def __new__(cls) -> Any:
        from lightning.pytorch.loggers import Logger

        class Keeps(Logger):
            name, version, experiment = "kept", 0, None

            def __init__(self) -> None:
                super().__init__()
                self.rows: dict[int, dict[str, float]] = {}

            def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

            def log_metrics(self, metrics: Any, step: int | None = None) -> None:
                if "gradients/loss" in metrics:
                    self.rows[step or 0] = dict(metrics)

        return Keeps()


@pytest.mark.parametrize("name", ["", "net"])
def test_numbers_are_logged_and_training_does_not_notice(name: str) -> None:
    plain = module()
    fit(plain)
    watched, logger = module(), Kept()
    trainer = fit(watched, [statistics(model=name)], logger)
    for (key, value), want in zip(watched.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, want), key
    assert sorted(logger.rows) == [2, 4, 6]
    assert all(row["gradients/noise"] > 0 for row in logger.rows.values())
    assert trainer.callback_metrics["gradients/norms_max"] > 0


def test_the_norms_are_those_of_single_samples() -> None:
    model, logger = module(), Kept()
    model.net[2].p = 0.0
    fit(model, [statistics(6)], logger)
    after = copy.deepcopy(model.net)
    x, y = (t[20:22] for t in samples(22))
    _, grads = oracle.loop_grads(after, F.cross_entropy, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    assert logger.rows[6]["gradients/norms_max"] == pytest.approx(norms.max().item(), rel=1e-4)


def test_bfloat16_and_accumulation() -> None:
    logger = Kept()
    fit(module(), [statistics(2)], logger, precision="bf16-mixed", accumulate_grad_batches=3)
    assert sorted(logger.rows) == [0, 1, 2]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_has_numbers_and_histograms(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(module(), [statistics(2)], TensorBoardLogger(str(tmp_path)))
    (file,) = tmp_path.rglob("events.out*")
    found = EventAccumulator(str(file.parent), {"histograms": 0})
    found.Reload()
    assert "gradients/norms_median" in found.Tags()["scalars"]
    assert [event.step for event in found.Histograms("gradients/norms")] == [2, 4, 6]
