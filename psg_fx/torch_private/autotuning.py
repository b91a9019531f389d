"""How inductor chooses among the configurations of a kernel: by their times, and what it remembers of them.

Times that are taken while other processes compute on the device choose badly: with fifteen processes on an H100 one
reduction of a transformer took 28, 53 or 179 µs, whichever configuration had won.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from psg_fx.torch_private.patching import patched_here


@contextlib.contextmanager
def timed_alone(alone: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While open, this thread takes times of configurations inside `alone()`."""
    from torch._inductor.runtime import triton_heuristics  # slow to import

    tuner: Any = triton_heuristics.CachingAutotuner
    original = tuner.benchmark_all_configs

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        with alone():
            return original(self, *args, **kwargs)

    with patched_here(tuner, "benchmark_all_configs", benchmark_all_configs):
        yield


def forget_choices(folder: Path) -> None:
    """Remove what was chosen from inductor's cache in this folder; what is compiled stays."""
    for path in folder.rglob("*.best_config"):
        path.unlink(missing_ok=True)
