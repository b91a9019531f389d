"""What lies around a compiled graph: bits of views, buffers that swap, threads, hooks, streams, settings of torch."""

from __future__ import annotations

import copy
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, NotYetSupported
from support import oracle

X, Y = torch.randn(4, 5), torch.randn(4, 5)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def negated(*shape: int) -> Tensor:
    """A view whose sign is a bit."""
    found = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert found.is_neg()
    return found


def test_inputs_and_weights_that_a_bit_negates() -> None:
    model, x, y, weights = nn.Linear(1, 1), negated(1, 1), torch.randn(1, 1), negated(1)
    step = psg_fx.transform(model, squares, quantities=[psg_fx.Grads(), psg_fx.WeightedSum()])
    for _ in range(2):
        out = step(x, y, weights=weights)
        _, grads = oracle.loop_grads(model, squares, x, y, dtype=None)
        assert oracle.worst_error(out.grads, grads) < 1e-6
        assert oracle.worst_error(out.weighted_sum, {n: g[0] * weights for n, g in grads.items()}) < 1e-6


@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute"])
def test_tensors_of_a_model_that_a_bit_negates_are_refused(how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, view = nn.Linear(5, 5), negated(5)
            made = {"parameter": nn.Parameter, "buffer": nn.Buffer, "attribute": Tensor.detach}
            self.scale = made[how](view)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    with pytest.raises(NotYetSupported, match="scale is a view that a bit negates"):
        psg_fx.transform(Model(), squares, backend="eager")(X, Y)


class Buffers(nn.Module):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.write, self.last = nn.Linear(5, 5), write, None
        self.a, self.b = nn.Buffer(torch.full((3,), 2.0)), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return self.layer(x)


def kept_before(m: Any) -> None:
    old = m.a.clone()
    m.a.add_(1)
    m.b.copy_(old)


def swapped(m: Any) -> None:
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old)


def stored(m: Any) -> None:
    m.last = m.a.clone()
    m.a.add_(1)


@pytest.mark.parametrize("write", [kept_before, swapped, stored])
def test_the_old_value_of_a_buffer(write: Callable[[Any], None]) -> None:
    """Compiled code returns it as the buffer itself, which is written next."""
    model = Buffers(write)
    ordinary = copy.deepcopy(model)
    step, drop_in = psg_fx.transform(model, squares), psg_fx.transform(copy.deepcopy(model))
    for _ in range(2):
        step(X, Y), ordinary(X), drop_in(X)
        for other in (model, drop_in.model):
            torch.testing.assert_close(dict(other.named_buffers()), dict(ordinary.named_buffers()))
            torch.testing.assert_close(other.last, ordinary.last)


@pytest.mark.slow
def test_the_old_value_of_a_buffer_in_a_file(tmp_path: Path) -> None:
    model = Buffers(kept_before)
    file = psg_fx.load(psg_fx.transform(model, squares).export(tmp_path / "step.pt2", X, Y))
    state = dict(model.state_dict())
    for name, value in file(state, X, Y).buffers.items():
        state[name].copy_(value)
    assert state["b"].tolist() == [2.0] * 3


def test_results_of_another_dtype_are_not_written_into_former_ones() -> None:
    x, y, model = torch.randn(4, 64), torch.randn(4, 5), nn.Linear(64, 5)
    step = psg_fx.transform(model, squares, quantities=psg_fx.MeanGrad(), reuse_outputs=True)
    former = step(x, y)
    model.double()
    out = step(x.double(), y.double(), out=former)
    assert {v.dtype for v in (out.losses, *out.mean_grad.values())} == {torch.float64}


def test_a_former_output_is_free_for_its_own_thread_alone() -> None:
    x, y, model = torch.randn(4, 1024), torch.randn(4, 640), nn.Linear(1024, 640)
    step = psg_fx.transform(model, squares, quantities=psg_fx.WeightedSum(), reuse_outputs=True)
    weights = {1: torch.ones(4), 2: torch.full((4,), 2.0)}
    right = step(x, y, weights=weights[1]).weighted_sum["weight"].clone()
    wrong, done = [0, 0], threading.Event()

    def again() -> None:
        out = step(x, y, weights=weights[1])
        while not done.is_set():
            out = step(x, y, weights=weights[1], out=out)
            wrong[0] += not torch.allclose(out.weighted_sum["weight"], right, atol=1e-3)

    def anew() -> None:
        for _ in range(100):
            out = step(x, y, weights=weights[2])
            done.wait(0.0005)
            wrong[1] += not torch.allclose(out.weighted_sum["weight"], 2 * right, atol=1e-3)
        done.set()

    threads = [threading.Thread(target=run) for run in (again, anew)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


def test_hooks_see_a_batch_once_inside_a_memory_budget() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x, y, found = torch.randn(64, 64), torch.randn(64, 64), []
    for budget in (None, 80_000):
        asked = [psg_fx.Norms(), psg_fx.WeightedSum()]
        step = psg_fx.transform(model, squares, quantities=asked, backend="eager", memory_budget=budget)
        seen: list[int] = []
        step.register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))
        step.register_forward_hook(lambda _, __, out, seen=seen: seen.append(len(out.losses)))
        found.append(step(x, y, weights=torch.ones(64)).norms)
        assert seen == [64]
    torch.testing.assert_close(*found)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, shift: float = 0.0) -> Tensor:
        return self.weight + shift


def test_parts_of_a_batch_without_inputs() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    step = psg_fx.transform(Alone(), loss, quantities=psg_fx.Grads(), backend="eager")
    torch.testing.assert_close(psg_fx.microbatch(step, 2)((), Y).grads["weight"], step((), Y).grads["weight"])


@pytest.fixture
def settings() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("settings")
def test_the_newer_way_to_say_how_products_are_taken() -> None:
    """Torch refuses to say it by the older way then."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert psg_fx.transform(nn.Linear(5, 5), squares)(X, Y).losses.shape == (4,)


class Tee:
    """What scripts put in the place of stderr."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stream", ["tee", "none", "closed"])
def test_stderr_that_is_no_terminal(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"tee": Tee(), "none": None, "closed": closed}[stream])
    step = psg_fx.transform(nn.Linear(5, 5), squares, backend="eager")
    assert step(X, Y).losses.shape == (4,)
    assert len(list(psg_fx.over([(X, Y)], step).losses)) == 4


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="homes of another kind")
@pytest.mark.parametrize("home", ["closed", "none"])
def test_a_home_that_is_closed_to_the_user(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("Could not determine home directory.") if home == "none" else PermissionError(13, "denied")

    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home" if home == "none" else "exists", refused)
    assert psg_fx.transform(nn.Linear(5, 5), squares, backend="eager")(X, Y).losses.shape == (4,)


def test_a_file_is_not_put_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "step.pt2").mkdir()
    with pytest.raises(BadArgument, match="a folder lies there"):
        psg_fx.transform(nn.Linear(5, 5), squares, backend="eager").export(tmp_path / "step.pt2", X, Y)


def test_a_drop_in_step_inside_of_a_model() -> None:
    inside = psg_fx.transform(nn.Linear(5, 5), backend="eager")
    with pytest.raises(NotYetSupported, match="calls a step of psg_fx"):
        psg_fx.transform(nn.Sequential(inside, nn.Linear(5, 5)), F.mse_loss, backend="eager")(X, Y)


def test_norms_that_are_finite_each() -> None:
    """Of per="parameter" the sum of their squares says nothing."""
    clipped = psg_fx.ClippedSum(max_norm=1.0, per="parameter")
    step = psg_fx.transform(nn.Linear(1, 1), lambda o: (o * 1.5e19).sum(), quantities=clipped, backend="eager")
    out = step(torch.ones(2, 1))
    torch.testing.assert_close(out.clipped_sum["weight"], torch.full((1, 1), 2.0))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept, self.calls = nn.Linear(5, 5), dict[str, Tensor](), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.layer(x)
        self.kept["h"] = h.detach()
        return h


def test_validation_and_benchmarks_leave_nothing() -> None:
    model = Keeping()
    step = psg_fx.transform(model, squares, backend="eager")
    step(X, Y)
    kept = model.kept["h"]
    step.validate(X[:2], Y[:2])
    psg_fx.benchmark(
        model, squares, X, Y, backend="eager", min_run_time=0.01, rounds=1, progress=False, quantities=["norms"],
        contenders=["psg*"],
    )  # fmt: skip
    assert model.kept["h"] is kept
    assert model.calls == 1


def test_validation_takes_what_the_step_takes() -> None:
    model = nn.Linear(5, 5)
    step = psg_fx.transform(model, squares, quantities=psg_fx.WeightedSum(), backend="eager")
    assert step.validate(X, Y, weights=[1.0, 2.0, 3.0, 4.0]).ok
    with torch.inference_mode():
        assert step.validate(X.clone(), Y.clone(), weights=torch.ones(4)).ok
    dims: list[Any] = [[0, 0], ((0,), 0), (0, (0,))]
    for batch_dim in dims:
        assert psg_fx.transform(model, squares, batch_dim=batch_dim, backend="eager").validate(X, Y).ok
    assert psg_fx.transform(model, lambda o, _: o.square().sum(), backend="eager").validate(X, None).ok


@pytest.mark.parametrize(
    "batch_dim", [(0.0, 0), ((0.5,), 0), (0, "a"), (0, (0, (0,))), ((torch.tensor(0),), 0), (0, {"y": 0})], ids=str
)
def test_what_is_no_dim(batch_dim: Any) -> None:
    with pytest.raises(BadArgument, match="does not fit the arguments"):
        psg_fx.transform(nn.Linear(5, 5), squares, batch_dim=batch_dim, backend="eager")(X, Y)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_profiler_of_torch_that_keeps_stacks_is_no_failure() -> None:
    """What it sets as Python's profile function cannot be put back from Python, and has no switch."""
    model = nn.Linear(4, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        step = psg_fx.transform(model, F.cross_entropy, backend="eager")
        for size in (3, 5):
            step(torch.randn(size, 4), torch.zeros(size, dtype=torch.long))
    assert len(step.captures) == 1
