"""Random generators that are left as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
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
