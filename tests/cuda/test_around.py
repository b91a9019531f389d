"""What users do around a step on a CUDA device: moves, streams, graphs, generators, scalers, other devices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Norms, WeightedSum, zoo
from psg_fx.planner import rates
from support import oracle
from support.device import CUDA

pytestmark = [*CUDA, pytest.mark.usefixtures("fresh_compiler", "full_precision")]

CLOSE = 5e-5


def small(batch: int = 6, device: str = "cuda") -> zoo.Example:
    return zoo.example("simplecnn", batch=batch, device=device, image=12, width=4, hidden=8)


def gradients_of(ex: zoo.Example) -> dict[str, Tensor]:
    return oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim)[1]


@pytest.mark.inductor
@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 2, 2], [2, 0, 2, -1, 2, 0], [0, 0, 0, 0, 0, 1]])
def test_groups(ids: list[int]) -> None:
    ex = small()
    want = {n: torch.stack([g[torch.tensor(ids) == u].sum(0) for u in range(3)]) for n, g in gradients_of(ex).items()}
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=[Grads(), Norms()])
    for groups in (torch.tensor(ids), torch.tensor(ids, device="cuda")):
        out = step(ex.inputs, ex.targets, groups=groups, num_groups=3)
        assert oracle.worst_error(out.grads, want) < CLOSE
    step(ex.inputs, ex.targets, groups=groups, num_groups=3)
    torch.cuda.synchronize()
    with synchronisation_is_an_error():
        out = step(ex.inputs, ex.targets, groups=groups, num_groups=3)
        wrong = step(ex.inputs, ex.targets, groups=groups + 1, num_groups=3)
    assert out.norms.isfinite().all()
    assert wrong.norms.isnan().all() == (max(ids) == 2)


def test_moved_there_and_back() -> None:
    ex, there = small(device="cpu"), small()
    want = gradients_of(ex)
    step = psg_fx.transform(ex.model, ex.loss_fn, backend="eager")
    for example in (ex, there, ex):
        ex.model.to(example.inputs.device)
        out = step(example.inputs, example.targets)
        assert {g.device.type for g in out.grads.values()} == {example.inputs.device.type}
        assert oracle.worst_error({n: g.cpu() for n, g in out.grads.items()}, want) < CLOSE


@pytest.mark.parametrize("model_there", [True, False])
def test_inputs_elsewhere_are_an_error_that_names_both(model_there: bool) -> None:
    ex, there = small(device="cpu"), small()
    model, given = (there.model, ex) if model_there else (ex.model, there)
    step = psg_fx.transform(model, ex.loss_fn, backend="eager")
    devices = r"on cpu, the parameters on cuda:0" if model_there else r"on cuda:0, the parameters on cpu"
    with pytest.raises(psg_fx.BadArgument, match=devices):
        step(given.inputs, given.targets)


def test_copy_on_the_device() -> None:
    ex = small(device="cpu")
    step = psg_fx.transform(ex.model, ex.loss_fn, backend="eager")
    step(ex.inputs, ex.targets)
    there = copy.deepcopy(step).to("cuda")
    out = there(ex.inputs.cuda(), ex.targets.cuda())
    assert oracle.worst_error({n: g.cpu() for n, g in out.grads.items()}, gradients_of(ex)) < CLOSE


@pytest.mark.inductor
def test_another_stream() -> None:
    ex = small()
    want = gradients_of(ex)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=[Grads(), Norms()])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream):
            out = step(ex.inputs, ex.targets)
        stream.synchronize()
        assert oracle.worst_error(out.grads, want) < CLOSE
        assert oracle.relative_error(out.norms, oracle.norms(want)) < CLOSE


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["simplecnn", "gpt", "lstm"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_no_step_waits_for_the_device(name: str, backend: str) -> None:
    sizes = {"gpt": {"layers": 1, "width": 32, "heads": 2, "tokens": 16, "vocabulary": 20}, "lstm": {"tokens": 5}}
    ex = zoo.example(name, batch=4, device="cuda", **sizes.get(name, {}))
    asked = [Norms(), ClippedSum(1.0), MeanGrad(), WeightedSum()]
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, backend=backend)
    weights = torch.ones(4, device="cuda")
    for _ in range(2):
        step(ex.inputs, ex.targets, weights=weights)
    torch.cuda.synchronize()
    with synchronisation_is_an_error():
        step(ex.inputs, ex.targets, weights=weights)


@pytest.mark.inductor
@pytest.mark.parametrize("reuse", [False, True])
def test_cuda_graphs(reuse: bool) -> None:
    """Replayed at every further call; a former output keeps its numbers, unless it need not."""
    ex = small()
    want = gradients_of(ex)
    bound = oracle.norms(want).median().item()
    step = psg_fx.transform(
        ex.model, ex.loss_fn, quantities=[Grads(), ClippedSum(bound)], mode="reduce-overhead", reuse_outputs=reuse
    )
    former = []
    for _ in range(5):
        out = step(ex.inputs, ex.targets)
        assert oracle.worst_error(out.grads, want) < CLOSE
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(want, bound)) < CLOSE
        former.append(out)
    other = step(ex.inputs.flip(0), ex.targets.flip(0))
    assert oracle.worst_error(other.grads, {n: g.flip(0) for n, g in want.items()}) < CLOSE
    if not reuse:
        for out in former:
            assert oracle.worst_error(out.grads, want) < CLOSE


@pytest.mark.inductor
def test_cuda_graphs_see_new_parameters() -> None:
    ex = small()
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=MeanGrad(), mode="reduce-overhead")
    optimizer = torch.optim.SGD(ex.model.parameters(), lr=0.1)
    for _ in range(5):
        out = step(ex.inputs, ex.targets)
        assert oracle.worst_error(out.mean_grad, oracle.mean_grad(gradients_of(ex))) < CLOSE
        for name, parameter in ex.model.named_parameters():
            parameter.grad = out.mean_grad[name].clone()
        optimizer.step()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x).relu(), 0.5, self.training))


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dropout_draws_from_the_devices_generator(backend: str) -> None:
    torch.manual_seed(0)
    model, x, y = Dropping().cuda(), torch.randn(5, 8, device="cuda"), torch.randint(3, (5,), device="cuda")
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), Norms(), MeanGrad()], backend=backend)
    step(x, y)

    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return step(x, y)

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert oracle.worst_error(again.grads, one.grads) == 0.0
    assert oracle.worst_error(other.grads, one.grads) > 1e-2
    assert oracle.worst_error(one.mean_grad, oracle.mean_grad(one.grads)) < CLOSE
    assert oracle.relative_error(one.norms, oracle.norms(one.grads)) < CLOSE
    hidden = one.grads["second.weight"].abs().sum(1)
    patterns = (hidden == 0).cpu()
    assert 0.2 < patterns.float().mean() < 0.95
    assert len({tuple(row.tolist()) for row in patterns}) == 5, "every sample has a mask of its own"


@pytest.mark.inductor
def test_a_scaler_of_losses() -> None:
    """`GradScaler` with float16: its scale is read at every call, and what it unscales is the ordinary gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda()
    x, y = torch.randn(6, 8, device="cuda"), torch.randint(4, (6,), device="cuda")
    ex = zoo.Example("tanh", model, F.cross_entropy, x, y)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0, growth_interval=2)
    optimizer = torch.optim.SGD(ex.model.parameters(), lr=0.01)
    step = psg_fx.transform(ex.model, lambda out, y: scaler.scale(F.cross_entropy(out, y)), quantities=MeanGrad())
    scaler.scale(torch.ones((), device="cuda"))  # makes the scale
    for _ in range(5):
        want = oracle.mean_grad(gradients_of(ex))
        with torch.autocast("cuda", torch.float16):
            out = step(ex.inputs, ex.targets)
            loss = ex.loss_fn(ex.model(ex.inputs), ex.targets)
        ordinary = dict(zip(want, torch.autograd.grad(loss, list(ex.model.parameters())), strict=True))
        for name, parameter in ex.model.named_parameters():
            parameter.grad = out.mean_grad[name]
        scaler.unscale_(optimizer)
        got = {name: p.grad for name, p in ex.model.named_parameters()}
        assert oracle.worst_error(got, want) < 3 * oracle.worst_error(ordinary, want) + 2e-3
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() > 128.0


@pytest.mark.inductor
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_without_a_loss(mode: str | None) -> None:
    ex = small()
    want = gradients_of(ex)
    step = psg_fx.transform(ex.model, loss_reduction="mean", mode=mode)
    for _ in range(4):
        for parameter in ex.model.parameters():
            parameter.grad_sample = None
        ex.loss_fn(step(ex.inputs), ex.targets).backward()
        got = {name: p.grad_sample for name, p in ex.model.named_parameters()}
        assert oracle.worst_error(got, want) < CLOSE


@pytest.mark.inductor
def test_parts_of_a_batch_fit_a_budget() -> None:
    ex = small(batch=32)
    want = gradients_of(ex)
    bound = oracle.norms(want).median().item()
    out = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(bound), memory_budget=1.0)(ex.inputs, ex.targets)
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(want, bound)) < CLOSE
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(bound), memory_budget=600_000, backend="eager")
    out = step(ex.inputs, ex.targets)
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(want, bound)) < CLOSE


def test_negative_factors_and_zero_gradients() -> None:
    """Where looking at a value would wait for the device, nothing does."""
    ex = small()
    with torch.no_grad():
        for parameter in ex.model.parameters():
            parameter.zero_()
    bound = torch.tensor(0.5, device="cuda")
    out = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(bound), backend="eager")(ex.inputs, ex.targets)
    assert all(torch.isfinite(value).all() for value in out.clipped_sum.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device, or none")
def test_a_second_device() -> None:
    ex = small(device="cuda:1")
    want = gradients_of(ex)
    step = psg_fx.transform(ex.model, ex.loss_fn)
    for _ in range(2):
        out = step(ex.inputs, ex.targets)
        assert {str(g.device) for g in out.grads.values()} == {"cuda:1"}
        assert oracle.worst_error(out.grads, want) < CLOSE


@pytest.mark.inductor
def test_validate_and_explain() -> None:
    ex = small()
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=[Norms(), ClippedSum(1.0)])
    step(ex.inputs, ex.targets)
    assert "cuda" in str(step.explain())
    step.validate(ex.inputs, ex.targets)


@pytest.mark.inductor
def test_a_measured_table_is_planned_with(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "folder", lambda: tmp_path)
    table = psg_fx.calibrate("cuda")
    assert rates.device("cuda") == table
    assert table.bandwidth > 1e11
    assert table.rate("gemm") > 1e12
    ex = small()
    want = gradients_of(ex)
    out = psg_fx.transform(ex.model, ex.loss_fn, quantities=[Grads(), Norms()])(ex.inputs, ex.targets)
    assert oracle.worst_error(out.grads, want) < CLOSE


@pytest.mark.inductor
def test_benchmark() -> None:
    ex = small()
    report = psg_fx.benchmark(
        ex.model, ex.loss_fn, ex.inputs, ex.targets, contenders=["ordinary*", "vmap/grads", "psg*"], min_run_time=0.05,
        rounds=1,
    )  # fmt: skip
    assert [row for row in report.rows if row.failure] == []
    assert all(row.peak_bytes for row in report.rows)
    assert report.environment["gpu"]
