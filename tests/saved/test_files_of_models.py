"""Files of models whose steps are written with ops of psg_fx, with views of folded samples, and in half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import zoo
from support.programs_of_files import call_the_program, same

pytestmark = [pytest.mark.inductor, pytest.mark.slow, pytest.mark.xdist_group("files")]


class Recurrent(nn.Module):
    """Captured as ops of psg_fx, which a file does not have."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(size, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(x)[0][:, -1])
        return out


class Both(nn.Module):
    """Convolutions before a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.rest = Recurrent(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(self.second(self.first(x).relu()).mean(3).transpose(1, 2)[:, :3])
        return out


def both() -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Both(), F.cross_entropy, torch.randn(8, 3, 16, 16), torch.randint(2, (8,))


def recurrent() -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Recurrent(), F.cross_entropy, torch.randn(4, 5, 3), torch.randint(2, (4,))


def convolutional() -> tuple[nn.Module, Any, Tensor, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 144, 3))
    return model, F.cross_entropy, torch.randn(8, 3, 16, 16), torch.randint(3, (8,))


def gpt() -> tuple[nn.Module, Any, Tensor, Tensor]:
    ex = zoo.example("gpt", batch=4, layers=2, width=32, heads=2, tokens=8, vocabulary=30)
    return ex.model, ex.loss_fn, ex.inputs, ex.targets


MODELS = [both, *(pytest.param(make, marks=pytest.mark.rest) for make in (recurrent, convolutional, gpt))]


def check_model(make: Any, path: Path) -> None:
    """The file gives what the step gives, which uses ops of psg_fx."""
    model, loss_fn, x, y = make()
    quantities = [psg_fx.Grads(), psg_fx.ClippedSum(max_norm=0.1)]
    step = psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager", progress=False)
    expected = step(x, y)
    ops = {str(n.target) for n in step.graphs["tidied"].graph.nodes}
    assert any(op.startswith("psg_fx.") for op in ops) is (make is not gpt)
    assert make is not both or {"psg_fx.grouped_weight_gradient.default", "psg_fx.gru.default"} <= ops
    loaded = psg_fx.load(step.export(path, x, y))
    same(loaded(model.state_dict(), x, y), expected)
    same(loaded(model.state_dict(), x[:1], y[:1]), step(x[:1], y[:1]))
    left = {str(n.target) for n in torch.export.load(path).graph.nodes}
    assert not any(op.startswith("psg_fx") for op in left)


@pytest.mark.parametrize("make", MODELS)
def test_programs_of_models_whose_steps_use_ops_of_psg_fx(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is the program in the file, which is run here."""
    call_the_program(monkeypatch)
    check_model(make, tmp_path / "step.pt2")


@pytest.mark.rest
@pytest.mark.parametrize("make", [both, recurrent, convolutional, gpt])
def test_models_whose_steps_use_ops_of_psg_fx(make: Any, tmp_path: Path) -> None:
    check_model(make, tmp_path / "step.pt2")


class Attends(nn.Module):
    """Its samples come to lie in the middle, and are folded with dims before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return out


def test_views_of_folded_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call_the_program(monkeypatch)
    model, x, y = Attends(), torch.randn(6, 5, 8), torch.randint(3, (6,))
    quantities = [psg_fx.Norms(), psg_fx.Gram()]
    step = psg_fx.transform(model, F.cross_entropy, quantities=quantities, backend="eager", progress=False)
    loaded = psg_fx.load(step.export(tmp_path / "step.pt2", x, y))
    for size in (6, 1):
        same(loaded(model.state_dict(), x[:size], y[:size]), step(x[:size], y[:size]))


@pytest.mark.rest  # what is asked of the compiler is tested beside the trial
def test_half_precision_rounds_as_in_the_graph(tmp_path: Path) -> None:
    """Or else a ReLU lets other elements through: the trial finds gradients that differ by a sixth."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 12, 12), torch.randint(10, (8,))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    step = psg_fx.transform(model, F.cross_entropy, backend="eager", progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        loaded = psg_fx.load(step.export(tmp_path / "step.pt2", x, y))
        expected = step(x, y).grads
    found = loaded(model.state_dict(), x, y).grads
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 0.02 * value.abs().max(), name
