"""Models that communicate, or of which a process has a slice: nothing is sent while they are captured, all are refused.

Only one of two processes makes a step: were anything sent, it would wait for the other in vain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import psg_fx
from psg_fx.errors import NotYetSupported, PsgError
from support.processes import Processes

pytestmark = pytest.mark.xdist_group("processes")


def summed(t: Tensor) -> Tensor:
    """Over all processes."""
    return collectives.all_reduce(t, "sum", dist.group.WORLD)  # type: ignore[arg-type]


class Enter(torch.autograd.Function):
    """The way into sliced layers (Megatron's f): sums gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return summed(g)


class Leave(torch.autograd.Function):
    """The way out of them (Megatron's g): sums values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.clone()


class Block(nn.Module):
    """Two layers of which each process may have a slice, and a head."""

    def __init__(self, between: Callable[[Block, Tensor], Tensor] = lambda block, x: block.down(block.up(x).tanh())):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.between(self, x))


def functional(block: Block, x: Tensor) -> Tensor:
    return summed(block.down(block.up(x).tanh()))


def megatron(block: Block, x: Tensor) -> Tensor:
    return Leave.apply(block.down(block.up(Enter.apply(x)).tanh()))


def in_the_backward(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(Enter.apply(x)).tanh())


def in_place(block: Block, x: Tensor) -> Tensor:
    h = block.down(block.up(x).tanh())
    dist.all_reduce(h)
    return h


def of_a_parameter(block: Block, x: Tensor) -> Tensor:
    weight = collectives.all_gather_tensor(block.up.weight, 0, dist.group.WORLD)  # type: ignore[arg-type]
    return F.linear(x, weight).mean(1, keepdim=True)


def of_a_constant(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x).tanh()) / summed(torch.ones(()))


def of_a_detached_parameter(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        return of_a_parameter(block, x)


def barrier(block: Block, x: Tensor) -> Tensor:
    dist.barrier()
    return block.down(block.up(x).tanh())


def to_one_other(block: Block, x: Tensor) -> Tensor:
    h = block.down(block.up(x).tanh())
    dist.send(h.detach(), 1)
    return h


def of_objects(block: Block, x: Tensor) -> Tensor:
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, 3)
    return block.down(block.up(x).tanh()) * len(found)


def summed_loss(output: Tensor, y: Tensor) -> Tensor:
    return summed(F.cross_entropy(output, y))


def reduced_loss(output: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(output, y)
    dist.all_reduce(loss)
    return loss


BETWEEN = (
    functional, megatron, in_the_backward, in_place, of_a_parameter, of_a_constant, of_a_detached_parameter, barrier,
    to_one_other, of_objects,
)  # fmt: skip
FEW = (functional, megatron, in_place, of_a_parameter, barrier, of_objects)
"""One of each way to communicate."""
LOSSES = (summed_loss, reduced_loss)


def refusal(model: nn.Module, loss_fn: Any = F.cross_entropy) -> str:
    """The text of the refusal, "" where there is an answer."""
    try:
        step = psg_fx.transform(model, loss_fn, quantities=psg_fx.Norms(), backend="eager", progress=False)
        step(torch.randn(5, 6), torch.randint(3, (5,)))
    except PsgError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_that_nothing_is_sent(rank: int, world: int, every: bool) -> dict[str, str]:
    if rank > 0:
        return {}
    between = BETWEEN if every else FEW
    found = {one.__name__: refusal(Block(one)) for one in between}
    return found | {loss.__name__: refusal(Block(), loss) for loss in (LOSSES if every else LOSSES[1:])}


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_a_model_that_communicates_is_refused_and_nothing_is_sent(processes: Processes, every: bool) -> None:
    found, _ = processes.run(check_that_nothing_is_sent, 2, every)
    for name, text in found.items():
        assert re.search("it is a collective, in which|the code communicates with", text), name
        assert "psg_fx.distributed.reduce" in text
    assert found["functional"].splitlines()[0] == (
        "NotYetSupported: _c10d_functional.all_reduce cannot be shown to keep samples apart"
    )
    assert "test_collectives.py" in found["in_place"]
    assert "dist.all_reduce(h)" in found["in_place"]


def check_sliced_by_hand(rank: int, world: int) -> list[str]:
    """DTensors without a plan, and a plan that comes after `transform` or without a loss."""
    mesh = init_device_mesh("cpu", (world,))
    by_hand, late, bare = Block(), Block(), Block()
    by_hand.up.weight = nn.Parameter(distribute_tensor(by_hand.up.weight.detach(), mesh, [Shard(0)]))
    step = psg_fx.transform(late, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager", progress=False)
    for model in (late, bare):
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = [refusal(by_hand)]
    for call in (lambda: step(torch.randn(5, 6), torch.randint(3, (5,))), lambda: psg_fx.transform(bare)):
        with pytest.raises(NotYetSupported) as error:
            call()
        found.append(f"NotYetSupported: {error.value}")
    return found


def test_slices_without_a_plan_are_refused_by_name(processes: Processes) -> None:
    found, same = processes.run(check_sliced_by_hand, 2)
    assert found == same == [found[0]] * 3
    assert found[0] == (
        "NotYetSupported: the parameter up.weight is a DTensor\n"
        "  where  up (Linear)\n"
        "  why    this process may hold a slice of it, and norms of slices are not those of gradients\n"
        "  fix    slice the model by parallelize_module or shard it by fully_shard, and give a loss, after that: "
        "psg_fx.transform(model, loss_fn)"
    )


def check_wrapped(rank: int, world: int) -> list[str]:
    wrapped = nn.parallel.DistributedDataParallel(Block())
    return [refusal(wrapped), refusal(nn.Sequential(nn.Linear(6, 6), wrapped)), refusal(wrapped.module)]


def test_a_model_in_distributed_data_parallel_is_refused_with_the_way_out(processes: Processes) -> None:
    whole, part, inside = processes.run(check_wrapped, 2)[0]
    assert whole == (
        "NotYetSupported: the model is wrapped in DistributedDataParallel\n"
        "  where  DistributedDataParallel\n"
        "  why    it communicates in hooks and outside of the graph\n"
        "  fix    pass what is inside (model.module), and add up over processes by psg_fx.distributed.reduce(out)"
    )
    assert "a part of the model is wrapped in DistributedDataParallel\n  where  1 (Distri" in part
    assert inside == ""
