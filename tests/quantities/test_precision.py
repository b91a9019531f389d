"""Low precision: a step rounds no worse than the loop over single samples does in the same precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, Norms, SecondMoment
from support import oracle
from support.selection import one_in

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 6, 8, generator=GENERATOR)
Y = torch.tensor([0, 2, 1, 1, 0])


class Block(nn.Module):
    """Convolution, normalisation, attention, a raw scale and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        h = h + self.attention(h, h, h, need_weights=False)[0] * self.scale
        return self.head(h.mean(1))


def block(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return Block().to(dtype)


def errors(got: Any, rough: Any, truth: Any) -> tuple[float, float]:
    return oracle.worst_error(got, truth, 1e-2), oracle.worst_error(rough, truth, 1e-2)


def hold(step: Any, model: nn.Module, loss: Any, x: Tensor) -> Any:
    """Runs the step; its error must not exceed twice that of the loop in the model's own precision."""
    truth = oracle.loop_grads(model, loss, x, Y)[1]
    rough = oracle.loop_grads(model, loss, x, Y, dtype=None)[1]
    out = step(x, Y)
    mine, loops = errors(out.grads, rough, truth)
    assert 0 < mine < 2 * loops, (mine, loops)
    return out


@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float16]))
def test_half_precision_model(dtype: torch.dtype) -> None:
    model = block(dtype)
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), Norms(), ClippedSum(0.5)], backend="eager")
    out = hold(step, model, F.cross_entropy, X.to(dtype))
    assert all(g.dtype == dtype for g in out.grads.values())
    exact = oracle.norms({n: g.double() for n, g in out.grads.items()})
    assert oracle.relative_error(out.norms, exact) < 2.0 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_variance_far_below_the_mean_in_half_precision(backend: str) -> None:
    """The mean is squared before it is rounded.  Gradients are the rows of x."""
    model = nn.Linear(5, 1, bias=False).to(torch.bfloat16)
    x = (1 + 0.03 * torch.randn(200, 5, generator=GENERATOR)).to(torch.bfloat16)
    step = psg_fx.transform(model, lambda o: o.sum(), quantities=SecondMoment(centered=True), backend=backend)
    found, exact = step(x).second_moment["weight"][0], x.double().var(0, unbiased=False)
    assert (found - exact).abs().max() < 1e-2 * exact.max()


@pytest.mark.parametrize("dtype", one_in(2, [torch.float16, torch.bfloat16]))
def test_products_in_half_precision(dtype: torch.dtype) -> None:
    """Sums of products are kept in float32: their error is that of the gradients, relative to the largest products."""
    model = block(dtype)
    tiny = lambda out, y: F.cross_entropy(out, y) * 1e-2  # noqa: E731  (squares of these gradients underflow in float16)
    directions = {n: torch.randn(p.shape, generator=GENERATOR).to(dtype) for n, p in model.named_parameters()}
    asked = [Gram(), Dots(), SecondMoment(), Grads()]
    out = psg_fx.transform(model, tiny, quantities=asked, backend="eager")(X.to(dtype), Y, directions=directions)
    grads = {n: g.double() for n, g in out.grads.items()}
    flat = torch.cat([g.flatten(1) for g in grads.values()], 1)
    eps = 4 * torch.finfo(dtype).eps
    assert {v.dtype for v in (out.gram, out.dots, *out.second_moment.values())} == {torch.float32}
    assert (out.gram - flat @ flat.T).abs().max() < eps * flat.norm(dim=1).max() ** 2
    along = torch.cat([v.double().flatten() for v in directions.values()])
    assert (out.dots - flat @ along).abs().max() < eps * flat.norm(dim=1).max() * along.norm()
    for name, value in out.second_moment.items():
        assert (value - grads[name].square().mean(0)).abs().max() < eps * grads[name].abs().max() ** 2


def test_float16_with_a_loss_scale() -> None:
    """Gradients too small for float16 are kept by scaling the loss, as in training with float16."""
    scale = 2.0**18
    model = block(torch.float16)

    def tiny(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), y) * 1e-6

    def scaled(out: Tensor, y: Tensor) -> Tensor:
        return tiny(out, y) * scale

    x = X.half()
    truth = oracle.loop_grads(model, tiny, x, Y)[1]
    plain = psg_fx.transform(model, tiny, backend="eager")(x, Y).grads
    kept = psg_fx.transform(model, scaled, backend="eager")(x, Y).grads
    rough = oracle.loop_grads(model, scaled, x, Y, dtype=None)[1]
    mine, loops = (oracle.worst_error({n: g.double() / scale for n, g in v.items()}, truth) for v in (kept, rough))
    assert mine < 2 * loops < 0.1 * oracle.worst_error(plain, truth), (mine, loops)


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


class Autocast(nn.Module):
    """The model under autocast, written in its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            return self.model(x)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    """Inside the model or around the step: the gradients are those of the loop under autocast, in float32."""
    model = block()
    wrapped = Autocast(model) if inside else model
    loss = lambda out, y: F.cross_entropy(out.float(), y)  # noqa: E731
    truth = oracle.loop_grads(model, loss, X, Y)[1]
    rough = oracle.loop_grads(Autocast(model), loss, X, Y, dtype=None)[1]
    step = psg_fx.transform(wrapped, loss, backend="eager")
    if inside:
        grads = step(X, Y).grads
    else:
        with autocast():
            grads = step(X, Y).grads
    grads = {n.removeprefix("model."): g for n, g in grads.items()}
    mine, loops = errors(grads, {n.removeprefix("model."): g for n, g in rough.items()}, truth)
    assert 1e-4 < mine < 2 * loops, (mine, loops)
    assert all(g.dtype == torch.float32 for g in grads.values())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_weights_beyond_the_range_of_float16(backend: str) -> None:
    """And clip factors far below it: sums of numbers that float16 has are such numbers."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 5).half(), torch.randn(4, 12, 6).half(), torch.randn(4, 1)

    def small(output: Tensor, y: Tensor) -> Tensor:
        return (output.float().flatten(1).sin() * y).sum() * 1e-4

    step = psg_fx.transform(model, small, quantities=[psg_fx.WeightedSum(), Grads()], backend=backend)
    out = step(x, y, weights=torch.full((4,), 1e5))
    exactly = {name: g.double() for name, g in out.grads.items()}
    assert oracle.worst_error(out.weighted_sum, oracle.weighted_sum(exactly, torch.full((4,), 1e5))) < 2e-3

    def large(output: Tensor, y: Tensor) -> Tensor:
        return small(output, y) * 2e6

    step = psg_fx.transform(model, large, quantities=[ClippedSum(max_norm=1e-2), Grads()], backend=backend)
    out = step(x, y)
    assert out.clip_factors.max() < 1e-3
    exactly = {name: g.double() for name, g in out.grads.items()}
    assert oracle.worst_error(out.clipped_sum, oracle.weighted_sum(exactly, out.clip_factors)) < 2e-3


def test_projections_on_the_way_to_small_numbers_in_float16() -> None:
    """Pᵀ x̄ᵀ y Q is small, one of its factors may be beyond float16."""
    torch.manual_seed(0)
    model, x = nn.Linear(4096, 8, bias=False).half(), (2000 * torch.randn(3, 4096)).half()
    loss = lambda out: (1e-4 * out.float()).sin().sum()  # noqa: E731
    quantity = psg_fx.Projection(rank=2)
    found = psg_fx.transform(model, loss, quantities=quantity, backend="eager")(x).projection
    grads = oracle.loop_grads(model, loss, x)[1]["weight"]
    p, q = (quantity.matrix("weight", side, rows) for side, rows in (("P", 8), ("Q", 4096)))
    assert oracle.relative_error(found, (p.T @ grads @ q).flatten(1)) < 1e-3
