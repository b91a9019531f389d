"""Models sliced by `parallelize_module` give what one process gives with whole parameters: rows that are equal in all
processes of the mesh, and sums placed like the parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    parallelize_module,
)

import psg_fx
from psg_fx.errors import BadArgument, NotYetSupported
from support.by_loop import ByLoop
from support.processes import Processes
from support.selection import selected
from support.sliced import (
    CASES,
    DOWN,
    QUANTITIES,
    ROWS,
    SUMS,
    UP,
    far,
    llama,
    of_llama,
    of_perceptron,
    parallel,
    perceptron,
    transformed,
)

pytestmark = pytest.mark.xdist_group("processes")


def check_equal_to_one_process(rank: int, world: int, name: str) -> int:
    """Three optimizer steps."""
    _, make, plan = CASES[name]
    model, loss_fn, inputs, targets = make()
    model.double()
    whole = copy.deepcopy(model)
    mine = parallel(model, plan(), world)
    step, one = transformed(model, loss_fn, QUANTITIES), ByLoop(whole, loss_fn, QUANTITIES)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, whole)]
    weights = torch.rand(6, dtype=torch.float64)
    for _ in range(3):
        out = step(inputs[mine], targets[mine], weights=weights[mine])
        expected = one(inputs, targets, weights=weights)
        for field in ROWS:
            torch.testing.assert_close(getattr(out, field), getattr(expected, field)[mine], rtol=1e-9, atol=1e-12)
        for field in SUMS:
            for key, p in model.named_parameters():
                value = getattr(out, field)[key]
                assert type(value) is (DTensor if isinstance(p, DTensor) else Tensor)
                assert not isinstance(p, DTensor) or value.placements == p.placements
                assert far(value, getattr(expected, field)[key]) < 1e-10, (field, key)
        psg_fx.distributed.set_grad(model, out.clipped_sum, 1 / 6)
        psg_fx.distributed.set_grad(whole, expected.clipped_sum, 1 / 6)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert far(p.detach(), q.detach()) < 1e-6
    return len(step.captures)


@pytest.mark.parametrize("name", selected(CASES, {"perceptron", "embeddings", "llama, cut sequences"}))
def test_equal_to_one_process(processes: Processes, name: str) -> None:
    world = CASES[name][0]
    assert processes.run(check_equal_to_one_process, world, name) == [1] * world


class Scaled(nn.Module):
    """A parameter that is whole in every process scales values that are cut; another is cast on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.inner = nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).unflatten(-1, (-1, 2)) * self.inner  # a norm of heads has such a scale
        return self.down(h.flatten(-2).tanh()).mean(1)


def check_scaled(rank: int, world: int) -> None:
    _, loss_fn, inputs, targets = perceptron()
    model = Scaled().double()
    whole = copy.deepcopy(model)
    mine = parallel(model, of_perceptron(), world)
    quantities = [
        psg_fx.ClippedSum(max_norm=0.3),
        psg_fx.Norms(per="parameter"),
        psg_fx.MeanGrad(),
        psg_fx.Dots(),
        psg_fx.Gram(),
    ]
    given = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in whole.named_parameters()}
    out = transformed(model, loss_fn, quantities)(inputs[mine], targets[mine], directions=given)
    expected = ByLoop(whole, loss_fn, quantities)(inputs, targets, directions=given)
    for field in ("norms", "dots", "gram"):
        torch.testing.assert_close(getattr(out, field), getattr(expected, field), rtol=1e-10, atol=1e-12)
    for field in ("clipped_sum", "mean_grad"):
        for name, value in getattr(expected, field).items():
            assert far(getattr(out, field)[name], value) < 1e-10, (field, name)
    several = {name: torch.stack([v, 2 * v]) for name, v in given.items()}
    out = transformed(model, loss_fn, psg_fx.Dots())(inputs[mine], targets[mine], directions=several)
    torch.testing.assert_close(out.dots[:, 1], 2 * expected.dots[mine], rtol=1e-10, atol=1e-12)


def test_a_whole_parameter_beside_values_that_are_cut(processes: Processes) -> None:
    processes.run(check_scaled, 2)


WAYS: dict[str, list[tuple[Any, Any, Any]]] = {
    "groups and budget": [
        ({}, {"groups": torch.tensor([0, 1, 0, 2, 2, 0]), "num_groups": 3}, None), ({"memory_budget": 6000}, {}, None),
    ],
    "some parameters": [
        ({"params": "norm.*"}, {}, ["norm.weight", "norm.bias"]),
        ({"params": ["down.weight", "head.*"]}, {}, ["down.weight", "head.weight", "head.bias"]),
    ],
}  # fmt: skip


def check_ways(rank: int, world: int, name: str) -> list[int]:
    """Groups of samples, parts within a budget, some parameters only."""
    model, loss_fn, inputs, targets = perceptron()
    model.double()
    whole = copy.deepcopy(model)
    parallel(model, of_perceptron(), world)
    quantities = [psg_fx.ClippedSum(max_norm=0.3), psg_fx.MeanGrad()]
    sizes = []
    for options, given, names in WAYS[name]:
        step = psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager", progress=False, **options)
        out = step(inputs, targets, **given)
        expected = ByLoop(whole, loss_fn, quantities, params=names)(inputs, targets, **given)
        sizes.append(step.captures[-1].step.part or 6)
        torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
        for field in ("clipped_sum", "mean_grad"):
            assert list(getattr(out, field)) == list(getattr(expected, field))
            for name, value in getattr(expected, field).items():
                assert far(getattr(out, field)[name], value) < 1e-10, (options, field, name)
    return sizes


def check_frozen(rank: int, world: int) -> None:
    """Frozen parameters, and half precision."""
    model, loss_fn, inputs, targets = perceptron()
    model.double()
    whole = copy.deepcopy(model)
    parallel(model, of_perceptron(), world)
    quantities = [psg_fx.ClippedSum(max_norm=0.3), psg_fx.MeanGrad()]
    for m in (model, whole):
        m.up.requires_grad_(False)
    out = transformed(model, loss_fn, quantities)(inputs, targets)
    expected = ByLoop(whole, loss_fn, quantities)(inputs, targets)
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        half = transformed(model.float(), loss_fn, quantities)(inputs.float(), targets).norms.double()
    torch.testing.assert_close(half, expected.norms, rtol=0.05, atol=1e-3)
    assert far(half, expected.norms) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", selected(WAYS, {"groups and budget"}))
def test_further_ways_to_ask(processes: Processes, name: str) -> None:
    found = processes.run(check_ways, 2, name)
    assert found[0] == found[1]
    assert found[0] == [6, 6] or name == "groups and budget"
    assert found[0][1] < 6 or name == "some parameters"


def test_frozen_parameters_and_half_precision(processes: Processes) -> None:
    processes.run(check_frozen, 2)


def check_products(rank: int, world: int) -> None:
    """Rows that are sums over slices, gradients that are slices, and directions placed like the parameters."""
    model, loss_fn, inputs, targets = llama()
    model.double()
    whole = copy.deepcopy(model)
    mine = parallel(model, of_llama(), world)
    quantities = [psg_fx.Dots(), psg_fx.Gram(), psg_fx.Grads(), psg_fx.Norms(per="parameter", squared=True)]
    step, one = transformed(model, loss_fn, quantities), ByLoop(whole, loss_fn, quantities)
    directions = [{name: p.detach() for name, p in m.named_parameters()} for m in (model, whole)]
    out = step(inputs[mine], targets[mine], directions=directions[0])
    expected = one(inputs, targets, directions=directions[1])
    torch.testing.assert_close(out.dots, expected.dots[mine], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.gram, expected.gram[mine, mine], rtol=1e-10, atol=1e-12)
    of_mine = {name: value[mine] for name, value in expected.norms.items()}
    torch.testing.assert_close(out.norms, of_mine, rtol=1e-10, atol=1e-14)
    for name, value in expected.grads.items():
        assert far(out.grads[name], value[mine]) < 1e-10, name
    q, norm = (out.grads[f"blocks.0.{name}.weight"] for name in ("attention.q", "before"))
    assert (q.placements, type(norm)) == ((Shard(1),), Tensor)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.rest)])
def test_products_and_gradients(processes: Processes, world: int) -> None:
    processes.run(check_products, world)


def check_replicas(rank: int, world: int) -> None:
    """Samples over one dim of a mesh and slices over the other, without `fully_shard`; and parts of the batch."""
    model, loss_fn, inputs, targets = perceptron()
    model.double()
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("samples", "slices"))
    parallelize_module(model, mesh["slices"], of_perceptron())
    mine = (slice(0, 4), slice(4, 6))[mesh.get_local_rank("samples")]
    quantities = [QUANTITIES[0], psg_fx.MeanGrad(), psg_fx.SecondMoment(), psg_fx.Dots(), psg_fx.Grads()]
    step = transformed(model, loss_fn, quantities)
    given = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in whole.named_parameters()}
    expected = ByLoop(whole, loss_fn, quantities)(inputs, targets, directions=given)
    for run in (step, psg_fx.microbatch(step, 3)):
        out = run(inputs[mine], targets[mine], directions=given)
        torch.testing.assert_close(out.dots, expected.dots[mine], rtol=1e-10, atol=1e-12)
        out = psg_fx.distributed.reduce(out, mesh.get_group("samples"))
        for name in expected.clipped_sum:
            for field in ("clipped_sum", "mean_grad", "second_moment"):
                assert far(getattr(out, field)[name], getattr(expected, field)[name]) < 1e-9, (field, name)
            assert far(out.grads[name], expected.grads[name][mine]) < 1e-10


def check_groups_of_slices(rank: int, world: int) -> list[str]:
    """Groups that hold processes with other slices of the same samples, and the right one."""
    model, loss_fn, inputs, targets = perceptron()
    model.double()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("samples", "slices"))
    parallelize_module(model, mesh["slices"], of_perceptron())
    found = []
    for params in (None, "norm.*"):  # whole parameters alone would be counted twice
        step = psg_fx.transform(model, loss_fn, quantities=psg_fx.ClippedSum(0.3), params=params, backend="eager")
        out = step(inputs, targets)
        for group in (None, mesh.get_group("slices")):
            with pytest.raises(BadArgument) as error:
                psg_fx.distributed.reduce(psg_fx.microbatch(step, 2)(inputs, targets), group)
            found.append(str(error.value))
        if params is None:
            turned = distribute_tensor(model.up.weight.full_tensor().detach(), mesh["slices"], [Shard(1)])
            with pytest.raises(BadArgument, match=r"it is sharded .*, as S\(1\) over .*is sharded .*, as S\(0\)"):
                psg_fx.distributed.set_grad(model, {"up.weight": turned})
        again = psg_fx.distributed.reduce(out, mesh.get_group("samples"))
        for name, value in again.clipped_sum.items():
            assert torch.equal(*(getattr(t, "to_local", t.clone)() for t in (value, out.clipped_sum[name])))
    return found


def test_slices_are_not_added_to_one_another(processes: Processes) -> None:
    found = processes.run(check_groups_of_slices, 2)[0]
    assert len(found) == 4
    assert found[0] == found[2] == (
        "the group has processes that have computed the same samples\n"
        "  where  psg_fx.distributed.reduce(out)\n"
        "  why    parallelize_module has sliced the model over the processes 0, 1: different slices would be "
        "added up, and samples counted several times\n"
        "  fix    give the group of the mesh's other dim, that of different samples: "
        'reduce(out, mesh.get_group("samples")); where there is none, the output is that of all samples already'
    )  # fmt: skip


@pytest.mark.rest
def test_replicas_of_slices_are_put_together_by_reduce(processes: Processes) -> None:
    processes.run(check_replicas, 4)


def check_two_meshes(rank: int, world: int) -> list[str]:
    """Layers over two meshes, a weight that lies otherwise, what steps of slices do not do, and what they say."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model, loss_fn, inputs, targets = perceptron()
    parallelize_module(model.double(), mesh["a"], UP)
    parallelize_module(model, mesh["b"], DOWN)
    found = []
    with pytest.raises(NotYetSupported) as error:
        transformed(model, loss_fn, psg_fx.Norms())
    found.append(str(error.value))
    torch.manual_seed(0)
    model, *_ = perceptron()
    parallelize_module(model.double(), mesh["a"], UP | DOWN)
    with pytest.raises(NotYetSupported, match="warm is not for tensor-parallel models"):
        psg_fx.transform(model, loss_fn, warm="eager")
    step = transformed(model, loss_fn, psg_fx.ClippedSum(0.3))
    norms = step(inputs, targets).norms
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))  # torch takes its tensors to the first one
    torch.manual_seed(0)
    same, *_ = perceptron()
    parallelize_module(same.double(), again["a"], UP | DOWN)
    torch.testing.assert_close(transformed(same, loss_fn, psg_fx.ClippedSum(0.3))(inputs, targets).norms, norms)
    for refused in (lambda: step.validate(inputs, targets), lambda: step.export("x.pt2", inputs, targets)):
        with pytest.raises(NotYetSupported) as error:
            refused()
        found.append(str(error.value))
    found.append(step.explain())
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.full_tensor().detach(), mesh["a"], [Shard(1)]))
    with pytest.raises(NotYetSupported) as error:
        step(inputs, targets)
    return [*found, str(error.value)]


@pytest.mark.slow
def test_the_rest_of_a_step(processes: Processes) -> None:
    two, validated, exported, text, otherwise = processes.run(check_two_meshes, 4)[0]
    assert two.splitlines()[0] == "down is sliced over another mesh than the layers before"
    assert validated.splitlines()[0] == "a step of a tensor-parallel model is not validated"
    assert exported.splitlines()[0] == "a step of a sharded model is not exported"
    assert "Tensor parallel: 3 parameters are sliced over 2 processes, which compute the same samples" in text
    assert "the graph has 3 all_reduce, the same in each" in text
    assert "Sharded:" not in text
    assert otherwise.splitlines()[0] == "the parameter up.weight is a DTensor that lies as ('S(1)',) on [2] processes"


def check_compiled(rank: int, world: int) -> None:
    """By inductor, at two batch sizes, while the weights change."""
    model, loss_fn, inputs, targets = perceptron()
    model, inputs = model.float(), inputs.float()
    whole = copy.deepcopy(model)
    parallel(model, of_perceptron(), world)
    step = transformed(model, loss_fn, psg_fx.ClippedSum(0.3), backend="inductor")
    one = ByLoop(whole, loss_fn, psg_fx.ClippedSum(0.3))
    for size in (6, 5):
        out, expected = step(inputs[:size], targets[:size]), one(inputs[:size], targets[:size])
        torch.testing.assert_close(out.norms, expected.norms.float(), rtol=1e-4, atol=1e-6)
        assert max(far(out.clipped_sum[name], value) for name, value in expected.clipped_sum.items()) < 1e-4
        for each, found in ((model, out), (whole, expected)):
            psg_fx.distributed.set_grad(each, found.clipped_sum)
            torch.optim.SGD(each.parameters(), lr=0.1, foreach=False).step()


@pytest.mark.rest
@pytest.mark.inductor
@pytest.mark.slow
def test_compiled(processes: Processes) -> None:
    processes.run(check_compiled, 2)
