"""Models under `fully_shard` give what one process gives with whole parameters: rows of the own samples, and sums of
all samples placed like the parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import psg_fx
from psg_fx.errors import BadArgument, NotYetSupported, PsgError
from support.by_loop import ByLoop, close
from support.processes import Processes
from support.sharded import (
    CASES,
    LEFT,
    QUANTITIES,
    SUMS,
    Blocks,
    by_blocks,
    far,
    share,
    small,
    tied,
    together,
    transformed,
)

pytestmark = pytest.mark.xdist_group("processes")


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


def check_after_evaluation(rank: int, world: int) -> None:
    """A forward pass leaves the root's parameters gathered, which optimizers of shards do not change.  The first call
    is under a mode whose tensors cannot be written outside of it.
    """
    model, loss_fn, inputs, targets = small()
    whole, mine = copy.deepcopy(model), share(rank, world)
    by_blocks(model)
    step, one = transformed(model, loss_fn, QUANTITIES[0]), ByLoop(whole, loss_fn, QUANTITIES[0])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, whole)]
    with torch.inference_mode():
        step(inputs[mine], targets[mine])
    for _ in range(3):
        for m in (model, whole):
            with torch.no_grad():
                m(inputs[mine])
        out, expected = step(inputs[mine], targets[mine]), one(inputs, targets)
        close(out.norms, expected.norms[mine], rtol=1e-5, atol=1e-5)
        for m, found in ((model, out), (whole, expected)):
            with torch.no_grad():
                m(inputs[mine])
            psg_fx.distributed.set_grad(m, found.clipped_sum)
        for optimizer in optimizers:
            optimizer.step()


def test_a_forward_pass_before_a_step_leaves_nothing_old(processes: Processes) -> None:
    processes.run(check_after_evaluation, 2)


class Encoding(nn.Module):
    """Its encoder is called by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder.encode(x, scale=2.0).to(self.head.weight.dtype))
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def encode(self, x: Tensor, scale: float) -> Tensor:
        return self.inner(x).tanh() * scale


def check_methods(rank: int, world: int, dtype: torch.dtype | None) -> bool:
    """Methods that count as forward, with the casts of a policy and without."""
    model = Encoding()
    whole, x, y = copy.deepcopy(model), torch.randn(7, 6), torch.randint(3, (7,))
    fully_shard(model.encoder, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype))
    register_fsdp_forward_method(model.encoder, "encode")
    fully_shard(model)
    mine, registered = share(rank, world), model.encoder.encode
    out = transformed(model, F.cross_entropy, QUANTITIES[0])(x[mine], y[mine])
    expected = ByLoop(whole, F.cross_entropy, QUANTITIES[0])(x, y)
    exact = 1e-5 if dtype is None else 0.05
    close(out.norms, expected.norms[mine], rtol=exact, atol=1e-5)
    assert max(far(out.clipped_sum[name], value) for name, value in expected.clipped_sum.items()) < exact
    assert model.encoder.encode is registered
    close(model(x[mine]), whole(x[mine]), rtol=exact, atol=exact)
    return bool(torch.equal(out.losses, F.cross_entropy(model(x[mine]), y[mine], reduction="none")))


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.rest)])
def test_methods_that_count_as_forward(processes: Processes, dtype: torch.dtype | None) -> None:
    assert processes.run(check_methods, 2, dtype) == [True, True]


class Saving(Blocks):
    """Looks at what it would save."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.state_dict()) / len(self.head.state_dict())


def check_saving(rank: int, world: int) -> None:
    """FSDP shards parameters when they are saved, and a step needs them whole."""
    _, loss_fn, inputs, targets = small()
    model = Saving()
    whole, mine = copy.deepcopy(model), share(rank, world)
    by_blocks(model)
    model(inputs[mine])  # torch registers its hooks
    out = transformed(model, loss_fn, QUANTITIES[0])(inputs[mine], targets[mine])
    close(out.norms, ByLoop(whole, loss_fn, QUANTITIES[0])(inputs, targets).norms[mine], rtol=1e-5, atol=1e-5)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def test_a_forward_that_asks_what_would_be_saved(processes: Processes) -> None:
    processes.run(check_saving, 2)


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
    apart, *_ = tied()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    fully_shard(apart.get_submodule("few"), mesh=mesh["alone"])
    fully_shard(apart, mesh=mesh["all"])
    with pytest.raises(NotYetSupported, match=r"few\.weight is sharded over other processes than"):
        transformed(apart, loss_fn, psg_fx.ClippedSum(0.3))
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
    assert "it is sharded [11, 8] on cpu, as S(0) over [2] processes, and the parameter is plain [11, 8]" in other
    assert "Sharded: the step is one graph of the whole model" in text
    assert "1.1 KiB on each process, beside its own 0.6 KiB" in text  # 275 parameters, 146 here
    assert "whole until they are scattered: 0.8 KiB more" in text  # 203 are asked


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
