"""Random generators that are left as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch


@contextlib.contextmanager
def generators_kept(*devices: torch.device) -> Iterator[None]:
    """What is drawn inside leaves torch's generators (of CPU and devices), Python's and numpy's as they were."""
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    on_cuda = {d for d in devices if d.type == "cuda" and torch.backends.cuda.is_built()}
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(on_cuda):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)


States = Mapping[torch.device, torch.Tensor]
"""Where torch's own generators are, by their devices."""


def states_of(*devices: torch.device) -> States:
    """Where the generators of the CPU and of these devices are."""
    found = {d: torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"}
    return {torch.device("cpu"): torch.get_rng_state()} | found


@contextlib.contextmanager
def drawn_again(states: States) -> Iterator[None]:
    """What is drawn inside is what was drawn from these states on; afterwards the generators are where they were.

    All threads share them: one that draws meanwhile is given numbers that are drawn once more.
    """
    later = states_of(*states)
    try:
        _set(states)
        yield
    finally:
        _set(later)


def _set(states: States) -> None:
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
