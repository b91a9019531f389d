"""What a store was made of: a run that goes on with anything else is refused by name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Dots, Norms, Projection
from psg_fx.errors import BadArgument
from support.batches import loader
from support.small import same_mlp, step
from support.stores import QUANTITIES, interrupted, own_step


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose run was interrupted."""
    folder = tmp_path_factory.mktemp("unfinished")
    interrupted(folder, own_step())
    return folder


def other_weights() -> Any:
    model = same_mlp().float()
    model[2].bias.data[1] += 1e-6
    return own_step(model=model)


def other_training() -> Any:
    return own_step(model=same_mlp().float().eval())


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def other_activation() -> Any:
    model = same_mlp().float()
    model[1] = nn.Softplus()
    return own_step(model=model)


def weighted(class_: int) -> Any:
    """Losses of one name and other code."""
    if class_ == 0:
        return lambda output, target: F.cross_entropy(output[:, :2], target % 2)
    return lambda output, target: F.cross_entropy(output[:, 1:3], target % 2)


def test_another_loss_of_the_same_name_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, own_step(loss=weighted(0)))
    with pytest.raises(BadArgument, match="other code"):
        psg_fx.over(loader(11, 3), own_step(loss=weighted(1)), store=tmp_path, progress=False)
    psg_fx.over(loader(11, 3), own_step(loss=weighted(0)), store=tmp_path, progress=False)


def prepared(factor: float | None) -> Any:
    """Functions of one name and other code, or with other values around them."""
    if factor is None:
        return lambda batch: (batch[0] * 3.0, batch[1])
    return lambda batch: (batch[0] * factor, batch[1])


def test_another_prepare_is_refused(tmp_path: Path) -> None:
    own = own_step()
    interrupted(tmp_path, own, prepare=prepared(2.0))
    for prepare, text in (
        (prepared(3.0), r"another prepare=\n.*\n.*factor=2\.0 there, .*factor=3\.0 here"),
        (prepared(None), "another prepare=|other code"), (None, r"another prepare=\n.*\n.*nothing here"),
    ):  # fmt: skip
        with pytest.raises(BadArgument, match=text):
            psg_fx.over(loader(11, 3), own, store=tmp_path, prepare=prepare, progress=False)
    psg_fx.over(loader(11, 3), own_step(), store=tmp_path, prepare=prepared(2.0), progress=False)


def test_a_loss_that_has_no_hash(tmp_path: Path) -> None:
    @dataclass
    class Scaled:
        factor: float

        def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.factor * F.cross_entropy(output, target)

    interrupted(tmp_path, own_step(loss=Scaled(2.0)))
    psg_fx.over(loader(11, 3), own_step(loss=Scaled(2.0)), store=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (other_weights, r"other values of 2\.bias\n.*\n  why    its values differ"),
        (lambda: own_step(model=same_mlp()), r"other values of 0\.weight and 3 more\n.*\n  why    its dtype differs"),
        (lambda: own_step([*QUANTITIES[:-2], Norms(per="parameter")]), "other quantities"),
        (lambda: own_step([Projection(rank=3), *QUANTITIES[1:]]), r"Projection\(rank=2.*Projection\(rank=3"),
        (lambda: own_step([*QUANTITIES[:2], ClippedSum(0.4), *QUANTITIES[3:]]), "max_norm=0.4"),
        (lambda: own_step(loss=sum_loss), "sum_loss here"),
        (other_activation, "another model"),
        (other_training, "another train or evaluation mode"),
        (lambda: step(same_mlp().float(), quantities=QUANTITIES, params="0.*"), "other parameters asked for"),
    ],
)
def test_another_step_or_other_parameters_are_refused_by_name(
    unfinished: Path, tmp_path: Path, make: Any, text: str
) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    with pytest.raises(BadArgument, match=text):
        psg_fx.over(loader(11, 3), make(), store=tmp_path, progress=False)


def test_a_bound_in_a_tensor_is_part_of_the_step(tmp_path: Path) -> None:
    bound = torch.tensor(0.3)
    own = own_step([ClippedSum(bound)])
    interrupted(tmp_path, own)
    bound.fill_(0.30001)
    with pytest.raises(BadArgument, match="other quantities"):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)


def test_another_data_set_and_other_batches_are_refused(tmp_path: Path) -> None:
    own = own_step()
    interrupted(tmp_path, own)
    with pytest.raises(BadArgument, match="samples in all: 11 there, 12 here"):
        psg_fx.over(loader(12, 3), own, store=tmp_path, progress=False)
    with pytest.raises(BadArgument, match=r"the first 2 batches have 8 samples\n.*\n  why    6 are in the store"):
        psg_fx.over(loader(11, 4), own, store=tmp_path, progress=False)


def test_other_directions_are_refused(tmp_path: Path) -> None:
    own = own_step([Dots()])
    directions = {name: torch.randn_like(p) for name, p in own.model.named_parameters()}
    interrupted(tmp_path, own, directions=directions)
    directions["0.bias"][0] = 1.0
    with pytest.raises(
        BadArgument, match=r"other values of directions=\n.*\n  why    directions\['0.bias'\]: values differ"
    ):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False, directions=directions)


class Counting(nn.Linear):
    """A buffer that forward writes."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


def test_buffers_that_forward_has_written_are_named(tmp_path: Path) -> None:
    own = own_step([Norms()], Counting())
    interrupted(tmp_path, own)
    with pytest.raises(BadArgument, match=r"other values of calls\n.*\n.*forward writes buffers"):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)
