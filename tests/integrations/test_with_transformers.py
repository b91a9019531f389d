"""The callback in Hugging Face's Trainer: what it logs, where, and that training does not notice it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import psg_fx
from psg_fx.errors import BadArgument
from support import oracle
from support.selection import one_in

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from external.torchvision_import import torchvision  # noqa: F401  (transformers imports it)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of transformers, about its own code


class Rows(Dataset[Any]):
    """Sequences of ids with labels, as a tokeniser gives them."""

    def __init__(self, count: int = 24) -> None:
        draw = torch.Generator().manual_seed(0)
        self.ids, self.labels = torch.randint(20, (count, 6), generator=draw), torch.arange(count) % 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {
            "input_ids": self.ids[index], "attention_mask": torch.ones_like(self.ids[index]),
            "labels": self.labels[index],
        }  # fmt: skip


def trainer(folder: Path, callbacks: Any = (), data: Any = None, steps: int = 4, **options: Any) -> Any:
    import transformers

    transformers.set_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=20, num_labels=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, max_position_embeddings=8,
        )
    )  # fmt: skip
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True,
        use_cpu=True, learning_rate=1e-2, **{"report_to": "none", "logging_strategy": "no"} | options,
    )  # fmt: skip
    data = Rows() if data is None else data
    return transformers.Trainer(model=model, args=settings, train_dataset=data, callbacks=list(callbacks))


def statistics(every: int = 2, **options: Any) -> Any:
    from psg_fx.integrations.transformers import GradientStatistics

    return GradientStatistics(every, **{"samples": 8, "batch": 4, "backend": "eager"} | options)


def logged(found: Any) -> list[dict[str, Any]]:
    return [row for row in found.state.log_history if "gradients/loss" in row]


@pytest.mark.parametrize("attached", one_in(2, [True, False]))
def test_numbers_are_logged_and_training_does_not_notice(tmp_path: Path, attached: bool) -> None:
    """BERT has dropout, whose draws would differ."""
    plain = trainer(tmp_path)
    plain.train()
    if attached:
        watched = trainer(tmp_path)
        statistics().attach(watched)
    else:
        watched = trainer(tmp_path, [statistics()])
    watched.train()
    for (name, value), want in zip(watched.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(value, want), name
    rows = logged(watched)
    assert [row["step"] for row in rows] == [2, 4]
    assert all(row["gradients/norms_min"] <= row["gradients/norms_median"] for row in rows)
    assert all(row["gradients/noise"] > 0 for row in rows)


def test_the_norms_are_those_of_single_samples(tmp_path: Path) -> None:
    watched, data = trainer(tmp_path, steps=1), Rows()
    watched.model.eval()
    statistic = statistics(1, quantities=[psg_fx.Norms()])
    drawn = torch.randint(len(data), (8,), generator=torch.Generator().manual_seed(0)).tolist()
    numbers, rows = statistic.measure.of(watched.model, statistic._batches(watched.get_train_dataloader()))
    batch = {name: torch.stack([data[row][name] for row in drawn]) for name in data[0]}
    _, grads = oracle.loop_grads(watched.model, lambda output: output.loss, batch)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    assert oracle.relative_error(rows["norms"], norms) < 1e-4
    assert numbers["norms_max"] == pytest.approx(norms.max().item(), rel=1e-4)


@pytest.mark.rest  # a step in bfloat16 is that of test_precision.py
def test_bfloat16(tmp_path: Path) -> None:
    watched = trainer(tmp_path, bf16=True)
    statistics().attach(watched)
    watched.train()
    assert len(logged(watched)) == 2


def test_streams_need_samples(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Rows()[i] for i in range(16)])

    with pytest.raises(BadArgument, match="pass some samples as data="):
        trainer(tmp_path, [statistics()], Stream()).train()
    watched = trainer(tmp_path, [statistics(data=Rows())], Stream())
    watched.train()
    assert len(logged(watched)) == 2


@pytest.mark.parametrize("options", [{"samples": -1}, {"samples": 2.5}, {"batch": 0}, {"batch": True}], ids=str)
def test_numbers_of_samples_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match="is not a number of samples"):
        statistics(**options)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_has_numbers_and_histograms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watched = trainer(tmp_path, report_to="tensorboard")
    statistics().attach(watched)
    watched.train()
    (file,) = tmp_path.rglob("events.out*")
    found = EventAccumulator(str(file.parent), {"histograms": 0})
    found.Reload()
    assert "train/gradients/norms_median" in found.Tags()["scalars"]
    assert {"gradients/norms", "gradients/losses"} <= set(found.Tags()["histograms"])
    assert [event.step for event in found.Histograms("gradients/norms")] == [2, 4]
