"""One answered step of each row, which the tests of its quantities and of its trees read, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import pytest

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Norms, WeightedSum
from support.cases import CASES, Case
from support.expected import Truth

ROWS = {case.name: case for case in CASES}


def everything(truth: Truth) -> list[Any]:
    """What every row is asked for, at once."""
    return [Grads(), Norms(), ClippedSum(truth.bound), WeightedSum(), MeanGrad()]


@dataclass(frozen=True)
class Answered:
    """A row's model and loss, its step after a call, the output, and what this should be."""

    model: Any
    loss: Any
    step: Any
    out: Any
    quantities: list[Any]
    truth: Truth


@functools.lru_cache(maxsize=2)
def answered(name: str) -> Answered:
    """The row by name, asked for everything."""
    case = ROWS[name]
    truth, model = Truth(case), case.model()
    loss = case.loss_fn(model)
    quantities = everything(truth)
    step = psg_fx.transform(model, loss, quantities=quantities, backend="eager", batch_dim=case.dims)
    return Answered(model, loss, step, step(case.data(), weights=truth.weights), quantities, truth)


def in_one_process(cases: list[Case], chosen: Container[str]) -> list[Any]:
    """The rows as parameters, the tests of each in one process; those that are not `chosen` by name marked `rest`."""
    found = []
    for case in cases:
        marks = [pytest.mark.xdist_group(f"row {case.name}")]
        found.append(pytest.param(case, id=case.name, marks=marks + [pytest.mark.rest] * (case.name not in chosen)))
    return found
