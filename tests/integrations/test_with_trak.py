"""TRAK and dattri with psg_fx's gradients give the scores that they give with their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psg_fx.errors import BadArgument, NotYetSupported
from support import oracle
from support.batches import samples
from support.small import same_mlp

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries, about their own code
needs_trak = pytest.mark.skipif(importlib.util.find_spec("trak") is None, reason="traker is not installed")
needs_dattri = pytest.mark.skipif(importlib.util.find_spec("dattri") is None, reason="dattri is not installed")


def other_checkpoint() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: value + torch.randn_like(value) / 4 for name, value in same_mlp().float().state_dict().items()}


def trak_scores(folder: Path, **options: Any) -> torch.Tensor:
    from trak import TRAKer

    model, train, test = same_mlp().float().eval(), samples(20), samples(6)
    traker = TRAKer(
        model, "image_classification", train_set_size=20, save_dir=str(folder), device="cpu", proj_dim=16,
        use_half_precision=False, logging_level=50, **options,
    )  # fmt: skip
    states = [{name: value.clone() for name, value in model.state_dict().items()}, other_checkpoint()]
    for number, state in enumerate(states):
        traker.load_checkpoint(state, model_id=number)
        for part in (slice(0, 12), slice(12, 20)):
            batch = [t[part] for t in train]
            traker.featurize(batch=batch, num_samples=len(batch[0]))
    traker.finalize_features()
    for number, state in enumerate(states):
        traker.start_scoring_checkpoint("test", state, model_id=number, num_targets=6)
        traker.score(batch=list(test), num_samples=6)
    return torch.as_tensor(traker.finalize_scores(exp_name="test")).clone()


@needs_trak
def test_the_scores_of_trak(tmp_path: Path) -> None:
    from psg_fx.integrations.trak import gradient_computer

    want = trak_scores(tmp_path / "own")
    got = trak_scores(tmp_path / "psg_fx", gradient_computer=gradient_computer(backend="eager"))
    assert want.shape == (20, 6)
    assert want.abs().max() > 0
    assert oracle.relative_error(got, want) < 1e-3


@needs_trak
def test_gradients_of_some_parameters() -> None:
    from trak.modelout_functions import ImageClassificationModelOutput

    from psg_fx.integrations.trak import gradient_computer, margin

    model, (x, y) = same_mlp(), samples(5, torch.float64)
    kind = gradient_computer(backend="eager")
    own = kind(model, ImageClassificationModelOutput(), 15, torch.float64, "cpu", ["2.weight"])
    _, grads = oracle.loop_grads(model, margin, x, y)
    found = own.compute_per_sample_grad([x, y])
    assert list(found) == ["2.weight"]
    assert oracle.relative_error(found["2.weight"], grads["2.weight"]) < 1e-10


def tasks(model: nn.Module) -> tuple[Any, Any]:
    """dattri's own task, and the one with psg_fx's gradients."""
    from dattri.task import AttributionTask

    from psg_fx.integrations.dattri import Task

    def loss_of_one(params: Any, data: Any) -> torch.Tensor:
        x, y = data
        return F.cross_entropy(torch.func.functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

    states = [{n: v.clone() for n, v in model.state_dict().items()}, other_checkpoint()]
    return AttributionTask(loss_of_one, model, states), Task(F.cross_entropy, model, states, backend="eager")


@needs_dattri
@pytest.mark.parametrize("kind", ["tracin", "trak"])
def test_the_scores_of_dattri(kind: str) -> None:
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.algorithm.trak import TRAKAttributor

    train, test = (DataLoader(TensorDataset(*samples(n)), 4, shuffle=False) for n in (10, 3))
    found = []
    for task in tasks(same_mlp().float()):
        if kind == "tracin":
            attributor = TracInAttributor(task=task, weight_list=torch.tensor([1.0, 0.5]), normalized_grad=False)
            found.append(attributor.attribute(train, test))
        else:
            attributor = TRAKAttributor(
                task=task, correct_probability_func=lambda p, d: d[0].sigmoid().mean(),
                projector_kwargs={"proj_dim": 8, "device": "cpu"},
            )  # fmt: skip
            attributor.cache(train)
            found.append(attributor.attribute(test))
    want, got = found
    assert want.shape == (10, 3)
    assert want.abs().max() > 0
    assert oracle.relative_error(got, want) < 1e-3


@needs_dattri
def test_what_a_step_cannot_see_is_refused() -> None:
    _, task = tasks(same_mlp().float())
    with pytest.raises(NotYetSupported, match=r"layer_name='0\.weight'"):
        task.get_grad_loss_func(in_dims=(None, 0), layer_name="0.weight", ckpt_idx=0)
    flat, _ = task.get_param(ckpt_idx=0)
    rows = task.get_grad_loss_func(in_dims=(None, 0))
    assert rows(flat, samples(4)).shape == (4, 43)
    with pytest.raises(BadArgument, match="not those of the task's model"):
        rows(flat + 1, samples(4))
