"""Parts of a batch, put together, are the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum, zoo
from psg_fx.algebra.asks import SquaredNorm
from psg_fx.errors import BadArgument
from support.batches import compare

EVERYTHING = [
    Grads(), Norms(), ClippedSum(0.3), WeightedSum(), MeanGrad(), SecondMoment(), Projection(rank=2), Dots(),
]  # fmt: skip


class TwoBiases(nn.Module):
    """The gradients of both biases are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.first, self.second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.first + self.second).tanh()


class Counted(nn.Module):
    """Counts its calls, and adds up its inputs' last rows."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.fc(x)


def make(model: nn.Module | None = None, quantities: Any = EVERYTHING, **options: Any) -> psg_fx.PerSampleModule:
    torch.manual_seed(0)
    chosen = TwoBiases() if model is None else model
    return psg_fx.transform(chosen, F.cross_entropy, quantities=quantities, backend="eager", **options)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def given(step: psg_fx.PerSampleModule, size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    directions = {n: torch.randn(2, *p.shape, generator=generator) for n, p in step.model.named_parameters()}
    return {"weights": torch.linspace(-1, 2, size), "directions": directions}


@pytest.fixture(scope="module")
def everything() -> psg_fx.PerSampleModule:
    return make()


@pytest.mark.parametrize(("size", "part"), [(6, 2), (7, 3), (5, 1), (3, 8), (4, 4), (0, 2)])
def test_parts_equal_the_whole(everything: psg_fx.PerSampleModule, size: int, part: int) -> None:
    step, (x, y) = everything, batch(size)
    compare(psg_fx.microbatch(step, part)(x, y, **given(step, size)), step(x, y, **given(step, size)))


def test_clipped_sum_per_parameter() -> None:
    step = make(quantities=[ClippedSum(0.2, per="parameter"), Norms(per="parameter")])
    compare(psg_fx.microbatch(step, 2)(*batch(5)), step(*batch(5)))


def test_samples_in_other_dims() -> None:
    ex = zoo.example("encoder", 5, tokens=3, width=8, heads=2, layers=1, hidden=8, batch_first=False)
    step = psg_fx.transform(
        ex.model, ex.loss_fn, quantities=[Norms(), ClippedSum(0.1)], batch_dim=ex.batch_dim, backend="eager"
    )
    compare(psg_fx.microbatch(step, 2)(ex.inputs, ex.targets), step(ex.inputs, ex.targets))


def test_shared_inputs_are_not_cut() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale

    dims = ({"x": 0, "scale": None}, None)
    step = psg_fx.transform(
        Scaled(4, 3), lambda out: out.square().sum(), quantities=[MeanGrad()], backend="eager", batch_dim=dims
    )
    inputs = {"x": torch.randn(5, 4), "scale": torch.randn(3)}
    compare(psg_fx.microbatch(step, 2)(inputs), step(inputs))


def test_buffers_are_those_of_consecutive_forwards() -> None:
    model = Counted()
    step = make(model, [MeanGrad()])
    psg_fx.microbatch(step, 2)(*batch(5))
    assert model.calls.item() == 3


def test_sums_need_the_memory_of_one_result() -> None:
    """The total is the first part's result, and later parts are added to it."""
    step, seen = make(quantities=[ClippedSum(1.0)]), []
    original = type(step).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(original(self, *args, **kwargs))
        return seen[-1]

    step.forward = forward.__get__(step)  # type: ignore[method-assign]
    out = psg_fx.microbatch(step, 2)(*batch(6))
    assert out.clipped_sum["weight"].data_ptr() == seen[0].clipped_sum["weight"].data_ptr()


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int]] = []
    step = make(quantities=[MeanGrad()])
    psg_fx.microbatch(step, 2, progress=lambda done, total: calls.append((done, total)))(*batch(5))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    psg_fx.microbatch(step, 2, progress=True)(*batch(5))
    assert capsys.readouterr().err == ""


def test_refusals() -> None:
    with pytest.raises(BadArgument, match=r"Gram\(\) of a batch does not follow from those of its parts"):
        psg_fx.microbatch(make(quantities=[Norms(), Gram()]), 2)
    with pytest.raises(BadArgument, match=r"SecondMoment\(centered=True\) of a batch does not follow"):
        psg_fx.microbatch(make(quantities=[SecondMoment(centered=True)]), 2)
    with pytest.raises(BadArgument, match="size=0 is not a number of samples"):
        psg_fx.microbatch(make(), 0)
    for size in (2.5, 2.0, True, "2"):
        with pytest.raises(BadArgument, match="is not a number of samples"):
            psg_fx.microbatch(make(), size)  # type: ignore[arg-type]
    for weights in (torch.ones(9), torch.ones(5), torch.ones(6, 1), [1.0] * 7):
        for part in (2, 6, 8):
            with pytest.raises(BadArgument, match=r"weights have shape \("):
                psg_fx.microbatch(make(quantities=[WeightedSum()]), part)(*batch(6), weights=weights)
    with pytest.raises(BadArgument, match="DropInModule is not a step with a loss"):
        psg_fx.microbatch(psg_fx.transform(nn.Linear(4, 3), backend="eager"), 2)


def test_inputs_and_targets_may_be_given_by_name() -> None:
    """A step takes them so, too, and what it says of others is said here."""
    own, (x, y) = make(quantities=[Grads(), Norms()]), batch(5)
    whole, run = own(x, y), psg_fx.microbatch(own, 2)
    for out in (run(x, targets=y), run(inputs=x, targets=y), psg_fx.microbatch(own, 8)(x, targets=y)):
        assert torch.allclose(out.norms, whole.norms)
        assert torch.allclose(out.losses, whole.losses)
    for wrong in (lambda: run(), lambda: run(x, y, y)):
        with pytest.raises(BadArgument, match=r"step\(\) got (no inputs|3 positional arguments)"):
            wrong()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_do_not_stop_growing(dtype: torch.dtype) -> None:
    """The gradient of every sample is one: 512 + 1 is 512 in bfloat16, and 2048 + 1 is 2048 in float16."""
    model, x, weights = nn.Linear(5, 1, bias=False).to(dtype), torch.ones(3000, 5, dtype=dtype), torch.ones(3000)
    asked = [ClippedSum(1e3), WeightedSum(), MeanGrad()]
    step = psg_fx.transform(model, lambda o: o.sum(), quantities=asked, backend="eager")
    exact = torch.full((1, 5), 3000.0).to(dtype)
    found = psg_fx.microbatch(step, 100)(x, weights=weights)
    for value, wanted in ((found.clipped_sum, exact), (found.weighted_sum, exact), (found.mean_grad, exact / 3000)):
        torch.testing.assert_close(value["weight"], wanted, rtol=0, atol=0)
    groups = torch.arange(3000) % 2
    of_groups = psg_fx.transform(model, lambda o: o.sum(), quantities=Grads(), backend="eager")
    rows = psg_fx.microbatch(of_groups, 100)(x, groups=groups).grads["weight"]
    torch.testing.assert_close(rows, torch.full((2, 1, 5), 1500.0).to(dtype), rtol=0, atol=0)
    least = psg_fx.transform(model, lambda o: o.sum(), quantities=ClippedSum(1e3), backend="eager", memory_budget=150)
    torch.testing.assert_close(least(x).clipped_sum["weight"], exact, rtol=0, atol=0)


@dataclass(frozen=True)
class Large(psg_fx.Quantity):
    """How many samples have a norm above a bound, and the largest one."""

    largest: bool = False
    field: ClassVar[str] = "large"

    def asks(self) -> tuple[SquaredNorm]:
        return (SquaredNorm(),)

    def finish(self, results: Any, *_: Any) -> dict[str, Any]:
        squares = sum(results["sq_norms"].values())
        return {"large": (squares > 1).sum(), **({"largest": squares.max()} if self.largest else {})}

    def joins(self) -> dict[str, Any]:
        return {"large": "sum"}


def test_a_count_of_the_users_own_is_added_up() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    step = psg_fx.transform(model, F.cross_entropy, quantities=Large(), backend="eager")
    whole = step(x, y).large
    assert psg_fx.microbatch(step, 4)(x, y).large == whole
    assert psg_fx.over([(x[:4], y[:4]), (x[4:], y[4:])], step, progress=False).large == whole


def test_a_field_that_is_not_said_to_be_put_together() -> None:
    model, x, y = nn.Linear(5, 3), torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    step = psg_fx.transform(model, F.cross_entropy, quantities=Large(largest=True), backend="eager")
    assert step(x, y).largest > 0
    for run in (lambda: psg_fx.microbatch(step, 4)(x, y), lambda: psg_fx.over([(x, y)], step, progress=False)):
        with pytest.raises(BadArgument, match=r"joins\(\) of its quantity has no entry for 'largest'"):
            run()
