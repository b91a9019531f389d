"""The examples of the zoo on a CUDA device, in each precision and from each backend, against a float64 loop."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Norms, zoo
from support import oracle
from support.device import CUDA

pytestmark = [*CUDA, pytest.mark.rest, pytest.mark.usefixtures("fresh_compiler", "full_precision")]

SIZES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "simplecnn": {"batch": 5},
    "resnet18gn": {"batch": 4},
    "gpt": {"batch": 4, "layers": 2, "width": 64, "heads": 4, "tokens": 32, "vocabulary": 50},
    "vit": {"batch": 4, "layers": 2, "width": 48},
    "lstm": {"batch": 4, "tokens": 9, "width": 16, "hidden": 24},
    "encoder": {"batch": 4},
}


def smaller(ex: zoo.Example) -> tuple[Any, Any]:
    """The same batch without its last sample."""
    return ex.inputs[:-1], ex.targets[:-1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", SIZES)
def test_float32(name: str, backend: str) -> None:
    """All quantities, at two sizes of batch, the second from a graph for all sizes."""
    ex = zoo.example(name, device="cuda", **SIZES[name])
    step = None
    for inputs, targets in ((ex.inputs, ex.targets), smaller(ex), (ex.inputs, ex.targets)):
        _, grads = oracle.loop_grads(ex.model, ex.loss_fn, inputs, targets, batch_dim=ex.batch_dim)
        bound = oracle.norms(grads).median().item()
        if step is None:
            asked = [Grads(), Norms(), ClippedSum(bound), MeanGrad()]
            step = psg_fx.transform(ex.model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, backend=backend)
            first = bound
        out = step(inputs, targets)
        assert oracle.worst_error(out.grads, grads) < 5e-5
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 5e-5
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, first)) < 5e-5
        assert oracle.worst_error(out.mean_grad, oracle.mean_grad(grads)) < 5e-5


@pytest.mark.inductor
@pytest.mark.parametrize("quantity", [Norms(), ClippedSum(1.0)], ids=["norms", "clipped"])
@pytest.mark.parametrize("name", SIZES)
def test_alone(name: str, quantity: Any) -> None:
    """What need not keep the gradients takes other trees than all quantities together."""
    ex = zoo.example(name, device="cuda", **SIZES[name])
    _, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim)
    out = psg_fx.transform(ex.model, ex.loss_fn, quantities=quantity, batch_dim=ex.batch_dim)(ex.inputs, ex.targets)
    if quantity.field == "norms":
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 5e-5
    else:
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 1.0)) < 5e-5


@pytest.mark.parametrize("name", SIZES)
def test_float64(name: str) -> None:
    ex = zoo.example(name, device="cuda", dtype=torch.float64, **SIZES[name])
    _, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim)
    bound = oracle.norms(grads).median().item()
    asked = [Grads(), Norms(), ClippedSum(bound), MeanGrad()]
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, backend="eager")
    out = step(ex.inputs, ex.targets)
    assert oracle.worst_error(out.grads, grads) < 1e-10
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-10
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, bound)) < 1e-10


@pytest.mark.inductor
@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in SIZES if name != "lstm"])
def test_lower_precision(name: str, precision: str) -> None:
    """About as far from the float64 loop as `vmap(grad)` is in the same precision: a kink passed by rounding counts."""
    ex = zoo.example(name, device="cuda", **SIZES[name])
    call = (ex.model, ex.loss_fn, ex.inputs, ex.targets)
    _, grads = oracle.loop_grads(*call, batch_dim=ex.batch_dim)
    asked = [Grads(), Norms(), ClippedSum(oracle.norms(grads).median().item())]
    with in_precision(precision):
        _, lower = oracle.vmap_grads(*call, batch_dim=ex.batch_dim)
        step = psg_fx.transform(ex.model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim)
        out = step(ex.inputs, ex.targets)
    assert distance(out.grads, grads) < 2 * distance(lower, grads) + 1e-2
    allowed = 3 * oracle.relative_error(oracle.norms(lower), oracle.norms(grads)) + 5e-3
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < allowed


def distance(got: dict[str, Any], want: dict[str, Any]) -> float:
    """2-norm of the difference of whole gradients, relative."""
    squares = sum(float((got[n].double() - w).square().sum()) for n, w in want.items())
    return float((squares / sum(float(w.square().sum()) for w in want.values())) ** 0.5)


@contextlib.contextmanager
def in_precision(name: str) -> Any:
    if name != "tf32":
        with torch.autocast("cuda", getattr(torch, name)):
            yield
        return
    kept, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)
        torch.backends.cudnn.allow_tf32 = cudnn
