"""Models under `fully_shard` give what one process gives with whole parameters: rows of the own samples, and sums of
all samples placed like the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_activations
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import psg_fx
from psg_fx import zoo
from psg_fx.errors import BadArgument, NotYetSupported, PsgError
from support.by_loop import ByLoop, close
from support.processes import Processes
from support.selection import one_in

pytestmark = pytest.mark.xdist_group("processes")

SUMS = ("clipped_sum", "weighted_sum", "mean_grad", "second_moment")
QUANTITIES = (
    psg_fx.ClippedSum(max_norm=0.3), psg_fx.WeightedSum(), psg_fx.MeanGrad(), psg_fx.SecondMoment(centered=True),
)  # fmt: skip


class Tied(nn.Module):
    """A tied embedding and head, a layer used twice, a frozen layer, and odd sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.frozen, self.few = nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inner(self.norm(self.inner(self.embedding(ids))).tanh())
        h = self.frozen(h) + F.pad(self.few(h), (0, 5))
        return h @ self.embedding.weight.T


def tied() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """The model, a loss, and a batch of 7."""
    ids = torch.randint(11, (7, 5))
    return Tied(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), ids, torch.randint(11, (7, 5))


def gpt() -> tuple[nn.Module, Any, Tensor, Tensor]:
    ex = zoo.example("gpt", batch=7, layers=1, width=16, heads=2, tokens=6, vocabulary=20)
    return ex.model, ex.loss_fn, ex.inputs, ex.targets


class Blocks(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.head(x)
        return out


def small() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """For what does not depend on the layers."""
    return Blocks(), F.cross_entropy, torch.randn(7, 6), torch.randint(3, (7,))


def by_blocks(model: Any, **options: Any) -> None:
    """As it is usually done: every block, then the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def together(model: Any, **options: Any) -> None:
    """Some modules share one message, and the root another."""
    fully_shard([model.norm, model.few], **options)
    fully_shard(model, **options)


def without_one(model: Any, **options: Any) -> None:
    """A parameter stays whole in every process."""
    fully_shard(model, ignored_params={model.norm.weight}, **options)


def parts_only(model: Any, **options: Any) -> None:
    """The root's own parameters stay whole."""
    fully_shard(model.inner, **options)
    fully_shard(model.few, **options)


def along_columns(model: Any, **options: Any) -> None:
    """Cut along the second dim where the mesh divides it."""
    size = dist.get_world_size()

    def placement(p: Tensor) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % size == 0 else None

    fully_shard(model, shard_placement_fn=placement, **options)


def checkpointed(model: Any, **options: Any) -> None:
    """With torch's hooks for activation checkpointing beside those of fully_shard."""
    checkpoint_activations(model.inner)
    fully_shard(model.inner, **options)
    fully_shard(model, **options)


def hybrid(shard: Callable[..., None], model: Any, **options: Any) -> None:
    """Sharded over pairs of processes, replicated over the pairs."""
    shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")), **options)


CASES: dict[str, tuple[int, Any, Any]] = {
    "gpt by blocks": (2, gpt, by_blocks),
    "kept after forward": (2, tied, partial(parts_only, reshard_after_forward=False)),
    "along columns": (2, tied, along_columns),
    "one parameter whole": (2, tied, without_one),
    "checkpointed": (2, tied, checkpointed),
    "tied and odd": (4, tied, fully_shard),
    "modules together": (4, tied, together),
    "parts only": (4, tied, parts_only),
    "hybrid": (4, tied, partial(hybrid, fully_shard)),
    "hybrid, along columns": (4, small, partial(hybrid, along_columns)),
    "hybrid, tied along columns": (4, tied, partial(hybrid, along_columns)),
}
"""How many processes, the model, and how it is sharded."""
LEFT = {
    "along columns",
    "kept after forward",
    "parts only",
    "modules together",
    "hybrid",
    "tied and odd",
    "hybrid, tied along columns",
}
"""What the other cases are made of, or the tests below: for `make test-all`."""


def share(rank: int, world: int) -> slice:
    """Of 7 samples: the first process has more than others, and of 4 the third has none."""
    bounds = {1: (0, 7), 2: (0, 5, 7), 4: (0, 4, 6, 6, 7)}[world]
    return slice(bounds[rank], bounds[rank + 1])


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == expected.shape
    return float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def transformed(model: nn.Module, loss_fn: Any, quantities: Any = QUANTITIES) -> Any:
    return psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager", progress=False)


def check_equal_to_one_process(rank: int, world: int, name: str) -> int:
    """Three optimizer steps, on batches of different shares."""
    _, make, shard = CASES[name]
    model, loss_fn, inputs, targets = make()
    model, inputs = model.double(), inputs.double() if inputs.is_floating_point() else inputs
    whole = copy.deepcopy(model)
    shard(model)
    step, one = transformed(model, loss_fn), ByLoop(whole, loss_fn, QUANTITIES)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    weights, mine = torch.rand(7, dtype=torch.float64), share(rank, world)
    for _ in range(3):
        out = step(inputs[mine], targets[mine], weights=weights[mine])
        expected = one(inputs, targets, weights=weights)
        for field in ("losses", "norms", "clip_factors"):
            torch.testing.assert_close(getattr(out, field), getattr(expected, field)[mine], rtol=1e-9, atol=1e-12)
        for field in SUMS:
            for key, p in model.named_parameters():
                if p.requires_grad:
                    value = getattr(out, field)[key]
                    assert type(value) is (DTensor if isinstance(p, DTensor) else Tensor)
                    assert not isinstance(p, DTensor) or value.placements == p.placements
                    assert far(value, getattr(expected, field)[key]) < 1e-10, (field, key)
        psg_fx.distributed.set_grad(model, out.clipped_sum, 1 / 7)
        psg_fx.distributed.set_grad(whole, expected.clipped_sum, 1 / 7)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert far(p.detach(), q.detach()) < 1e-6
    return len(step.captures)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rest] if name in LEFT else []) for name in CASES]
)
def test_equal_to_one_process(processes: Processes, name: str) -> None:
    world = CASES[name][0]
    assert processes.run(check_equal_to_one_process, world, name) == [1] * world


def check_parts(rank: int, world: int) -> None:
    """By `microbatch` and within a memory budget: the processes have another number of parts."""
    model, loss_fn, inputs, targets = tied()
    whole, mine = copy.deepcopy(model), share(rank, world)
    together(model)
    quantities = [psg_fx.ClippedSum(max_norm=0.3), psg_fx.MeanGrad()]
    expected = ByLoop(whole, loss_fn, quantities)(inputs, targets)
    budget = psg_fx.transform(
        model, loss_fn, quantities=quantities, backend="eager", progress=False, memory_budget=20_000
    )
    parts = psg_fx.microbatch(transformed(model, loss_fn, quantities), 2)
    for out in (parts(inputs[mine], targets[mine]), budget(inputs[mine], targets[mine])):
        close(out.norms, expected.norms[mine], rtol=1e-4, atol=1e-6)
        for field in ("clipped_sum", "mean_grad"):
            for name, value in getattr(expected, field).items():
                assert far(getattr(out, field)[name], value) < 1e-4, (field, name)
    assert budget.captures[-1].step.part is not None


def test_in_parts(processes: Processes) -> None:
    processes.run(check_parts, 2)


class Mixed(nn.Module):
    """Says what dtypes arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        return self.last(h + h.float().to(h.dtype))


def check_mixed_precision(rank: int, world: int) -> None:
    """As the same model with the casts written by hand, which FSDP's own forward is held against, too."""
    model, y = Mixed(), torch.randint(3, (8,))
    x = torch.randn(8, 6)
    whole = copy.deepcopy(model)
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(model.second, mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=half)
    for name in ("first", "last"):
        getattr(whole, name).to(torch.bfloat16)
    whole.second.register_forward_pre_hook(lambda m, args: (args[0].float(),))
    whole.second.register_forward_hook(lambda m, args, out: out.bfloat16())
    whole.register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    whole.register_forward_hook(lambda m, args, out: out.float())
    mine = slice(rank, None, world)
    out = transformed(model, F.cross_entropy, QUANTITIES[:1])(x[mine], y[mine])
    expected = transformed(whole, F.cross_entropy, QUANTITIES[:1])(x[mine], y[mine])
    assert torch.equal(out.losses, expected.losses)
    assert torch.equal(out.norms, expected.norms)
    for name, p in model.named_parameters():
        value = expected.clipped_sum[name].float()
        dist.all_reduce(value)
        assert out.clipped_sum[name].dtype is p.dtype is torch.float32
        assert far(out.clipped_sum[name], value) < 1e-6
    assert torch.equal(model(x), whole(x))


def test_the_casts_of_a_mixed_precision_policy_are_those_of_the_step(processes: Processes) -> None:
    processes.run(check_mixed_precision, 2)


def check_it_stays_as_it_is(rank: int, world: int) -> None:
    """Before and after a step, also one that fails, the model is FSDP's and trains as ever; hooks of users run."""
    model, loss_fn, inputs, targets = small()
    doubled = copy.deepcopy(model)
    for each in (model, doubled):
        each.blocks[0].register_forward_hook(lambda m, args, out: 2 * out)
    by_blocks(model)
    mine = share(rank, world)

    def hooks(module: nn.Module) -> list[Any]:
        return [list(held.items()) for held in (module._forward_hooks, module._forward_pre_hooks)]

    def describe() -> Any:
        return [
            (type(m), [type(p) for p in m.parameters()], *hooks(m))
            for m in model.modules()
        ]  # fmt: skip

    def ordinary() -> dict[str, Tensor]:
        model.zero_grad()
        loss_fn(model(inputs[mine]), targets[mine]).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    first = ordinary()
    before = describe()
    step = transformed(model, loss_fn, psg_fx.ClippedSum(max_norm=0.3))
    out = step(inputs[mine], targets[mine])
    expected = ByLoop(doubled, loss_fn, psg_fx.ClippedSum(max_norm=0.3))(inputs[mine], targets[mine])
    close(out.norms, expected.norms, rtol=1.3e-6, atol=1e-5)
    for name, value in ordinary().items():
        torch.testing.assert_close(value, first[name])
    assert describe()[0][0] is before[0][0]
    with pytest.raises(PsgError):
        transformed(model, lambda o, y: loss_fn(o - o.mean(0), y), psg_fx.Norms())(inputs[mine], targets[mine])
    model.reshard()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert describe() == before
    for name, value in ordinary().items():
        torch.testing.assert_close(value, first[name])


def test_the_model_stays_as_it_is(processes: Processes) -> None:
    processes.run(check_it_stays_as_it_is, 2)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def check_the_rest(rank: int, world: int) -> list[str]:
    """Directions placed like the parameters, validate, explain, and what is refused."""
    model, loss_fn, inputs, targets = tied()
    whole = copy.deepcopy(model)
    mine = share(rank, world)
    late = transformed(model, loss_fn, psg_fx.Norms())
    together(model)
    found = []
    with pytest.raises(NotYetSupported) as error:
        late(inputs[mine], targets[mine])
    found.append(str(error.value))
    with pytest.raises(NotYetSupported) as error:
        psg_fx.transform(model)
    found.append(str(error.value))
    with pytest.raises(BadArgument) as wrong:
        transformed(model, loss_fn, psg_fx.SecondMoment(centered=True))
    found.append(str(wrong.value))
    quantities = [psg_fx.Dots(), psg_fx.Gram(), psg_fx.Grads(), psg_fx.ClippedSum(0.3)]
    step, one = transformed(model, loss_fn, quantities), ByLoop(whole, loss_fn, quantities)
    out = step(inputs[mine], targets[mine], directions=_trained(model))
    expected = one(inputs[mine], targets[mine], directions=_trained(whole))
    close(out.dots, expected.dots, rtol=1e-4, atol=1e-5)
    close(out.gram, expected.gram, rtol=1e-4, atol=1e-5)
    close(out.grads, expected.grads, rtol=1e-4, atol=1e-5)
    with pytest.raises(BadArgument) as wrong:
        psg_fx.distributed.reduce(out)
    found.append(str(wrong.value))
    with pytest.raises(BadArgument) as wrong:
        psg_fx.distributed.set_grad(whole, out.clipped_sum)
    found.append(str(wrong.value))
    report = transformed(model, loss_fn, [psg_fx.Grads(), psg_fx.ClippedSum(0.3)]).validate(inputs[mine], targets[mine])
    assert report.ok, str(report)
    return [*found, step.explain()]


def test_the_rest_of_a_step(processes: Processes) -> None:
    (late, bare, variance, twice, other, text), _ = processes.run(check_the_rest, 2)
    assert late.splitlines()[0] == "the model is sharded over processes"
    assert "  fix    give the loss, after sharding: psg_fx.transform(model, loss_fn)" in late
    assert bare == late
    assert variance.splitlines()[:2] == [
        "SecondMoment(centered=True) of all processes does not follow from those of each",
        "  where  transform(quantities=...)",
    ]
    assert "it is over all processes already" in twice
    assert "it is sharded [11, 8], and the parameter is plain [11, 8]" in other
    assert "Sharded: the step is one graph of the whole model" in text
    assert "1.1 KiB on each process, beside its own 0.6 KiB" in text  # 275 parameters, 146 here
    assert "whole until they are scattered: 0.8 KiB more" in text  # 203 are asked


def check_saved(rank: int, world: int, folder: str) -> None:
    model, loss_fn, inputs, targets = small()
    by_blocks(model)
    step = transformed(model, loss_fn, psg_fx.ClippedSum(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = share(rank, world)
    psg_fx.distributed.set_grad(model, step(inputs[mine], targets[mine]).clipped_sum)
    optimizer.step()
    checkpoint.save(step.state_dict(), checkpoint_id=folder)


def check_loaded(rank: int, world: int, folder: str) -> None:
    model, loss_fn, inputs, targets = small()
    whole = copy.deepcopy(model)
    by_blocks(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    step = transformed(model, loss_fn, psg_fx.ClippedSum(0.3))
    state = step.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    step.load_state_dict(state)
    one = transformed(whole, loss_fn, psg_fx.ClippedSum(0.3))
    psg_fx.distributed.set_grad(whole, one(inputs, targets).clipped_sum)
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    mine = share(rank, world)
    out, expected = step(inputs[mine], targets[mine]), one(inputs, targets)
    torch.testing.assert_close(out.norms, expected.norms[mine], rtol=1e-4, atol=1e-6)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert far(p.detach(), q.detach()) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("by", "then"), one_in(3, [(2, 1), (1, 2), (4, 2)]))
def test_a_checkpoint_is_read_by_other_processes(processes: Processes, by: int, then: int, tmp_path: Any) -> None:
    processes.run(check_saved, by, str(tmp_path))
    processes.run(check_loaded, then, str(tmp_path))


def check_compiled(rank: int, world: int, make: Any, shard: Any, dynamic: bool | None) -> None:
    """By inductor, at two batch sizes, while the weights change."""
    model, loss_fn, inputs, targets = make()
    whole = copy.deepcopy(model)
    shard(model)
    step = psg_fx.transform(model, loss_fn, quantities=psg_fx.ClippedSum(0.3), dynamic=dynamic, progress=False)
    one = transformed(whole, loss_fn, psg_fx.ClippedSum(0.3))
    for size in (7, 6):
        mine = slice(0, 4) if rank == 0 else slice(4, size)
        out, expected = step(inputs[mine], targets[mine]), one(inputs[:size], targets[:size])
        for each, found in ((model, out), (whole, expected)):
            psg_fx.distributed.set_grad(each, found.clipped_sum)
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        torch.testing.assert_close(out.norms, expected.norms[mine], rtol=1e-4, atol=1e-6)
        assert max(far(out.clipped_sum[name], value) for name, value in expected.clipped_sum.items()) < 1e-4


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shard", "dynamic"),
    [(small, by_blocks, True), (tied, together, None)],
)
@pytest.mark.rest
def test_compiled(processes: Processes, make: Any, shard: Any, dynamic: bool | None) -> None:
    processes.run(check_compiled, 2, make, shard, dynamic)
