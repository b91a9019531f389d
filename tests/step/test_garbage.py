"""Nothing looks for garbage while the first call makes what stays, and everything is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.errors import PsgError
from psg_fx.garbage import collect_while_waiting, without_collection


@pytest.fixture
def searches() -> Iterator[list[int]]:
    """How often garbage was looked for, with a threshold that any call passes."""
    found, threshold = [0], gc.get_threshold()

    def count(phase: str, info: dict[str, Any]) -> None:
        found[0] += phase == "start"

    gc.callbacks.append(count)
    gc.set_threshold(200)
    yield found
    gc.set_threshold(*threshold)
    gc.callbacks.remove(count)


def step(loss: bool) -> tuple[Any, tuple[torch.Tensor, ...]]:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    if not loss:
        return psg_fx.transform(model, backend="eager", progress=False), (x,)
    return psg_fx.transform(model, F.cross_entropy, backend="eager", progress=False), (x, y)


@pytest.mark.parametrize("loss", [True, False])
def test_not_in_a_first_call(searches: list[int], loss: bool) -> None:
    made, batch = step(loss)
    searches[0] = 0
    made(*batch)
    assert searches[0] <= 5  # what stands around the call makes objects, too
    assert gc.isenabled()
    keep = [[k] for k in range(1000)]
    assert searches[0] > 0
    assert len(keep) == 1000


def test_a_call_that_fails_leaves_it_on() -> None:
    made, (x, y) = step(loss=True)
    with pytest.raises(PsgError):
        made(x, y[:2])
    assert gc.isenabled()


def test_whoever_has_turned_it_off_finds_it_off() -> None:
    made, batch = step(loss=True)
    gc.disable()
    try:
        made(*batch)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_who_waits_collects_what_is_new(searches: list[int]) -> None:
    searches[0] = 0
    with without_collection():
        collect_while_waiting()
    assert searches[0] >= 1
    gc.disable()
    try:
        with without_collection():
            searches[0] = 0
            collect_while_waiting()  # the user has turned it off
            assert searches[0] == 0
    finally:
        gc.enable()
    searches[0] = 0
    collect_while_waiting()
    assert searches[0] <= 1  # only of Python's own accord
