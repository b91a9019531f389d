"""Models that decide by small buffers of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1])


class Decides(nn.Module):
    """What `way` makes of a layer."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.way = nn.Linear(4, 4).double(), way
        values = {"ready": False, "old": torch.tensor(0, dtype=torch.uint8), "steps": 2, "start": 0.0, "sizes": [1, 3]}
        for name, value in (values | {"mask": [True, False, True, True], "scales": [1.0, 2.0]}).items():
            self.register_buffer(name, torch.as_tensor(value))
        self.plain = torch.tensor([[True, False], [False, True]])

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def made_ready(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.layer(x) if m.ready else 2 * m.layer(x)
    m.ready.fill_(True)
    return out


def counted(m: Any, x: Tensor) -> Tensor:
    m.steps.add_(1)
    out: Tensor = m.layer(x) if m.steps > 4 else 2 * m.layer(x)
    return out


def counted_by_a_view(m: Any, x: Tensor) -> Tensor:
    m.sizes[:1].add_(1)
    out: Tensor = m.layer(x) if m.sizes[0] > 1 else 2 * m.layer(x)
    return out


def bulk(m: Any, x: Tensor) -> Tensor:
    torch._foreach_add_([m.steps], 1)
    out: Tensor = m.layer(x) if m.steps > 2 else 2 * m.layer(x)
    return out


def made_and_written(m: Any, x: Tensor) -> Tensor:
    some = m.sizes > 0
    some[0] = x.sum() > 0
    out: Tensor = m.layer(x) if some.all() else 2 * m.layer(x)
    return out


def literal_and_written(m: Any, x: Tensor) -> Tensor:
    some = torch.ones(2, dtype=torch.bool)
    some[0] = x.sum() > 0
    out: Tensor = m.layer(x) if some.all() else 2 * m.layer(x)
    return out


def columns_written(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 2, 2, dtype=x.dtype)
    out[:, m.plain] = m.layer(x)[..., m.mask][:, :2]
    return (out.cumsum(1) + 1).flatten(1)


def euler(m: Any, x: Tensor) -> Tensor:
    """As solvers of differential equations do, which look for the steps around each time that is asked."""
    grid, wanted, found = torch.linspace(0, 1, 5), torch.tensor([0.25, 1.0]), []
    differences = grid[1:] > grid[:-1]
    assert differences.all() or (~differences).all()
    for start, end in zip(grid[:-1], grid[1:], strict=True):  # noqa: RUF007  (as they do)
        x = x + (end - start) * m.layer(x).tanh() * start.cos()
        if len(found) < len(wanted) and end >= wanted[len(found)]:
            found.append(x)
    return torch.cat(found, 1)


def replaced(name: str, value: Any) -> Callable[[Any], object]:
    return lambda m: setattr(m, name, torch.as_tensor(value))


Change = Callable[[Any], object]
ROWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Change]] = {
    "truth": (lambda m, x: m.layer(x) if m.ready else 2 * m.layer(x), lambda m: m.ready.fill_(True)),
    "truth of a float": (lambda m, x: m.layer(x) if m.start else 2 * m.layer(x), lambda m: m.start.fill_(1.0)),
    "item": (lambda m, x: m.layer(x) if not m.ready.item() else 2 * m.layer(x), lambda m: m.ready.fill_(True)),
    "item of uint8": (lambda m, x: m.layer(x) if m.old.item() == 0 else 2 * m.layer(x), lambda m: m.old.fill_(1)),
    "compared": (lambda m, x: m.layer(x) if (m.steps == 2) & ~m.ready else 2 * m.layer(x), lambda m: m.steps.fill_(3)),
    "replaced": (lambda m, x: m.layer(x) if m.ready else 2 * m.layer(x), replaced("ready", True)),
    "loaded": (
        lambda m, x: m.layer(x) * len(m.sizes.tolist()) * m.sizes.tolist()[0],
        lambda m: m.load_state_dict({**m.state_dict(), "sizes": torch.tensor([2, 2])}, assign=True),
    ),
    "arithmetic": (lambda m, x: m.layer(x) if m.steps % 2 + 1 == 1 else 2 * m.layer(x), lambda m: m.steps.fill_(3)),
    "bound of a slice": (
        lambda m, x: torch.cat([m.layer(x)[:, : m.steps], m.layer(x)[:, m.sizes[1] :], x], 1),
        lambda m: m.steps.fill_(3),
    ),
    "text": (lambda m, x: m.layer(x) * float(f"{m.steps}"), lambda m: m.steps.fill_(3)),
    "range": (lambda m, x: m.layer(x) * len(range(m.steps)), lambda m: m.steps.fill_(3)),
    "columns": (
        lambda m, x: m.layer(x)[:, m.mask], lambda m: m.mask.copy_(torch.tensor([False, True, True, True])),
    ),
    "other columns": (
        lambda m, x: m.layer(x[:, m.mask].repeat(1, 2)[:, :4])[:, m.mask | m.ready], lambda m: m.ready.fill_(True),
    ),
    "floats compared": (
        lambda m, x: m.layer(x) if (m.scales[1:] > m.scales[:-1]).all() or (m.scales == 5).any() else 2 * m.layer(x),
        lambda m: m.scales.fill_(1.0),
    ),
    "equal": (
        lambda m, x: m.layer(x) if torch.equal(m.scales, m.sizes) else 2 * m.layer(x), replaced("scales", [1, 3]),
    ),
    "nearly equal": (
        lambda m, x: m.layer(x) if torch.allclose(m.scales, m.sizes.to(m.scales), atol=1.5) else 2 * m.layer(x),
        replaced("scales", [1.0, 9.0]),
    ),
    "a negative zero": (
        lambda m, x: m.layer(x) if (1 / m.start > 0).all() else 2 * m.layer(x), lambda m: m.start.fill_(-0.0),
    ),
    "places": (
        lambda m, x: torch.cat([m.layer(x)[:, m.mask.nonzero().squeeze(-1)], x[:, torch.where(~m.mask)[0]]], 1),
        lambda m: m.mask.copy_(torch.tensor([False, True, True, True])),
    ),
    "places of floats": (
        lambda m, x: torch.cat([m.layer(x)[:, (m.scales > 1).nonzero(as_tuple=True)[0]], x], 1),
        lambda m: m.scales.fill_(2.0),
    ),
    "columns written": (columns_written, lambda m: m.plain.copy_(torch.tensor([[True, True], [False, False]]))),
    "list of floats": (lambda m, x: m.layer(x) * sum(m.scales.tolist()), lambda m: m.scales.fill_(1.0)),
    "list": (
        lambda m, x: torch.cat(m.layer(x).split(m.sizes.tolist(), 1)[::-1], 1),
        lambda m: m.sizes.copy_(torch.tensor([2, 2])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_decision_holds_as_long_as_its_buffer(name: str) -> None:
    way, change = ROWS[name]
    model = Decides(way)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for count in (1, 2):
        losses, grads = oracle.loop_grads(model, F.cross_entropy, X, Y)
        for _ in range(2):
            out = step(X, Y)
            assert oracle.relative_error(out.losses, losses) < 1e-12
            assert oracle.worst_error(out.grads, grads) < 1e-12
        assert len(step.captures) == count
        change(model)


def counts_on(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.layer(x) if m.steps < 5 else 2 * m.layer(x)
    m.steps.add_(1)
    return out


def warms_up(m: Any, x: Tensor) -> Tensor:
    out: Tensor = 2 * m.layer(x) if (m.start / 4).clone() >= 1 and m.steps > 0 else m.layer(x)
    m.start += 1.5
    return out


def every_third(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.layer(x) if m.steps % 3 == 0 else 2 * m.layer(x)
    m.steps += 1
    return out


@pytest.mark.parametrize("way", [counts_on, warms_up, every_third])
def test_a_counter_counts_on_while_the_decision_stays(way: Callable[[Any, Tensor], Tensor]) -> None:
    model, ordinary = Decides(way), Decides(way)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(7):
        losses, grads = oracle.loop_grads(ordinary, F.cross_entropy, X, Y)
        out = step(X, Y)
        ordinary(X)
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12
        assert all(map(torch.equal, model.buffers(), ordinary.buffers()))
    assert len(step.captures) == 2


def doubled(m: Any, x: Tensor) -> Tensor:
    count = m.steps
    for _ in range(30):
        count = count + count
    out: Tensor = m.layer(x) if count > 0 else 2 * m.layer(x)
    return out


@pytest.mark.parametrize("way", [lambda m, x: m.layer(x) * sum(bool(m.steps < k) for k in range(40)), doubled])
def test_where_questions_are_many_or_long_the_value_is_compared(way: Callable[[Any, Tensor], Tensor]) -> None:
    model = Decides(way)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for steps in (60, 70):
        model.steps.fill_(steps)  # type: ignore[operator]
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12
    assert len(step.captures) == 2


def test_a_number_stays_in_the_graph() -> None:
    model = Decides(lambda m, x: m.layer(x) * m.steps.item())
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for steps in (2, 3, 5):
        model.steps.fill_(steps)  # type: ignore[operator]
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12
    assert len(step.captures) == 1


def test_what_the_code_writes_afterwards_is_written() -> None:
    model = Decides(made_ready)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    plain: list[tuple[bool, Callable[[Any, Tensor], Tensor]]]
    plain = [(False, lambda m, x: 2 * m.layer(x)), (True, lambda m, x: m.layer(x)), (True, lambda m, x: m.layer(x))]
    for ready, way in plain:
        assert bool(model.ready) is ready
        want = oracle.loop_grads(Decides(way), F.cross_entropy, X, Y)[1]
        assert oracle.worst_error(step(X, Y).grads, want) < 1e-12
    assert len(step.captures) == 2


def test_nan_equals_itself() -> None:
    model = Decides(lambda m, x: m.layer(x) if m.start else 2 * m.layer(x))
    model.start.fill_(torch.nan)  # type: ignore[operator]
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(2):
        step(X, Y)
    assert len(step.captures) == 1


def test_a_parameter_that_replaces_another_is_asked_anew() -> None:
    model = Decides(lambda m, x: m.layer(x) if getattr(m.layer.weight, "kept", False) else 2 * m.layer(x))
    model.layer.weight.kept = True  # type: ignore[assignment]
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    step(X, Y)
    model.layer.weight = nn.Parameter(model.layer.weight.detach().clone())
    assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12


MASKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "too long": lambda m, x: m.layer(x)[:, torch.arange(5) != 2],
    "behind an ellipsis": lambda m, x: m.layer(x)[..., torch.arange(3) != 2],
    "of two dims": lambda m, x: m.layer(x).view(-1, 2, 2)[:, torch.ones(2, 1, dtype=torch.bool)],
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_another_shape_is_an_error(name: str) -> None:
    """As in torch."""
    model = Decides(MASKS[name])
    with pytest.raises(IndexError, match="shape of the mask"):
        model(X)
    with pytest.raises(psg_fx.BadArgument, match="shape of the mask"):
        psg_fx.transform(model, F.cross_entropy, backend="eager")(X, Y)


def _pairs(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.layer(x)
    return h[:, :, None] * h[:, None]


def far_apart(m: Any, x: Tensor) -> Tensor:
    """As models that predict from all pairs of places list these."""
    places = torch.arange(4)
    pairs = torch.cartesian_prod(places, places)
    i, j = pairs[pairs[:, 1] - pairs[:, 0] >= 2].unbind(-1)
    h = m.layer(x)
    return torch.cat([h, (h[:, i] - h[:, j]).sin()], 1)


def to_the_end(m: Any, x: Tensor) -> Tensor:
    """As solvers with steps of one size do: the last time is the one that is asked."""
    grid = torch.arange(0, 4) * 0.3
    grid[-1] = torch.tensor([0.0, 1.0])[-1]
    h = m.layer(x)
    while grid[-1] < 1.5:
        grid[torch.tensor([False, False, False, True])] = 2.0
        h = h.sin()
    grid[:2] = grid[:2] + 1
    return h * grid.tolist()[1]


def on_a_grid(m: Any, x: Tensor) -> Tensor:
    i, j = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    return _pairs(m, x)[:, (i * j).square() > 3].cumsum(1)


LITERAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "columns": lambda m, x: m.layer(x)[:, torch.tensor([True, False, True, True])],
    "compared": lambda m, x: m.layer(x)[:, torch.arange(4) != 2],
    "columns behind others": lambda m, x: m.layer(x).view(-1, 1, 4)[:, None, ..., torch.arange(4) != 2].flatten(1),
    "no columns": lambda m, x: torch.cat([m.layer(x), x[:, torch.zeros(4, dtype=torch.bool)]], 1),
    "places": lambda m, x: torch.cat([m.layer(x)[:, (torch.arange(4) % 2 == 1).nonzero()[:, 0]], x], 1),
    "no places": lambda m, x: torch.cat([m.layer(x), x[:, torch.zeros(4, dtype=torch.bool).nonzero()[:, 0]]], 1),
    "a pair of each": lambda m, x: _pairs(m, x)[:, torch.eye(4, dtype=torch.bool).roll(2, 0)] + m.layer(x).sum(1, True),
    "pairs below": lambda m, x: m.layer(x) + _pairs(m, x)[:, torch.ones(4, 4).tril(-1) == 1].logsumexp(1, True),
    "pairs by numbers": lambda m, x: m.layer(x) * _pairs(m, x)[:, *torch.tril_indices(4, 4, -1)].amax(1, True),
    "a grid of times": euler,
    "a grid that is written": to_the_end,
    "pairs that are far apart": far_apart,
    "a grid": on_a_grid,
    "where of three": lambda m, x: torch.where(torch.arange(4) > 1, input=m.layer(x), other=x),
    "number of a float": lambda m, x: m.layer(x) * len(range(int(torch.linspace(0, 4, 3)[1].item()))),
    "a list": lambda m, x: torch.cat([m.layer(x)[:, i] for i in torch.tensor([[0, 2], [1, 3]]).tolist()], 1),
}


@pytest.mark.parametrize("name", LITERAL)
def test_what_is_made_of_numbers_is_known(name: str) -> None:
    model = Decides(LITERAL[name])
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(2):
        want = oracle.loop_grads(model, F.cross_entropy, X, Y)[1]
        assert oracle.worst_error(step(X, Y).grads, want) < 1e-12
    assert len(step.captures) == 1


def written_by_a_view(m: Any, x: Tensor) -> Tensor:
    grid = torch.zeros(3)
    part = grid[:2]
    grid[0] = 2.0
    part[1] = 3.0
    out: Tensor = m.layer(x) if grid.sum() > 4 else 2 * m.layer(x)
    return out


@pytest.mark.parametrize(
    "way", [counted, counted_by_a_view, bulk, made_and_written, literal_and_written, written_by_a_view]
)
@pytest.mark.parametrize("first", [1, 4])
def test_what_the_code_has_written_before_is_not_known(way: Callable[[Any, Tensor], Tensor], first: int) -> None:
    model = Decides(way)
    for buffer in (model.steps, model.sizes):
        buffer.fill_(first)  # type: ignore[operator]
    with pytest.raises(psg_fx.PsgError, match=r"branches on values of a tensor|the code branches on it"):
        psg_fx.transform(model, F.cross_entropy, backend="eager")(X, Y)
    assert int(model.steps) == int(model.sizes[0]) == first  # type: ignore[arg-type, index]
