"""The modes and threads around a call: the first call in each of them, then one outside, is as right as any."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import psg_fx
from psg_fx import ClippedSum, Grads
from psg_fx.program.program import Program
from support import oracle

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 3, generator=GENERATOR, dtype=torch.float64), torch.tensor([0, 2, 1, 1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 3, dtype=torch.float64))


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "set_default_dtype": default_dtype,
    "default_device": lambda: torch.device("meta"),
    "function_mode": Counting,
    "counted_flops": lambda: FlopCounterMode(display=False),
    "detect_anomaly": torch.autograd.detect_anomaly,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}  # fmt: skip
quiet = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")


def check(out: Any, module: nn.Module) -> None:
    losses, grads = oracle.loop_grads(module, F.cross_entropy, X, Y)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    assert oracle.worst_error(out.grads, grads) < 1e-12
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.5)) < 1e-12


@quiet
@pytest.mark.parametrize("state", STATES)
def test_first_call_in_a_mode(state: str) -> None:
    module = model()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")
    with STATES[state]():
        out = step(X, Y)
    if state != "autocast":
        check(out, module)
    check(step(X, Y), module)
    with STATES[state]():
        again = step(X, Y)
    if state != "autocast":
        check(again, module)


@quiet
@pytest.mark.parametrize("state", ["set_default_dtype", "function_mode", "detect_anomaly"])
def test_without_a_loss(state: str) -> None:
    module = model()
    _, grads = oracle.loop_grads(module, lambda out: out.sin().sum(), X)
    step = psg_fx.transform(module, backend="eager")
    for around in (STATES[state](), contextlib.nullcontext()):
        with around:
            step(X).sin().sum().backward()
        assert oracle.worst_error({n: p.grad_sample for n, p in module.named_parameters()}, grads) < 1e-12
        for p in module.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]


@pytest.mark.parametrize("state", ["inference_mode", "no_grad"])
def test_first_evaluation_without_a_loss(state: str) -> None:
    module = model()
    _, grads = oracle.loop_grads(module, lambda out: out.sin().sum(), X)
    step = psg_fx.transform(module, backend="eager")
    with STATES[state]():
        torch.testing.assert_close(step(X), module(X))
    step(X).sin().sum().backward()
    assert oracle.worst_error({n: p.grad_sample for n, p in module.named_parameters()}, grads) < 1e-12


def test_inputs_of_inference_mode() -> None:
    module = model()
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")
    check(step(x, y), module)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_first_call_inside_a_compiled_function(backend: str) -> None:
    module = model()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend=backend)
    check(torch.compile(lambda x, y: step(x, y), backend="eager")(X, Y), module)
    check(step(X, Y), module)


def test_a_whole_graph_has_no_place_for_a_step() -> None:
    step = psg_fx.transform(model(), F.cross_entropy, quantities=[Grads()], backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a step is compiled by itself"):
        torch.compile(lambda x, y: step(x, y), backend="eager", fullgraph=True)(X, Y)


def test_inside_a_level_of_torch_func() -> None:
    module = model()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")
    found = []

    def outer(t: Tensor) -> Tensor:
        found.append(step(X, Y))
        return (t * t).sum()

    torch.func.grad(outer)(torch.ones(2))
    check(step(X, Y), module)
    assert torch.isfinite(found[0].losses).all()


def test_a_captured_step_under_a_counter_of_flops() -> None:
    module = model()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")
    with FlopCounterMode(display=False) as counter:
        step(X, Y)
        out = step(X, Y)
    check(out, module)
    assert len(step.captures) == 1
    assert counter.get_total_flops() > 0


def test_under_fake_tensors() -> None:
    """Refused or right: and right afterwards."""
    module = model()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")
    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        step(X, Y)
    check(step(X, Y), module)


WATCHED: dict[str, Callable[[], Any]] = {
    "register_hook": lambda: torch.Tensor.register_hook,
    "function_apply": lambda: torch.autograd.Function.__dict__["apply"],
    "inference_enter": lambda: torch.inference_mode.__enter__,
    "module_getattribute": lambda: nn.Module.__getattribute__,
    "module_call": lambda: nn.Module.__call__,
    "sym_bool": lambda: torch.SymBool.__bool__,
    "encoder": lambda: nn.TransformerEncoder.forward,
    "validate_args": lambda: torch.distributions.Distribution._validate_args,
    "opt_einsum": lambda: torch.backends.opt_einsum.enabled,
    "profile": lambda: __import__("sys").getprofile(),
}


def state_of_torch() -> dict[str, Any]:
    return {name: read() for name, read in WATCHED.items()}


def bystander(until: threading.Event, failures: list[BaseException]) -> None:
    """Uses what a capture replaces, and ordinary training, until told to stop."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    try:
        while not until.is_set():
            seen: list[Tensor] = []
            h = torch.ones(2, 3, requires_grad=True)
            (h * 2).register_hook(seen.append)  # type: ignore[no-untyped-call]
            g = h * 3
            g.register_hook(seen.append)
            g.sum().backward()
            assert len(seen) == 1
            with torch.inference_mode():
                assert (h.detach() * 2).is_inference()
            layer(torch.ones(2, 3)).sum().backward()
            assert Double.apply(torch.ones(2)).tolist() == [2.0, 2.0]
            torch.einsum("ij,jk,kl->il", torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    except BaseException as error:
        failures.append(error)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.mark.slow
def test_two_captures_and_a_bystander() -> None:
    before = state_of_torch()
    done, failures = threading.Event(), list[BaseException]()
    modules = [model(), nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Dropout(0.0))]
    outs: dict[int, Any] = {}

    def capturing(index: int) -> None:
        try:
            step = psg_fx.transform(modules[index], F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)],
                                    backend="eager")  # fmt: skip
            outs[index] = step(X, Y)
        except BaseException as error:
            failures.append(error)

    watcher = threading.Thread(target=bystander, args=(done, failures))
    threads = [threading.Thread(target=capturing, args=(i,)) for i in range(2)]
    for t in (watcher, *threads):
        t.start()
    for t in threads:
        t.join()
    done.set()
    watcher.join()
    assert not failures, failures[0]
    for index, module in enumerate(modules):
        check(outs[index], module)
    assert state_of_torch() == before
    check(psg_fx.transform(model(), F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")(X, Y),
          model())  # fmt: skip


def test_one_step_in_two_threads() -> None:
    module = model()
    step = psg_fx.transform(module, F.cross_entropy, quantities=[Grads(), ClippedSum(0.5)], backend="eager")
    outs: list[Any] = []
    threads = [threading.Thread(target=lambda: outs.append(step(X, Y))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for out in outs:
        check(out, module)
    assert len(outs) == 2
    assert len(step.captures) == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_call_while_another_thread_captures_the_model(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the capture lie in the places of the parameters then: they are not taken for the model's."""
    module, inside, results = model(), threading.Event(), Program.results
    asked = [Grads(), ClippedSum(0.5)]
    step, other = (psg_fx.transform(module, F.cross_entropy, quantities=asked, backend="eager") for _ in range(2))
    if known:
        step(X, Y)

    def slowly(program: Program, tensors: list[Tensor]) -> Any:
        inside.set()
        time.sleep(0.3)
        return results(program, tensors)

    monkeypatch.setattr(Program, "results", slowly)
    capturing = threading.Thread(target=lambda: (other if known else step)(X, Y))
    capturing.start()
    assert inside.wait(60)
    check(step(X, Y), module)
    capturing.join()
    assert len(step.captures) == 1


def test_a_failed_capture_restores_all() -> None:
    before = state_of_torch()

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("as it may")

    with pytest.raises(psg_fx.PsgError):
        psg_fx.transform(model(), fails, backend="eager")(X, Y)
    assert state_of_torch() == before
