"""Private training: what one sample can do to a clipped sum, and that training with Opacus' parts equals Opacus'."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("opacus")
pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizerFastGradientClipping

import psg_fx
from support import oracle
from support.selection import one_in
from support.training import CLASSES, MAX_NORM, SIGMA, Run, Training, engine, in_parts, quietly, same, trained

pytestmark = pytest.mark.xdist_group("private")  # they share captured steps and Opacus' results

Named = dict[str, Tensor]


def opacus_optimizer(t: Training, passes: int, part: int | None) -> float:
    """psg_fx's clipped sum in `p.grad`, and Opacus' optimizer that expects it there."""
    clipped = psg_fx.transform(t.model, F.cross_entropy, quantities=psg_fx.ClippedSum(MAX_NORM), backend=t.backend)
    loader, accountant = DPDataLoader.from_data_loader(t.loader), RDPAccountant()
    optimizer = DPOptimizerFastGradientClipping(
        t.optimizer, noise_multiplier=SIGMA, max_grad_norm=MAX_NORM, expected_batch_size=t.batch, generator=t.noise
    )
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(loader.sample_rate))

    def one(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        total = clipped(images, labels).clipped_sum
        for name, p in t.model.named_parameters():
            p.grad = total[name]
        optimizer.step()

    in_parts(t, loader, optimizer, one, passes, part)
    return float(accountant.get_epsilon(1e-3))


def plain_loop(t: Training, passes: int, part: int | None) -> float:
    """The clipped sum, noise and division written out."""
    assert part is None
    clipped = psg_fx.transform(t.model, F.cross_entropy, quantities=psg_fx.ClippedSum(MAX_NORM), backend=t.backend)
    loader, accountant = DPDataLoader.from_data_loader(t.loader), RDPAccountant()

    def one(images: Tensor, labels: Tensor) -> None:
        total = clipped(images, labels).clipped_sum
        for name, p in t.model.named_parameters():
            p.grad = (total[name] + torch.normal(0.0, SIGMA * MAX_NORM, p.shape, generator=t.noise)) / t.batch
        t.optimizer.step()
        accountant.step(noise_multiplier=SIGMA, sample_rate=loader.sample_rate)

    t.run(loader, one, passes)
    return float(accountant.get_epsilon(1e-3))


WAYS: dict[str, Run] = {
    "no_op": engine("no_op"),
    "no_op, not wrapped": engine("no_op", wrapped=False),
    "Opacus' optimizer": opacus_optimizer,
    "plain loop": plain_loop,
}


@functools.cache
def opacus(passes: int, **options: Any) -> tuple[Training, float]:
    """What Opacus' own per-sample gradients give."""
    return trained(engine("hooks"), passes, **options)


@pytest.mark.parametrize("way", WAYS)
@quietly
def test_the_same_noise_gives_the_weights_of_opacus(way: str) -> None:
    mine, theirs = trained(WAYS[way], 3), opacus(3)
    assert mine[0].sizes == theirs[0].sizes
    assert len(mine[0].sizes) == 12
    assert len(set(mine[0].sizes)) > 2
    same(mine, theirs)


@pytest.mark.parametrize("way", ["no_op", "Opacus' optimizer"])
@quietly
def test_batches_in_parts_by_opacus_memory_manager(way: str) -> None:
    mine, theirs = trained(WAYS[way], 3, part=3), opacus(3)
    assert max(mine[0].sizes) == 3
    assert sum(mine[0].sizes) == sum(theirs[0].sizes)
    same(mine, theirs)


FEW: dict[str, Any] = {"batch": 1, "count": 8}
"""One sample is expected in a batch."""
STARTS = [(0, 1), (6, 0)]
"""A seed, and how many samples its first batch has."""


@pytest.mark.parametrize(("way", "seed", "first"), one_in(3, [(way, *start) for way in WAYS for start in STARTS]))
@quietly
def test_poisson_batches_of_no_sample_and_of_one(way: str, seed: int, first: int) -> None:
    """Also as the first batch of all, from which psg_fx captures.  Empty batches still add noise, and count."""
    mine, theirs = trained(WAYS[way], 2, seed=seed, **FEW), opacus(2, seed=seed, **FEW)
    assert mine[0].sizes == theirs[0].sizes
    assert mine[0].sizes[0] == first
    assert {0, 1} < set(mine[0].sizes)
    same(mine, theirs)


@pytest.mark.rest
@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("way", ["no_op", "Opacus' optimizer"])
@quietly
def test_poisson_batches_compiled_by_inductor(way: str) -> None:
    same(trained(WAYS[way], 2, backend="inductor", **FEW), opacus(2, **FEW))


class Sequence(nn.Module):
    """Embedding, linear layer over positions, mean, and a head that is the embedding again: ids [B, T] -> [B, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.embed(ids)))
        return F.linear(h.mean(1), self.embed.weight)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (mlp, lambda n, draw: torch.randn(n, 5, generator=draw)),
    "conv": (conv, lambda n, draw: torch.randn(n, 2, 5, generator=draw)),
    "sequence": (Sequence, lambda n, draw: torch.randint(CLASSES, (n, 9), generator=draw)),
}


def scaled(output: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """Each sample's loss times a number of its own, so that its gradient is as large as one likes."""
    return F.cross_entropy(output, labels, reduction="none") * scale


class Clipper:
    """One captured step, for any weights, batch and bound."""

    def __init__(self, name: str, per: str, style: str, dtype: torch.dtype) -> None:
        self.make, self.inputs = MODELS[name]
        self.dtype, self.model, self.bound = dtype, self.make().to(dtype), torch.ones((), dtype=dtype)
        asked = psg_fx.ClippedSum(self.bound, per=per, style=style)
        self.step = psg_fx.transform(self.model, scaled, quantities=asked, backend="eager")

    def draw(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        """New weights, inputs and labels."""
        draw = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.data = torch.randn(p.shape, generator=draw).to(self.dtype)
        x = self.inputs(count, draw)
        return x.to(self.dtype) if x.is_floating_point() else x, torch.randint(CLASSES, (count,), generator=draw)

    def __call__(self, x: Tensor, y: Tensor, scale: Tensor, bound: float) -> Named:
        self.bound.fill_(bound)
        total: Named = self.step(x, (y, scale.to(self.dtype))).clipped_sum
        return total


@functools.cache
def clipper(name: str, per: str, style: str, dtype: torch.dtype) -> Clipper:
    return Clipper(name, per, style, dtype)


def distances(a: Named, b: Named, per: str) -> list[float]:
    """‖a - b‖ of the whole model, or of every parameter."""
    each = {name: (a[name].double() - b[name].double()).norm().item() for name in a}
    return [math.hypot(*each.values())] if per == "model" else list(each.values())


every_clipper = pytest.mark.parametrize(
    ("name", "per", "style"), one_in(3, itertools.product(MODELS, ["model", "parameter"], ["abadi", "automatic"]))
)
DTYPES = st.sampled_from([torch.float32, torch.float64])
EXPONENTS = st.lists(st.floats(-30, 30), min_size=2, max_size=6)
BOUNDS = st.floats(-3, 3).map(lambda e: 10.0**e)
examples = settings(max_examples=15, deadline=None, derandomize=True)


@every_clipper
@given(dtype=DTYPES, seed=st.integers(0, 2**32), exponents=EXPONENTS, bound=BOUNDS, other=st.floats(-30, 30))
@examples
def test_changing_one_sample_moves_the_sum_by_at_most_twice_the_bound(
    name: str, per: str, style: str, dtype: torch.dtype, seed: int, exponents: list[float], bound: float, other: float
) -> None:
    """Whatever the size of its gradient, before and after: from 10⁻³⁰ to 10³⁰ times that of a usual loss."""
    clip, count = clipper(name, per, style, dtype), len(exponents)
    x, y = clip.draw(seed, count + 1)
    scale = 10.0 ** torch.tensor([*exponents, other], dtype=torch.float64)
    neighbour = torch.tensor([*range(count - 1), count])
    before, after = clip(x[:-1], y[:-1], scale[:-1], bound), clip(x[neighbour], y[neighbour], scale[neighbour], bound)
    assert max(distances(before, after, per)) <= 2 * bound * (1 + slack(count, dtype))


@every_clipper
@given(dtype=DTYPES, seed=st.integers(0, 2**32), exponents=EXPONENTS, bound=BOUNDS)
@examples
def test_removing_one_sample_moves_the_sum_by_at_most_the_bound(
    name: str, per: str, style: str, dtype: torch.dtype, seed: int, exponents: list[float], bound: float
) -> None:
    clip, count = clipper(name, per, style, dtype), len(exponents)
    x, y = clip.draw(seed, count)
    scale = 10.0 ** torch.tensor(exponents, dtype=torch.float64)
    before, after = clip(x, y, scale, bound), clip(x[:-1], y[:-1], scale[:-1], bound)
    assert max(distances(before, after, per)) <= bound * (1 + slack(count, dtype))


def slack(count: int, dtype: torch.dtype) -> float:
    """Rounding of a norm and of two sums of `count` clipped gradients, relative to the bound."""
    return 32 * count * torch.finfo(dtype).eps


@every_clipper
def test_a_bound_of_zero_leaves_nothing(name: str, per: str, style: str) -> None:
    """Also of samples whose gradient is exactly zero, or so small that its squared norm is."""
    clip = clipper(name, per, style, torch.float32)
    x, y = clip.draw(0, 6)
    total = clip(x, y, torch.tensor([1.0, 0.0, 1e-6, 1e6, 3.0, 1e-25]), 0.0)
    assert all(v.abs().max() == 0 for v in total.values())


@pytest.mark.parametrize("per", ["model", "parameter"])
@pytest.mark.parametrize("name", MODELS)
def test_no_bound_gives_the_sum_of_the_gradients(name: str, per: str) -> None:
    clip = clipper(name, per, "abadi", torch.float64)
    x, y = clip.draw(0, 5)
    scale = torch.tensor([1.0, 0.0, 1e-6, 1e6, 3.0], dtype=torch.float64)
    total = clip(x, y, scale, math.inf)
    _, rows = oracle.loop_grads(clip.model, scaled, x, (y, scale))
    assert oracle.worst_error(total, {name: g.sum(0) for name, g in rows.items()}) < 1e-12


@pytest.mark.parametrize("cast", ["parameters", "autocast"])
def test_one_sample_of_many_in_half_precision(cast: str) -> None:
    """A sum that is rounded to bfloat16 changes by several times the bound; one in float32 by the bound."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(16, 4), torch.randn(4096, 16) + 1, torch.zeros(4096, dtype=torch.int64)
    if cast == "parameters":
        model, x = model.bfloat16(), x.bfloat16()

    def change(in_float32: bool) -> float:
        clipped = psg_fx.ClippedSum(max_norm=1.0, in_float32=in_float32)
        step = psg_fx.transform(model, F.cross_entropy, quantities=clipped, backend="eager")
        with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
            whole, one_less = (dict(step(x[k:], y[k:]).clipped_sum) for k in (0, 1))
        assert all(v.dtype is torch.float32 for v in whole.values()) or not in_float32
        return math.sqrt(sum((whole[n].double() - v.double()).square().sum().item() for n, v in one_less.items()))

    assert change(in_float32=True) < 1.001
    assert change(in_float32=False) > 1.5  # what the flag is for
