"""What callbacks log is what a loop over single samples says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Norms
from psg_fx.errors import BadArgument
from psg_fx.integrations.measures import NOISE_SCALE, Measure
from support import oracle
from support.batches import samples
from support.small import same_mlp

EAGER = {"backend": "eager"}


def test_the_numbers_are_those_of_single_gradients() -> None:
    model, (x, y) = same_mlp(), samples(11, torch.float64)
    numbers, rows = Measure(1, F.cross_entropy, options=EAGER).of(model, [(x[:6], y[:6]), (x[6:], y[6:])])
    losses, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    each = torch.cat([g.flatten(1) for g in grads.values()], 1)
    noise = each.var(0).sum()
    signal = each.mean(0).square().sum() - noise / 11
    want = {
        "loss": losses.mean(), "noise": noise, "signal": signal, "norms_median": each.norm(dim=1).median(),
        "norms_min": each.norm(dim=1).min(), "norms_max": each.norm(dim=1).max(),
        "norms_q05": each.norm(dim=1).quantile(0.05), "norms_q95": each.norm(dim=1).quantile(0.95),
    }  # fmt: skip
    if signal > 0:
        want["noise_scale"] = noise / signal
    assert set(numbers) == set(want)
    for name, value in want.items():
        assert numbers[name] == pytest.approx(value.item(), rel=1e-9), name
    assert torch.allclose(rows["norms"], each.norm(dim=1))
    assert set(rows) == {"losses", "norms"}


def test_a_noise_scale_that_the_noise_hides_is_left_out() -> None:
    """Two samples with opposite gradients: their mean is zero."""
    linear = nn.Linear(1, 1, bias=False)
    numbers, _ = Measure(1, lambda out: out.sum(), NOISE_SCALE, options=EAGER).of(
        linear, [torch.tensor([[1.0], [-1.0]])]
    )
    assert numbers["noise"] == pytest.approx(2.0)
    assert numbers["signal"] == pytest.approx(-1.0)
    assert "noise_scale" not in numbers


def test_other_quantities() -> None:
    x, y = samples(6)
    numbers, rows = Measure(1, F.cross_entropy, [ClippedSum(0.1)], options=EAGER).of(same_mlp().float(), [(x, y)])
    assert {"clip_factors_median", "norms_median", "loss"} < set(numbers)
    assert set(rows) == {"losses", "clip_factors", "norms"}


class Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_what_the_model_counts_is_as_it_was() -> None:
    model = Counting()
    Measure(1, F.cross_entropy, options=EAGER).of(model, [samples(6), samples(6)])
    assert float(model.calls) == 0


def test_draws_are_undone() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 3))
    measure = Measure(1, F.cross_entropy, [Norms()], options=EAGER)
    before = torch.random.get_rng_state()
    first, _ = measure.of(model, [samples(6)])
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    assert measure.of(model, [samples(6)])[0] != first


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_what_is_no_number_of_steps_is_refused(every: int) -> None:
    with pytest.raises(BadArgument, match="not a number of steps"):
        Measure(every, F.cross_entropy)


def test_one_quantity_and_what_means_nothing() -> None:
    x, y = samples(6)
    numbers, _ = Measure(1, F.cross_entropy, Norms(), options=EAGER).of(same_mlp().float(), [(x, y)])
    assert "norms_median" in numbers
    for quantities, options in (([psg_fx.Norms], EAGER), (None, {"backend": "indctor"})):
        with pytest.raises(BadArgument, match=r"is not a quantity|is unknown"):
            Measure(1, F.cross_entropy, quantities, options=options)  # type: ignore[arg-type]
