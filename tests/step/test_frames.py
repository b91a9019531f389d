"""Calls deep inside of a capture find memory for their frames."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from psg_fx.frames import with_room_for_frames

CALLS = 300


def most_faults() -> int:
    """Of all depths, the most page faults that so many calls of a function take there."""

    def leaf(a: int, b: int, c: int) -> int:
        return a

    def at(depth: int) -> int:
        if depth:
            return at(depth - 1)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for k in range(CALLS):
            leaf(k, k, k)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    return max(at(depth) for depth in range(150))


def in_a_thread(function: Callable[[], int]) -> int:
    """In a thread whose frames begin with it."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of a thread")
def test_no_call_maps_memory_for_its_frame() -> None:
    assert in_a_thread(with_room_for_frames(most_faults)) < CALLS / 2
    if sys.implementation.name == "cpython" and sys.version_info < (3, 14):
        assert in_a_thread(most_faults) >= CALLS  # else nothing is left to do


def test_the_function_is_as_it_was() -> None:
    @with_room_for_frames
    def ratio(a: float, *, to: float) -> float:
        """A ratio."""
        return a / to

    assert (ratio(1.0, to=2.0), ratio.__name__, ratio.__doc__) == (0.5, "ratio", "A ratio.")
    with pytest.raises(ZeroDivisionError) as caught:
        ratio(1.0, to=0.0)
    assert caught.traceback[-1].name == "ratio"


def test_a_deep_stack_has_room_for_more_calls() -> None:
    """Only meanwhile, and also where the limit is low."""

    def at(depth: int, function: Callable[[], int]) -> int:
        return at(depth - 1, function) if depth else function()

    @with_room_for_frames
    def further() -> int:
        return at(700, sys.getrecursionlimit)

    before = sys.getrecursionlimit()
    with pytest.raises(RecursionError):
        at(before - 300, lambda: at(700, sys.getrecursionlimit))
    assert at(before - 300, further) > before
    assert sys.getrecursionlimit() == before


def test_limits_of_the_users_own_are_followed() -> None:
    @with_room_for_frames
    def inside() -> int:
        return sys.getrecursionlimit()

    before = sys.getrecursionlimit()
    try:
        for limit, least in ((500, 4000), (2000, 8000), (9000, 12_000), (30_000, 30_000)):
            sys.setrecursionlimit(limit)
            assert least <= inside() <= least + 500
            assert sys.getrecursionlimit() == limit
    finally:
        sys.setrecursionlimit(before)


DEEP = """
import torch
from torch import nn
import psg_fx

class Nested(nn.Module):
    def __init__(self, levels):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3)) if levels % 20 == 0 else None
        self.inner = Nested(levels - 1) if levels else nn.Identity()

    def forward(self, x):
        return self.inner(x if self.scale is None else torch.tanh(x * self.scale))

step = psg_fx.transform(Nested(240), lambda out: out.sum(), quantities=psg_fx.Norms(), backend="eager", progress=False)
print(step(torch.ones(2, 3)).norms.isfinite().all().item())
"""
"""Nested as deep as an ordinary run allows."""


def test_modules_that_are_nested_deeply_are_captured() -> None:
    """In a process of its own, since an error there ends it."""
    found = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True)
    assert found.stdout.strip() == "True", found.stderr
