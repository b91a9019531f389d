"""A sample whose gradient is NaN or inf has no part in a clipped sum, and says so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.algebra.asks import SquaredNorm, Weighted
from support import oracle
from support.selection import one_in

BAD = {"nan": float("nan"), "inf": float("inf"), "overflow": 1e200}
"""The last one is finite, and its square is not."""


class Net(nn.Module):
    """A convolution, a normalisation and a linear layer; counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.norm(self.conv(x)).flatten(1))


def batch(bad: float, rows: tuple[int, ...] = (2,)) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    x[list(rows)] = bad
    return model, x, y


def step_of(model: nn.Module, backend: str = "eager", **options: object) -> psg_fx.PerSampleModule:
    asked = psg_fx.ClippedSum(max_norm=0.5, **options)  # type: ignore[arg-type]
    return psg_fx.transform(model, F.cross_entropy, quantities=asked, backend=backend)


OPTIONS: tuple[dict[str, str], ...] = ({}, {"per": "parameter"}, {"style": "automatic"})


@pytest.mark.parametrize(("bad", "options"), one_in(4, itertools.product(BAD, OPTIONS)))  # each value, each option
def test_the_sum_is_that_of_the_other_samples(bad: str, options: dict[str, str]) -> None:
    model, x, y = batch(BAD[bad])
    step, rest = step_of(model, **options), torch.tensor([0, 1, 3, 4])
    out, expected = step(x, y), step(x[rest], y[rest])
    for name, value in out.clipped_sum.items():
        torch.testing.assert_close(value, expected.clipped_sum[name], rtol=1e-12, atol=1e-14)
    factors = out.clip_factors if isinstance(out.clip_factors, dict) else {"": out.clip_factors}
    assert all(factor[2] == 0 and (factor[rest] > 0).all() for factor in factors.values())
    norms = out.norms if isinstance(out.norms, dict) else {"": out.norms}
    assert not all(norm[2].isfinite() for norm in norms.values())
    assert all(norm[rest].isfinite().all() for norm in norms.values())


def test_no_finite_sample_leaves_a_sum_of_zero() -> None:
    model, x, y = batch(float("nan"), rows=(0, 1, 2, 3, 4))
    out = step_of(model)(x, y)
    assert all((value == 0).all() for value in out.clipped_sum.values())
    assert (out.clip_factors == 0).all()


def test_weights_of_the_call_still_count() -> None:
    model, x, y = batch(float("nan"))
    weights = torch.tensor([1.0, 0.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    out = step_of(model, weighted=True)(x, y, weights=weights)
    rest = torch.tensor([0, 1, 3, 4])
    expected = step_of(model, weighted=True)(x[rest], y[rest], weights=weights[rest])
    for name, value in out.clipped_sum.items():
        torch.testing.assert_close(value, expected.clipped_sum[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_weight_that_is_not_finite_goes_with_its_sample(options: dict[str, str]) -> None:
    model, x, y = batch(float("nan"))
    weights = torch.tensor([1.0, 0.5, float("nan"), 2.0, 1.0], dtype=torch.float64)
    step, rest = step_of(model, weighted=True, **options), torch.tensor([0, 1, 3, 4])
    out, expected = step(x, y, weights=weights), step(x[rest], y[rest], weights=weights[rest])
    for name, value in out.clipped_sum.items():
        torch.testing.assert_close(value, expected.clipped_sum[name], rtol=1e-12, atol=1e-14)
    assert step.validate(x, y, weights=weights).ok


def test_other_quantities_and_buffers_are_those_of_one_run() -> None:
    model, x, y = batch(float("nan"))
    asked = [psg_fx.ClippedSum(0.5), psg_fx.Norms(per="parameter"), psg_fx.Grads(), psg_fx.MeanGrad()]
    out = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend="eager")(x, y)
    assert model.calls == 1
    assert out.losses[2].isnan()
    assert out.losses[[0, 1, 3, 4]].isfinite().all()
    assert out.grads["head.weight"][2].isnan().all()
    assert out.mean_grad["head.weight"].isnan().all()
    assert out.clipped_sum["head.weight"].isfinite().all()


def test_parts_of_a_batch_follow_the_rule() -> None:
    model, x, y = batch(float("inf"))
    whole, parts = step_of(model)(x, y), psg_fx.microbatch(step_of(model), 2)(x, y)
    for name, value in whole.clipped_sum.items():
        torch.testing.assert_close(parts.clipped_sum[name], value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts.clip_factors, whole.clip_factors)


@pytest.mark.inductor
def test_written_into_a_former_output() -> None:
    _, images, y = batch(float("nan"))
    model, x = nn.Linear(32, 3).double(), images.flatten(1)
    asked = psg_fx.ClippedSum(0.5)
    step = psg_fx.transform(model, F.cross_entropy, quantities=asked, reuse_outputs=True)
    former = step(x.nan_to_num(), y)
    kept = former.clipped_sum["weight"]
    again = step(x, y, out=former)
    rest = torch.tensor([0, 1, 3, 4])
    expected = step_of(model)(x[rest], y[rest]).clipped_sum["weight"]
    assert again is former
    assert again.clipped_sum["weight"] is kept
    torch.testing.assert_close(kept, expected, rtol=1e-12, atol=1e-14)


def test_kept_on_demand() -> None:
    model, x, y = batch(float("nan"))
    assert step_of(model, nonfinite="keep")(x, y).clipped_sum["head.weight"].isnan().all()


def test_validation_follows_the_rule() -> None:
    model, x, y = batch(float("nan"))
    report = step_of(model).validate(x, y)
    assert report.ok
    assert "clipped_sum" in str(report)


def test_rounding_does_not_make_a_norm_nan() -> None:
    """Positions whose gradients cancel: Σ_{t,t'} (x_t·x_t')(ȳ_t·ȳ_t') of a Gram tree is rounded to both sides of 0."""
    torch.manual_seed(0)
    slopes = torch.randn(4, 64)
    slopes -= slopes.mean(0)
    model, x = nn.Linear(64, 64, bias=False), 100 * torch.randn(200, 1, 64).expand(200, 4, 64).contiguous()
    step = psg_fx.transform(
        model, lambda out: (out * slopes).sum((1, 2)), quantities=psg_fx.ClippedSum(1.0), backend="eager"
    )
    out = step(x)
    assert "((x·x)·(ȳ·ȳ))" in step.explain()
    assert out.norms.isfinite().all()
    assert (out.norms == 0).any()


def test_a_bound_of_zero_holds_where_squares_underflow() -> None:
    model, x = nn.Linear(3, 2), torch.full((4, 3), 1e-25)
    step = psg_fx.transform(
        model, lambda out: 1e-25 * out.sum(1), quantities=psg_fx.ClippedSum(max_norm=0.0), backend="eager"
    )
    out = step(x)
    assert (out.norms == 0).all()
    assert all((value == 0).all() for value in out.clipped_sum.values())


def test_automatic_clipping_needs_a_bound() -> None:
    with pytest.raises(psg_fx.BadArgument, match="all factors would be infinite"):
        psg_fx.ClippedSum(float("inf"), style="automatic")
    with pytest.raises(psg_fx.BadArgument):  # divided by 0.01 it is no float32
        psg_fx.ClippedSum(1e37, style="automatic")


class Halving(nn.Module):
    """Its scale is read, and another one left for the next call: in a buffer or in an attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3)) if buffer else setattr(self, "scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * self.scale.clone()
        if "scale" in self._buffers:
            self.scale.mul_(0.5)
        else:
            self.scale = self.scale * 0.5
        return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("buffer", [True, False])
def test_the_second_run_reads_what_the_first_one_read(buffer: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    finite, kept = x.clone(), [0, 1, 3, 4]
    x[2, 1] = torch.inf
    step = psg_fx.transform(Halving(buffer), F.cross_entropy, quantities=psg_fx.ClippedSum(1e6), backend="eager")
    whole = psg_fx.transform(Halving(buffer), F.cross_entropy, quantities=psg_fx.ClippedSum(1e6), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(step(x, y).clipped_sum, dict(whole(finite[kept], y[kept]).clipped_sum))
    assert (step.model.scale == 0.25).all()


@dataclass(frozen=True)
class Tamed(psg_fx.Quantity):
    """Σ g / (1 + ‖g‖) over the samples whose norm is finite."""

    field: ClassVar[str] = "tamed"
    leaves_out: ClassVar[tuple[str, ...]] = ("tame",)

    def asks(self) -> tuple[Any, ...]:
        return SquaredNorm(), Weighted("tame", after_norms=True)

    def weights(self, r: Any, extras: Any) -> dict[str, Mapping[str, Tensor]]:
        norms = torch.stack(list(r["sq_norms"].values())).sum(0).sqrt()
        return {"tame": dict.fromkeys(r["sq_norms"], torch.where(norms.isfinite(), 1 / (1 + norms), 0.0))}

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"tamed": dict(r["weighted:tame"])}


@pytest.mark.parametrize(
    "beside", [None, psg_fx.Norms(), psg_fx.ClippedSum(0.5), psg_fx.ClippedSum(0.5, nonfinite="keep")]
)
@pytest.mark.parametrize("bad", [None, "nan", "overflow"])
def test_weights_of_the_users_own_that_leave_samples_out(bad: str | None, beside: psg_fx.Quantity | None) -> None:
    model, x, y = batch(BAD[bad]) if bad else batch(1.0)
    rest = torch.tensor([0, 1, 3, 4] if bad else [0, 1, 2, 3, 4])
    asked = [Tamed()] if beside is None else [Tamed(), beside]
    out = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend="eager")(x, y)
    grads = oracle.loop_grads(model, F.cross_entropy, x[rest], y[rest])[1]
    norms = oracle.norms(grads)
    torch.testing.assert_close(dict(out.tamed), oracle.weighted_sum(grads, 1 / (1 + norms)))
    if isinstance(beside, psg_fx.ClippedSum) and (beside.leaves_out or not bad):
        torch.testing.assert_close(dict(out.clipped_sum), oracle.clipped_sum(grads, 0.5))


def test_own_weights_leave_no_samples_of_groups_out() -> None:
    model, x, y = batch(1.0)
    step = psg_fx.transform(model, F.cross_entropy, quantities=Tamed(), backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match="zeros of the weights 'tame' leave samples out"):
        step(x, y, groups=[0, 0, 1, 1, 1])
