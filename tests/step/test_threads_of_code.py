"""Code that inductor has written for some threads is not run by more: what each of them sums has a place of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.passes.compile import sizes
from support import oracle

pytestmark = pytest.mark.inductor


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """For how many threads code was written."""
    found: list[int] = []
    original, before = sizes.compiled, torch.get_num_threads()

    def noted(*args: Any) -> Any:
        found.append(torch.get_num_threads())
        return original(*args)

    monkeypatch.setattr(sizes, "compiled", noted)
    yield found
    torch.set_num_threads(before)


def test_more_threads_have_code_of_their_own(compiled: list[int]) -> None:
    cores = os.cpu_count() or 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8192), nn.Linear(8192, 10))
    x, y = torch.randn(1, 8192), torch.randint(10, (1,))
    step = psg_fx.transform(model, F.cross_entropy)
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    for threads in (cores, cores + 2, 1, cores, cores + 2):
        torch.set_num_threads(threads)
        assert oracle.worst_error(step(x, y).grads, grads) < 1e-5
    assert compiled == [cores, cores + 2]
