"""Random generators that are left as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves torch's generators (of CPU and device), Python's and numpy's as they were."""
    numpy: Any = sys.modules.get("numpy")
    devices = [device] if device.type == "cuda" and torch.backends.cuda.is_built() else []
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
