"""What a step of a model that `parallelize_module` has sliced refuses, and what it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

import psg_fx
from psg_fx.errors import PsgError
from support.processes import Processes
from support.sliced import (
    DOWN,
    UP,
    embeddings,
    perceptron,
    transformed,
)

pytestmark = pytest.mark.xdist_group("processes")


def refusal(make: Any, mesh: Any, plan: Mapping[str, Any], quantities: Any = None, **given: Any) -> str:
    """The text of the refusal, "" where there is an answer."""
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = make()
    model = parallelize_module(model.double(), mesh, plan)
    try:
        transformed(model, loss_fn, quantities or psg_fx.Norms())(inputs, targets, **given)
    except PsgError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class NoParallel(ParallelStyle):
    """A style of the user's own."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, None, lambda m, args, mesh: args, lambda m, out, mesh: out)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def changed(**modules: nn.Module) -> Any:
    """The perceptron with other modules."""

    def make() -> tuple[nn.Module, Any, Tensor, Tensor]:
        model, *rest = perceptron()
        for name, module in modules.items():
            setattr(model, name, copy.deepcopy(module))
        return model, *rest

    return make


def bounded() -> tuple[nn.Module, Any, Tensor, Tensor]:
    model, *rest = embeddings()
    model.columns.max_norm = 1.0
    return model, *rest


def seeded() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A norm that is another one in every process."""
    model, *rest = perceptron()
    with torch.no_grad():
        model.norm.weight.fill_(dist.get_rank() + 1)
    return model, *rest


def other_samples() -> tuple[nn.Module, Any, Tensor, Tensor]:
    model, loss_fn, x, y = perceptron()
    return model, loss_fn, x + dist.get_rank(), y


def ranked() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A constant that is another one in every process."""
    model, loss_fn, x, y = perceptron()
    scale = torch.tensor(1.0 + dist.get_rank(), dtype=torch.float64)
    return model, lambda out, y: loss_fn(out * scale, y), x, y


def held() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A loss that holds what will be sliced."""
    model, loss_fn, x, y = perceptron()
    return model, lambda out, y: loss_fn(out, y) + model.up.weight.square().sum(), x, y


def asked_of_a_view() -> tuple[nn.Module, Any, Tensor, Tensor]:
    model, loss_fn, x, y = perceptron()
    return model, lambda out, y: loss_fn(out, y) * model.up.weight.T.shape[1], x, y


def patched() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A layer whose forward was replaced, as adapters do it."""
    model, *rest = perceptron()
    model.down.forward = lambda x: 2 * nn.functional.linear(x, model.down.weight)
    return model, *rest


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another style": (perceptron, {"norm": NoParallel()}, "norm has the hook distribute_module."),
    "sequences as DTensors": (perceptron, {"norm": SequenceParallel()}, "norm gives a DTensor (use_local_output="),
    "sequences of another layer": (
        changed(norm=nn.Dropout(0.5)), {"norm": SequenceParallel(use_local_output=True)},
        "norm is a Dropout, in SequenceParallel",
    ),
    "a norm over what is cut": (
        perceptron, {"norm": SequenceParallel(sequence_dim=2, use_local_output=True)},
        "a norm over the last 1 dims is cut along dim 2",
    ),
    "whole, and said to be cut": (
        changed(head=nn.Linear(6, 4)), {"head": ColwiseParallel(input_layouts=Shard(1))},
        "%add is whole in each process, and the plan says the other",
    ),
    "inputs alone": (
        perceptron, {"head": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())},
        "head has the hook PrepareModuleInput._apply.",
    ),
    "DTensors between layers": (
        perceptron, {"up": ColwiseParallel(use_local_output=False), **DOWN},
        "up gives a DTensor (use_local_output=False)",
    ),
    "a class of its own": (changed(up=Own(6, 8)), UP | DOWN, "up is a Own, in ColwiseParallel"),
    "slices of two sizes": (
        changed(up=nn.Linear(6, 7), down=nn.Linear(7, 6)), UP | DOWN,
        "the parameter up.weight has 7 entries along dim 0, for 2 processes",
    ),
    "whole rows": (
        bounded, {"columns": ColwiseParallel(output_layouts=Replicate())}, "the embedding columns has max_norm",
    ),
    "a loss of slices": (
        changed(head=nn.Linear(6, 4)), UP | DOWN | {"head": ColwiseParallel()},
        "the loss is not the same in all processes of the mesh",
    ),
    "a penalty on a slice": (held, UP | DOWN, "calls square of a parameter that parallelize_module has sliced"),
    "sizes of what is made of a slice": (asked_of_a_view, UP | DOWN, "calls __get__ of a parameter that"),
    "a forward of the layer's own": (patched, UP | DOWN, "down is a Linear, with another forward, in RowwiseParallel"),
    "random draws": (changed(norm=nn.Dropout(0.5)), UP | DOWN, "aten.native_dropout.default draws at random in each "),
    "cut, and said to be whole": (
        changed(down=nn.Linear(4, 6)), UP | {"down": RowwiseParallel(input_layouts=Replicate())},
        "%tanh is cut into slices, and the plan says the other",
    ),
    "parameters that differ": (seeded, UP | DOWN, "model.norm.weight is not the same in all processes of the"),
    "samples that differ": (other_samples, UP | DOWN, "input_0 is not the same in all processes of the"),
    "constants that differ": (ranked, UP | DOWN, "is not the same in all processes of the tensor-parallel mesh"),
}  # fmt: skip
"""The model, its plan, and the first line of the error."""


def check_refused(rank: int, world: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world,))
    found = {name: refusal(make, mesh, plan) for name, (make, plan, _) in REFUSED.items()}
    return found | {"projections": refusal(perceptron, mesh, UP | DOWN, psg_fx.Projection(rank=2, seed=0))}


def test_what_is_refused(processes: Processes) -> None:
    found, same = processes.run(check_refused, 2)
    assert found == same
    for name, (_, _, first) in REFUSED.items():
        assert first in found[name].splitlines()[0], (name, found[name])
        assert "\n  fix    " in found[name]
    assert found["projections"].splitlines()[0] == "NotYetSupported: Projection of a tensor-parallel model"
