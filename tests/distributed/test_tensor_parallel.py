"""Models sliced by `parallelize_module` give what one process gives with whole parameters: rows that are equal in all
processes of the mesh, and sums placed like the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

import psg_fx
from psg_fx.errors import NotYetSupported, PsgError
from support.by_loop import ByLoop
from support.processes import Processes

pytestmark = pytest.mark.xdist_group("processes")

ROWS = ("losses", "norms", "clip_factors")
SUMS = ("clipped_sum", "weighted_sum", "mean_grad", "second_moment")
QUANTITIES = (
    psg_fx.ClippedSum(max_norm=0.3), psg_fx.WeightedSum(), psg_fx.MeanGrad(), psg_fx.SecondMoment(centered=True),
)  # fmt: skip


class Perceptron(nn.Module):
    """A norm and a head that are whole, a layer cut by columns before one cut by rows, and a scale of what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(self.up(self.norm(x)).tanh())).mean(1)


class RMSNorm(nn.RMSNorm):
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 0.5, 1.5)


class Attention(nn.Module):
    """Causal, with rotated queries and keys; as many heads as its slices have."""

    def __init__(self, width: int, each: int) -> None:
        super().__init__()
        self.each = each
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for f in (self.q, self.k, self.v))
        angles = torch.arange(q.shape[2], dtype=x.dtype)[:, None] / torch.arange(1, self.each // 2 + 1)
        q, k = rotated(q, angles), rotated(k, angles)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(h.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, width: int, each: int) -> None:
        super().__init__()
        self.before, self.attention, self.after = RMSNorm(width), Attention(width, each), RMSNorm(width)
        self.gate, self.up, self.down = (
            nn.Linear(*s, bias=False) for s in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A small one."""

    def __init__(self, layers: int = 2, width: int = 8, each: int = 4, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, each) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Embeddings(nn.Module):
    """One cut by columns, one by rows with a row that takes no part, and one whole; a layer that reads cut values."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rows, self.whole = nn.Embedding(6, 4), nn.Embedding(6, 4, padding_idx=4), nn.Embedding(6, 4)
        self.mix, self.out = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mix(self.columns(ids) + self.rows(ids) + self.whole(ids)).tanh())


def perceptron() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """The model, a loss, and a batch of 6."""
    return Perceptron(), F.cross_entropy, torch.randn(6, 4, 6, dtype=torch.float64), torch.randint(3, (6,))


def of_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def llama(layers: int = 2) -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Llama(layers), of_tokens, torch.randint(12, (6, 6)), torch.randint(12, (6, 6))


def embeddings() -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Embeddings(), of_tokens, torch.randint(6, (6, 5)), torch.randint(6, (6, 5))


def of_perceptron() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def of_llama() -> dict[str, Any]:
    each = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
    each |= {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    blocks = {f"blocks.*.{name}": style for name, style in each.items()}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return blocks | ends


def of_sequences() -> dict[str, Any]:
    """That of the llama, with values that are cut along their sequences between layers."""
    cut = Shard(1)
    each: dict[str, Any] = {f"attention.{name}": ColwiseParallel(input_layouts=cut) for name in "qkv"}
    each |= {name: ColwiseParallel(input_layouts=cut) for name in ("gate", "up")}
    each |= {name: RowwiseParallel(output_layouts=cut) for name in ("attention.o", "down")}
    each |= {name: SequenceParallel(use_local_output=True) for name in ("before", "after")}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }
    return {f"blocks.*.{name}": style for name, style in each.items()} | ends


def of_embeddings() -> dict[str, Any]:
    return {
        "columns": ColwiseParallel(output_layouts=Replicate()),
        "rows": RowwiseParallel(input_layouts=Replicate()),
        "mix": ColwiseParallel(output_layouts=Replicate()),
        "out": RowwiseParallel(input_layouts=Replicate()),
    }


CASES: dict[str, tuple[int, Any, Any]] = {
    "perceptron": (2, perceptron, of_perceptron),
    "embeddings": (2, embeddings, of_embeddings),
    "llama": (2, llama, of_llama),
    "llama, cut sequences": (2, llama, of_sequences),
    "llama, fully sharded": (4, partial(llama, layers=1), of_llama),
}
"""How many processes (4: in two dims), the model, and its plan."""


def parallel(model: Any, plan: Mapping[str, Any], world: int) -> slice:
    """The model is sliced, on four processes sharded over pairs as well; of 6 samples, those of this process."""
    if world == 2:
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        return slice(None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("samples", "slices"))
    parallelize_module(model, mesh["slices"], plan)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["samples"])
    fully_shard(model, mesh=mesh["samples"])
    return (slice(0, 4), slice(4, 6))[mesh.get_local_rank("samples")]


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == expected.shape
    return float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def transformed(model: nn.Module, loss_fn: Any, quantities: Any, backend: str = "eager") -> Any:
    return psg_fx.transform(model, loss_fn, quantities=quantities, backend=backend, progress=False)


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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rest] if n == "llama" else []) for n in CASES])
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


def check_ways(rank: int, world: int) -> list[int]:
    """Groups of samples, parts within a budget, some parameters only, frozen ones, and half precision."""
    model, loss_fn, inputs, targets = perceptron()
    model.double()
    whole = copy.deepcopy(model)
    parallel(model, of_perceptron(), world)
    ids = torch.tensor([0, 1, 0, 2, 2, 0])
    quantities = [psg_fx.ClippedSum(max_norm=0.3), psg_fx.MeanGrad()]
    sizes = []
    for options, given, names in (
        ({}, {"groups": ids, "num_groups": 3}, None),
        ({"memory_budget": 6000}, {}, None),
        ({"params": "norm.*"}, {}, ["norm.weight", "norm.bias"]),
        ({"params": ["down.weight", "head.*"]}, {}, ["down.weight", "head.weight", "head.bias"]),
    ):
        step = psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager", progress=False, **options)
        out = step(inputs, targets, **given)
        expected = ByLoop(whole, loss_fn, quantities, params=names)(inputs, targets, **given)
        sizes.append(step.captures[-1].step.part or 6)
        torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
        for field in ("clipped_sum", "mean_grad"):
            assert list(getattr(out, field)) == list(getattr(expected, field))
            for name, value in getattr(expected, field).items():
                assert far(getattr(out, field)[name], value) < 1e-10, (options, field, name)
    for m in (model, whole):
        m.up.requires_grad_(False)
    out = transformed(model, loss_fn, quantities)(inputs, targets)
    expected = ByLoop(whole, loss_fn, quantities)(inputs, targets)
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        half = transformed(model.float(), loss_fn, quantities)(inputs.float(), targets).norms.double()
    torch.testing.assert_close(half, expected.norms, rtol=0.05, atol=1e-3)
    assert far(half, expected.norms) > 1e-5
    return sizes


def test_further_ways_to_ask(processes: Processes) -> None:
    found = processes.run(check_ways, 2)
    assert found[0] == found[1]
    assert found[0][1] < 6


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


@pytest.mark.rest
def test_replicas_of_slices_are_put_together_by_reduce(processes: Processes) -> None:
    processes.run(check_replicas, 4)


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


UP, DOWN = {"up": ColwiseParallel()}, {"down": RowwiseParallel()}
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
    "a penalty on a slice": (held, UP | DOWN, "the loss is not the same in all processes of the mesh"),
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
    step(inputs, targets)
    for refused in (lambda: step.validate(inputs, targets), lambda: step.export("x.pt2", inputs, targets)):
        with pytest.raises(NotYetSupported) as error:
            refused()
        found.append(str(error.value))
    found.append(step.explain())
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.full_tensor().detach(), mesh["a"], [Shard(1)]))
    with pytest.raises(NotYetSupported) as error:
        step(inputs, targets)
    return [*found, str(error.value)]


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
        torch.testing.assert_close(out.norms, expected.norms, rtol=1e-4, atol=1e-6)
        assert max(far(out.clipped_sum[name], value) for name, value in expected.clipped_sum.items()) < 1e-4
        for each, found in ((model, out), (whole, expected)):
            psg_fx.distributed.set_grad(each, found.clipped_sum)
            torch.optim.SGD(each.parameters(), lr=0.1, foreach=False).step()


@pytest.mark.rest
@pytest.mark.inductor
@pytest.mark.slow
def test_compiled(processes: Processes) -> None:
    processes.run(check_compiled, 2)
