"""Branches on whether a mask picks anything: `if m.any(): out[m] = f(x[m])`, `if idx.numel() == 0: continue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, Grads, PsgError
from support import oracle
from support.programs import square

EXPERTS = 2


class Experts(nn.Module):
    """Each sample goes to one expert, as `arm(m, x, out, expert)` writes it into out; m: whose samples go there."""

    def __init__(self, arm: Callable[..., Any]) -> None:
        super().__init__()
        self.arm, self.gate = arm, nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            self.arm(chosen == k, x, out, expert)
        return out * self.gate(x).amax(-1, keepdim=True)  # type: ignore[no-any-return]


def any_of_it(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.any():
        out[m] = out[m] + f(x[m])


def none_of_it(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if not torch.any(m).item():
        return
    out[m] += f(x[m])


def summed(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.sum() > 0:
        out[m] += f(x[m])


def cast(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.float().sum() > 0.5:
        out[m] = f(x[m])


def counted(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.sum().item() == 0:
        return
    out[m] = f(x[m])


def as_a_number(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if int(m.sum()):
        out[m] = f(x[m])


def all_others(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if not (~m).all():
        out[m] = f(x[m])


def places(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    rows = m.nonzero(as_tuple=True)[0]
    if rows.numel() == 0:
        return
    out.index_add_(0, rows, f(x[rows]))


def length(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    (rows,) = torch.where(m)
    if len(rows) == 0:
        return
    out[rows] = f(x[rows])


def size(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    rows = m.nonzero().flatten()
    if rows.shape[0]:
        out[rows] += f(x[rows])


def rows_themselves(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    rows = x[m]
    if rows.shape[0] > 0:
        out[m] = f(rows)


def one_in_another(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.any():
        out[m] = f(x[m])
        also = m & (x[:, 0] > 0)
        if also.any():
            out[also] = out[also] + f(x[also])


def checked(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.any():
        rows = x[m]
        if rows.min() < -100 or torch.max(rows) > 100:
            raise ValueError
        out[m] = f(rows)


def weighted(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.any():
        out += m[:, None].to(x.dtype) * f(x)


def all_rows(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    if m.any():
        out.copy_(torch.where(m[:, None], f(x), out))


def attended(m: Tensor, x: Tensor, out: Tensor, f: Any) -> None:
    """-inf of the code's own is where a softmax leaves zeros."""
    if m.any():
        scores = f(x)[:, :, None] * x[:, None]
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        out.copy_(torch.where(m[:, None], (weights * x[:, None]).sum(-1), out))


ARMS = [
    any_of_it, none_of_it, summed, cast, counted, as_a_number, all_others, places, length, size, rows_themselves,
    one_in_another, checked, weighted, all_rows, attended,
]  # fmt: skip


@pytest.mark.parametrize("arm", ARMS, ids=lambda f: f.__name__)
def test_gradients(arm: Any) -> None:
    torch.manual_seed(0)
    model = Experts(arm).double()
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    for count in (5, 1, 2):
        x = torch.randn(count, 4, dtype=torch.float64)
        oracle.check_call(step, model, square, x)
    assert len(step.captures) == 1


def test_a_check_in_an_arm_counts_where_it_runs() -> None:
    model = Experts(checked).double()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.copy_(torch.tensor([1.0, 0.0]))
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    x = torch.randn(5, 4, dtype=torch.float64)
    oracle.check_call(step, model, square, x)  # the other expert looks at no rows at all
    x[3, 1] = 101
    with pytest.raises(BadArgument, match=r"test_nothing_picked\.py"):
        step(x)


class Masked(nn.Module):
    """`change(model, h)` of a layer's outputs."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.other, self.change = nn.Linear(4, 3), nn.Linear(3, 3), change
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.layer(x))  # type: ignore[no-any-return]


def not_a_number(model: Any, h: Tensor) -> Tensor:
    wrong = torch.isnan(h)
    return h.masked_fill(wrong, 0.0) if wrong.any() else h


def by_where(model: Any, h: Tensor) -> Tensor:
    if torch.isnan(h).any():
        h = torch.where(torch.isnan(h), torch.zeros_like(h), h)
    return h


def the_rest(model: Any, h: Tensor) -> Tensor:
    out, inside = h.clone(), h.abs() < 1
    if not inside.all():
        out[~inside] = torch.sign(h[~inside]) * model.scale
    return out


def nothing_done(model: Any, h: Tensor) -> Tensor:
    if (h > 1e6).any():
        pass
    return h


def repeated(model: Any, h: Tensor) -> Tensor:
    """Until nothing is left to do: what comes after is then the same as before."""
    for _ in range(3):
        m = h.norm(dim=-1) > 1
        if not m.any():
            break
        h = torch.where(m[:, None], h * 0.5, h)
    return h


def halting(model: Any, h: Tensor) -> Tensor:
    active = h[:, 0] < 9
    for _ in range(3):
        if not active.any():
            break
        new = h.clone()
        new[active] = torch.tanh(model.other(h[active]))
        h, active = new, active & (h[:, 0] > 0)
    return h


def one_after_another(model: Any, h: Tensor) -> Tensor:
    out, left = torch.zeros_like(h), h[:, 0] > -9
    for k in range(3):
        m = left & (h[:, k] > 0)
        if m.any():
            out[m] = (k + 1) * model.other(h[m])
            left = left & ~m
    return out


def into_parts(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 1:] > 0
    if m.any():
        out[:, 1:][m] = -2.0
    if (n := h[:, 0] > 0).any():
        out.select(1, 0)[n] = 3.0
    return out


def bits_of_numbers(model: Any, h: Tensor) -> Tensor:
    """Numbers & True are their last bits."""
    numbers, m = (h * 4).long(), h > 1e6
    if m.any():
        numbers = numbers & ~m
    return h * numbers


MASKED = [
    bits_of_numbers,
    into_parts,
    not_a_number,
    by_where,
    the_rest,
    nothing_done,
    repeated,
    halting,
    one_after_another,
]


@pytest.mark.parametrize("change", MASKED, ids=lambda f: f.__name__)
def test_masked(change: Any) -> None:
    torch.manual_seed(0)
    model = Masked(change).double()
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    for count in (5, 1):
        oracle.check_call(step, model, square, torch.randn(count, 4, dtype=torch.float64))


def prepared(model: Any, h: Tensor) -> Tensor:
    out, first = torch.zeros_like(h), True
    for k in range(3):
        m = h[:, k] > 0
        if m.any():
            out[m] = out[m] + (model.other(h[m]) if first else h[m])
            first = False
    return out


def counting(model: Any, h: Tensor) -> Tensor:
    out, arms = h.clone(), 0
    for k in range(3):
        m = h[:, k] > 0
        if m.any():
            out[m] = model.other(h[m])
            arms += 1
    return out / max(arms, 1)


def only_one(model: Any, h: Tensor) -> Tensor:
    out, arms = h.clone(), 0
    for k in range(4):
        m = h[:, k % 3] > k
        if m.any():
            out[m] = model.other(h[m])
            arms += 1
    return out * 2 if arms == 1 else out


def otherwise(model: Any, h: Tensor) -> Tensor:
    m = h[:, 0] > 0
    return h.masked_fill(m[:, None], 0.0) if m.any() else model.other(h)


def of_another_mask(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 0] > 0
    if m.any():
        out[~m] = model.other(h[~m])
    return out


def two_at_least(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 0] > 0
    if m.sum() > 1:
        out[m] = model.other(h[m])
    return out


def written_since(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 0] > 0
    picks = m.any()
    m[0] = True
    if picks:
        out[m] = model.other(h[m])
    return out


def number_written_since(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 0] > 0
    count = m.sum()
    count -= 1
    if count > 0:
        out[m] = model.other(h[m])
    return out


def mask_in_floats_written_since(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 0] > 0
    numbers = m.float()
    numbers[0] = 1
    if numbers.sum() > 0:
        out[m] = model.other(h[m])
    return out


def written_behind_its_copy(model: Any, h: Tensor) -> Tensor:
    out, m = h.clone(), h[:, 0] > 0
    copy = m.float()
    m |= h[:, 1] > 0
    if copy.any():
        out[m] = model.other(h[m])
    return out


def in_a_byte(model: Any, h: Tensor) -> Tensor:
    """Where 256 are picked, it is zero."""
    out, m = h.clone(), h[:, 0] > 0
    if m.sum().to(torch.uint8) > 0:
        out[m] = model.other(h[m])
    return out


def left_in_a_buffer(model: Any, h: Tensor) -> Tensor:
    if (h > 0).any():
        model.total = model.total + 1
    return h


def all_rows_computed(model: Any, h: Tensor) -> Tensor:
    m = h > 0
    return torch.where(m, torch.log(h), h) if m.any() else h


def scores_of_nothing(model: Any, h: Tensor) -> Tensor:
    m, out = h > 0, h.sin()
    if m.any():  # all scores of a row without one are -inf, whose softmax is no number
        out = torch.where(m, (h + torch.zeros_like(h).masked_fill(~m, -torch.inf)).softmax(-1), out)
    return out


REFUSED = [
    prepared, counting, only_one, otherwise, of_another_mask, two_at_least, written_since, number_written_since,
    mask_in_floats_written_since, written_behind_its_copy, in_a_byte, left_in_a_buffer, all_rows_computed,
    scores_of_nothing,
]  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
def test_refused(change: Any) -> None:
    torch.manual_seed(0)  # an arm that does not run in the first batch may be left out
    step = psg_fx.transform(Masked(change).double(), square, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError) as error:
        step(torch.randn(5, 4, dtype=torch.float64))
    assert "test_nothing_picked.py" in error.value.where
    assert " if " in error.value.where
    assert "branches on" in error.value.why
