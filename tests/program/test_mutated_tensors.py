"""Capture, change a tensor that model or loss reads, call again: the new value, never the old one."""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.mutated import Row, Scaled, X, Y, scaled, seen
from support.selection import one_in


def times(factor: float) -> Callable[[nn.Module, Any], object]:
    return lambda m, _: m.plain.mul_(factor)


def anew(m: nn.Module, _: Any) -> None:
    m.plain = 3 * m.plain


NUMBERS: dict[str, Row] = {
    "of an entry": (scaled(lambda self: self.plain[1].item()), times(3.0)),
    "of a sum": (scaled(lambda self: (self.plain + self.plain).sum().item()), times(3.0)),
    "of a copy that is written": (scaled(lambda self: self.plain.clone().add_(1.0).tolist()[0]), times(3.0)),
    "of another tensor in its place": (scaled(lambda self: self.plain[1].item()), anew),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_was_read_from_a_tensor_is_seen(name: str) -> None:
    seen(NUMBERS[name])


def ones() -> Tensor:
    return torch.ones(3, dtype=torch.float64)


class Held:
    """Tensors that a loss reads out of containers and a closure."""

    def __init__(self) -> None:
        self.list, self.tuple, self.table = [ones(), ones()], (ones(),), {"a": {"b": ones()}}
        cell = ones()

        def weighted(output: Tensor, target: Tensor) -> Tensor:
            weight = cell * self.list[1] * self.tuple[0] * self.table["a"]["b"]
            return F.cross_entropy(output, target, weight=weight, reduction="sum")

        def rebind(new: Tensor) -> None:
            nonlocal cell
            cell = new

        self.loss, self.rebind = weighted, rebind


CONTAINERS: dict[str, Callable[[Held, Tensor], object]] = {
    "in a list": lambda held, new: held.list.__setitem__(1, new),
    "with its list": lambda held, new: setattr(held, "list", [ones(), new]),
    "with its tuple": lambda held, new: setattr(held, "tuple", (new,)),
    "in a table": lambda held, new: held.table["a"].__setitem__("b", new),
    "with its table": lambda held, new: setattr(held, "table", {"a": {"b": new}}),
    "in a closure": lambda held, new: held.rebind(new),
    "in a list that is turned round": lambda held, new: (held.list.__setitem__(0, new), held.list.reverse()),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_another_tensor_in_the_place_of_one(name: str) -> None:
    model, held = Scaled(), Held()
    step = psg_fx.transform(model, held.loss, backend="eager")
    losses = [step(X, Y).losses]
    for factor in (3.0, 5.0):
        CONTAINERS[name](held, factor * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
        out = step(X, Y)
        expected, grads = oracle.loop_grads(model, held.loss, X, Y)
        assert not torch.allclose(expected, losses[-1]), "the row changes nothing"
        assert oracle.relative_error(out.losses, expected) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12
        losses.append(expected)
    assert len(step.captures) == 1


@pytest.mark.slow
@pytest.mark.parametrize("frozen", one_in(2, [True, False]))
def test_a_function_that_is_reached_in_no_way_that_is_followed(frozen: bool) -> None:
    """Also where `gc.freeze()` has hidden it, as servers and data loaders do before they fork; once more later, too."""
    before = gc.get_freeze_count()
    try:
        for start in (1.0, 2.0):
            value, waiting = [start], queue.Queue[Callable[[], float]]()
            waiting.put(lambda value=value: value[0])  # type: ignore[misc]
            model = Scaled(lambda self, waiting=waiting: waiting.queue[0]())
            if frozen:
                gc.freeze()
            step = psg_fx.transform(model, F.cross_entropy, backend="eager")
            step(X, Y)
            value[0] = 3.0
            losses, grads = oracle.loop_grads(model, F.cross_entropy, X, Y)
            out = step(X, Y)
            assert oracle.relative_error(out.losses, losses) < 1e-12
            assert oracle.worst_error(out.grads, grads) < 1e-12
    finally:
        if frozen:
            gc.unfreeze()
            if before:  # as conftest.py did it
                gc.freeze()
