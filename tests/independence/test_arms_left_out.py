"""Arms of which it is not seen that they change nothing where a mask picks nothing: `if h.isnan().any(): ...`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, NotYetSupported, PsgError, SamplesMixed
from support import oracle
from support.programs import square


class Guarded(nn.Module):
    """Three layers with a guard behind each."""

    def __init__(self, guard: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.guard = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), guard

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.guard(layer(x))
        return x


def nan_to_num(h: Tensor) -> Tensor:
    if torch.isnan(h).any():
        h = torch.nan_to_num(h)
    return h


def clamped(h: Tensor) -> Tensor:
    if torch.isinf(h).any() or torch.isnan(h).any():
        h = torch.clamp(h.nan_to_num(), -10, 10)
    return h


def halved_unless_finite(h: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        return h / 2
    return h.sin()


def returned_early(h: Tensor) -> Any:
    if torch.isnan(h).sum() > 0:
        return None
    return h.cos()


def raised_elsewhere(h: Tensor) -> Tensor:
    if torch.isnan(h).any():
        fail()
    return h.cos()


def raised_by_identity(h: Tensor) -> Tensor:
    wrong = torch.isnan(h).any().item()
    if wrong is True:
        raise ValueError("no numbers")
    return h.cos()


def fail() -> None:
    raise ValueError("no numbers")


def beside_an_arm_that_changes_nothing(h: Tensor) -> Tensor:
    m, out = h[:, 0] > 0, h.clone()
    if m.any():
        out[m] = h[m].sin()
    return nan_to_num(out)


GUARDS = [
    nan_to_num, clamped, halved_unless_finite, returned_early, raised_elsewhere, raised_by_identity,
    beside_an_arm_that_changes_nothing,
]  # fmt: skip


def batch(size: int) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda f: f.__name__)
def test_batches_without_them_are_exact_and_others_refused(guard: Callable[[Tensor], Any]) -> None:
    model = Guarded(guard).double()
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    for size in (5, 3, 1):
        losses, grads = oracle.loop_grads(model, square, batch(size))
        out = step(batch(size))
        torch.testing.assert_close(out.losses, losses)
        torch.testing.assert_close(dict(out.grads), grads)
        bad = batch(size)
        bad[size // 2, 1] = torch.nan
        with pytest.raises(NotYetSupported, match="the arm that runs then") as error:
            step(bad)
        assert "test_arms_left_out.py:" in error.value.where
    assert len(step.captures) == 1


def test_a_first_batch_that_is_refused_leaves_the_step_to_serve_others(tmp_path: Path) -> None:
    step = psg_fx.transform(Guarded(nan_to_num).double(), square, quantities=Grads())
    with pytest.raises(NotYetSupported, match="the arm that runs then is not in the graph"):
        step(batch(3) * torch.nan)  # before anything is compiled
    out = psg_fx.transform(Guarded(nan_to_num).double(), square, quantities=Grads(), backend="eager")(batch(3))
    torch.testing.assert_close(dict(out.grads), oracle.loop_grads(Guarded(nan_to_num).double(), square, batch(3))[1])


def test_without_a_loss_and_in_plans() -> None:
    model = Guarded(clamped).double()
    drop_in = psg_fx.transform(model, backend="eager", loss_reduction="mean")
    square(drop_in(batch(4))).backward()
    _, grads = oracle.loop_grads(model, square, batch(4))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_sample, grads[name])
    drop_in.zero_grad()
    with pytest.raises(NotYetSupported, match="the arm that runs then"):
        drop_in(batch(4) * torch.inf)
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    step(batch(4))
    assert "if torch.isinf(h).any() or torch.isnan(h).any(): its arm is left out" in str(step.explain())


def near_the_mean(h: Tensor) -> Tensor:
    """Of one sample alone the mask picks everything."""
    if ((h - h.mean(0)).abs() < 1e-9).any():
        h = h * 2
    return h


def of_their_sum(h: Tensor) -> Tensor:
    """Of one sample alone the sum may be small."""
    if (h.sum().reshape(1) < 1e-3).any():
        h = h * 2
    return h


def of_all_of_them(h: Tensor) -> Tensor:
    """No column is positive in every sample, and some are in a sample."""
    if (h > 0).all(0).any():
        h = h * 2
    return h


def of_their_number(h: Tensor) -> Tensor:
    if (h.abs() > h.shape[0]).any():
        h = h * 2
    return h


def of_their_places(h: Tensor) -> Tensor:
    if (torch.arange(h.shape[0]) > 5).any():
        h = h * 2
    return h


def of_the_sample_before(h: Tensor) -> Tensor:
    if h.roll(1, 0).isnan().any():
        h = h.nan_to_num()
    return h


MIXED = [near_the_mean, of_their_sum, of_all_of_them, of_their_number, of_their_places, of_the_sample_before]


@pytest.mark.parametrize("guard", MIXED, ids=lambda f: f.__name__)
def test_masks_that_mix_samples_are_refused(guard: Callable[[Tensor], Any]) -> None:
    step = psg_fx.transform(Guarded(guard).double(), square, quantities=Grads(), backend="eager")
    with pytest.raises(SamplesMixed):
        step(batch(4))


def test_an_arm_whose_end_does_not_run_is_refused() -> None:
    """Left out, the code fails by itself."""

    def never_empty(h: Tensor) -> Any:
        return h * 2 if (h.abs() >= 0).any() else None

    step = psg_fx.transform(Guarded(never_empty).double(), square, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError, match="branches on values of a tensor, whether a mask picks anything"):
        step(batch(4))


def test_a_loop_while_a_mask_picks_something_ends() -> None:
    def grown(h: Tensor) -> Tensor:
        m = h < 1
        while m.any():
            h = torch.where(m, h + 0.5 + torch.sigmoid(h), h)
            m = h < 1
        return h

    step = psg_fx.transform(Guarded(grown).double(), square, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError, match=r"while m\.any\(\):(?s:.*)branches on values"):
        step(torch.randn(5, 4, dtype=torch.float64))
