"""Objects that hold tensors, as inputs and targets: they are looked into like lists and dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, NotYetSupported


@dataclass
class Part:
    x: Tensor
    scale: Tensor
    k: float = 2.0
    more: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def both(self) -> Tensor:
        return self.x * self.k + self.scale[:, None] + self.more["z"][0]


@dataclass(frozen=True)
class Batch:
    part: Part
    y: Tensor


class Plain:
    def __init__(self, batch: Batch) -> None:
        self.part, self.y = batch.part, batch.y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch.part.both)


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch.y)


def batch_of(size: int, k: float = 2.0) -> Batch:
    part = Part(torch.randn(size, 4), torch.randn(size), k, {"z": [torch.randn(size, 4)]})
    return Batch(part, torch.randint(3, (size,)))


def sample(batch: Batch, i: int) -> Batch:
    p, own = batch.part, slice(i, i + 1)
    return Batch(Part(p.x[own], p.scale[own], p.k, {"z": [p.more["z"][0][own]]}), batch.y[own])


KINDS = {"dataclass": lambda b: b, "plain": Plain, "namespace": lambda b: SimpleNamespace(part=b.part, y=b.y)}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_has_the_gradient_of_an_object_of_its_own(kind: str, alone: bool) -> None:
    model = Model()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    for size, k in ((5, 2.0), (3, 2.0), (1, 2.0), (4, 0.5)):
        batch = batch_of(size, k)
        given = KINDS[kind](batch)  # type: ignore[no-untyped-call]
        grads = step(*((given, given) if alone else ((given,), (given,)))).grads
        for i in range(size):
            own = sample(batch, i)
            expected = torch.autograd.grad(loss(model(own), own), list(model.parameters()))
            torch.testing.assert_close([g[i] for g in grads.values()], list(expected))
    assert len(step.captures) == 2  # of either k


def test_validation_and_parts_of_a_batch_look_into_them() -> None:
    step = psg_fx.transform(Model(), loss, quantities=psg_fx.Norms(), backend="eager")
    batch = batch_of(5)
    assert step.validate(batch, batch).ok
    torch.testing.assert_close(psg_fx.microbatch(step, 2)(batch, batch).norms, step(batch, batch).norms)


def test_files_have_no_objects(tmp_path: Path) -> None:
    batch = batch_of(5)
    step = psg_fx.transform(Model(), loss, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(BadArgument, match="an object among the inputs cannot be described in a file"):
        step.export(tmp_path / "step.pt2", batch, batch)


class Table:
    def __init__(self) -> None:
        self.values = torch.linspace(0, 1, 10)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, table: Table) -> Tensor:
        return self.layer(x) * table.values[3]


def test_what_all_samples_share_is_said_to_be() -> None:
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(BadArgument, match="input_1_values: 10"):
        psg_fx.transform(Scaled(), F.cross_entropy, backend="eager")((x, Table()), y)
    step = psg_fx.transform(Scaled(), F.cross_entropy, batch_dim=((0, None), 0), backend="eager")
    step((x, Table()), y), step((x, Table()), y)
    assert len(step.captures) == 1


def test_dims_are_named_by_attributes() -> None:
    dims = {"part": {"x": 0, "scale": 0, "k": None, "more": 0}, "y": 0}
    step = psg_fx.transform(Model(), loss, batch_dim=((dims,), (dims,)), backend="eager")
    batch = batch_of(4)
    assert step((batch,), (batch,)).losses.shape == (4,)


def test_code_that_writes_into_what_it_is_given_is_refused() -> None:
    class Writes(Model):
        def forward(self, batch: Any) -> Tensor:
            batch.part.k = batch.part.k + 1
            return super().forward(batch)

    batch = batch_of(4)
    with pytest.raises(NotYetSupported, match=r"writes into an object that it is given, Part\.k"):
        psg_fx.transform(Writes(), loss, backend="eager")(batch, batch)
    assert batch.part.k == 2.0


def test_an_object_that_is_found_twice_in_another_is_refused() -> None:
    part = batch_of(4).part
    with pytest.raises(BadArgument, match="a Part is found twice in an object"):
        psg_fx.transform(Model(), backend="eager")(SimpleNamespace(part=part, other=part))
