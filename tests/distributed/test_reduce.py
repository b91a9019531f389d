"""`psg_fx.distributed.reduce`: what every process has of its own samples becomes what one process has of all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import BadArgument
from psg_fx.step.compiled import StepOutput
from support.processes import Processes

pytestmark = pytest.mark.xdist_group("processes")

QUANTITIES = (
    psg_fx.ClippedSum(max_norm=0.3), psg_fx.WeightedSum(), psg_fx.MeanGrad(), psg_fx.SecondMoment(), psg_fx.Gram(),
)  # fmt: skip
CENTERED = (psg_fx.SecondMoment(centered=True), psg_fx.MeanGrad())
SUMS = ("clipped_sum", "weighted_sum", "mean_grad", "second_moment")


def model_of_two_dtypes() -> nn.Module:
    """Convolutions, whose gradients may lie otherwise in memory, and parameters of two dtypes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()


def transformed(model: nn.Module, quantities: Any) -> Any:
    return psg_fx.transform(model, F.cross_entropy, quantities=quantities, backend="eager", progress=False)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-10, atol=1e-12)


def check_shares(rank: int, world: int, cuts: list[tuple[int, ...]]) -> None:
    """Batches cut at these places."""
    model = model_of_two_dtypes()
    step, centered, one = (transformed(model, q) for q in (QUANTITIES, CENTERED, QUANTITIES))
    of_all = transformed(model, CENTERED)
    for cut in cuts:
        size = cut[-1]
        x, y, weights = torch.randn(size, 1, 6, 6).double(), torch.randint(3, (size,)), torch.rand(size).double()
        mine = slice(cut[rank], cut[rank + 1])
        local = step(x[mine], y[mine], weights=weights[mine])
        kept = copy.deepcopy(vars(local))
        out, expected = psg_fx.distributed.reduce(local), one(x, y, weights=weights)
        for field in SUMS:
            close(getattr(out, field), getattr(expected, field))
            close(kept[field], getattr(local, field))
        for field in ("losses", "norms", "clip_factors"):
            close({"": getattr(out, field)}, {"": getattr(expected, field)[mine]})
        close({"": out.gram}, {"": expected.gram[mine, mine]})
        variance = psg_fx.distributed.reduce(centered(x[mine], y[mine]))
        close(variance.second_moment, of_all(x, y).second_moment)


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 3, 5), (0, 0, 7), (0, 2, 2), (0, 0, 0)],
        pytest.param([(0, 3, 5, 8, 9), (0, 0, 2, 7, 7), (0, 0, 0, 0, 0)], marks=pytest.mark.rest),
    ],
    ids=["2", "4"],
)
def test_shares_of_any_size(processes: Processes, cuts: list[tuple[int, ...]]) -> None:
    """Uneven ones, empty ones, and a batch without samples."""
    processes.run(check_shares, len(cuts[0]) - 1, cuts)


def check_poisson(rank: int, world: int) -> None:
    """Private training with the samples of each step drawn by themselves, against one process."""
    model, x, y = model_of_two_dtypes(), torch.randn(40, 1, 6, 6).double(), torch.randint(3, (40,))
    whole = copy.deepcopy(model)
    step, one = transformed(model, psg_fx.ClippedSum(0.3)), transformed(whole, psg_fx.ClippedSum(0.3))
    draw, own, other = (torch.Generator().manual_seed(seed) for seed in (5, 6, 6))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, whole)]
    for rate in (0.2, 0.1, 0.02, 0.2):
        drawn = (torch.rand(40, generator=draw) < rate).nonzero().flatten()
        mine = drawn[drawn % world == rank]
        pairs = (
            (model, psg_fx.distributed.reduce(step(x[mine], y[mine])).clipped_sum, own),
            (whole, one(x[drawn], y[drawn]).clipped_sum, other),
        )
        for each, total, generator in pairs:
            noisy = {n: v + 0.1 * torch.randn(v.shape, generator=generator).double() for n, v in total.items()}
            psg_fx.distributed.set_grad(each, noisy, 1 / (0.2 * 40))
        for optimizer in optimizers:
            optimizer.step()
    close(dict(model.named_parameters()), dict(whole.named_parameters()))


def test_poisson_batches_train_as_in_one_process(processes: Processes) -> None:
    processes.run(check_poisson, 2)


def check_groups(rank: int, world: int) -> None:
    """Only the processes of a group are added up; parts of a batch are joined before."""
    model, x, y = model_of_two_dtypes(), torch.randn(8, 1, 6, 6).double(), torch.randint(3, (8,))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    of = rank // 2
    mine, theirs = slice(2 * rank, 2 * rank + 2), slice(4 * of, 4 * of + 4)
    step = transformed(model, psg_fx.MeanGrad())
    out = psg_fx.distributed.reduce(psg_fx.microbatch(step, 1)(x[mine], y[mine]), pairs[of])
    close(out.mean_grad, step(x[theirs], y[theirs]).mean_grad)


def test_groups_and_microbatches(processes: Processes) -> None:
    processes.run(check_groups, 4)


class Silent(psg_fx.MeanGrad):
    """Does not say how it follows from parts."""

    def joins(self) -> Any:
        return {}


def check_refusals(rank: int, world: int) -> list[str]:
    model, x, y = model_of_two_dtypes(), torch.randn(4, 1, 6, 6).double(), torch.randint(3, (4,))
    out = transformed(model, CENTERED[:1])(x, y)
    once = psg_fx.distributed.reduce(transformed(model, psg_fx.ClippedSum(0.3))(x, y))
    found = []
    for wrong in (out, once, StepOutput({"losses": y}), {"losses": y}):
        with pytest.raises(BadArgument) as error:
            psg_fx.distributed.reduce(wrong)  # type: ignore[arg-type]
        found.append(str(error.value))
    with pytest.raises(BadArgument) as error:
        psg_fx.distributed.reduce(transformed(model, Silent())(x, y))
    found.append(str(error.value))
    for values in ({"weight": y}, {"0.weight": y}, {"0.weight": torch.ones(4, 1, 3, 3, device="meta")}):
        with pytest.raises(BadArgument) as error:
            psg_fx.distributed.set_grad(model, values)
        found.append(str(error.value))
    return found


def test_what_cannot_be_added_up_is_refused(processes: Processes) -> None:
    variance, twice, unknown, other, silent, name, shape, device = processes.run(check_refusals, 2)[0]
    assert variance == (
        "SecondMoment(centered=True) of all processes does not follow from those of each\n"
        "  where  psg_fx.distributed.reduce(out)\n"
        "  why    the processes' means differ, and are not known\n"
        "  fix    ask for MeanGrad() as well: quantities=[SecondMoment(centered=True), MeanGrad()]"
    )
    assert twice == unknown == (
        "this is no output of one process\n"
        "  where  psg_fx.distributed.reduce(out)\n"
        "  why    it is over all processes already, and adding it up again would count every process once more\n"
        "  fix    pass what the step returned, once"
    )  # fmt: skip
    assert other.startswith("out is a dict\n")
    assert silent.startswith("it is not known how mean_grad of all processes follows from those of each\n")
    assert "the model has no such parameter" in name
    assert "it is plain [4] on cpu, and the parameter is plain [4, 1, 3, 3] on cpu" in shape
    assert "it is plain [4, 1, 3, 3] on meta, and the parameter is plain [4, 1, 3, 3] on cpu" in device
