"""Measurements of steps: time, of several in interleaved rounds, and peak memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from psg_fx.blocks import blocks_used

Run = Callable[[], Any]


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Frees what torch's allocator holds without use: other processes may need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def median_seconds(run: Run, total: float) -> float:
    """The median time of one run, from about `total` seconds of them."""
    timer = _timer(run)
    with torch.no_grad():
        found: float = median(timer.blocked_autorange(min_run_time=total).times)
    return found


def _timer(run: Run) -> Any:
    from torch.utils.benchmark import Timer  # slow to import: it loads what builds C++ extensions, setuptools and all

    return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())


def time_rounds(
    steps: Mapping[str, Run], *, rounds: int, min_run_time: float, note: Callable[[str], None],
    failed: dict[str, Exception] | None = None,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds per step of every contender, several per round; in each round each contender has its turn.

    What slows the machine down for a while then slows all contenders down alike. Every contender runs for about
    `min_run_time` seconds in all, warm-up not counted. One that raises has no further turn, if `failed` is there to say
    why.
    """
    timers = {name: _timer(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for k in range(rounds):
        for name, timer in timers.items():
            if failed and name in failed:
                continue
            note(f"round {k + 1}/{rounds}: {name}")
            try:
                times[name] += timer.blocked_autorange(min_run_time=min_run_time / rounds).times
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = error
    return times


def spread(times: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range."""
    if len(times) < 2:
        return median(times), 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return median(times), high - low


def peak_memory(step: Run, device: torch.device) -> int:
    """Bytes that one step takes at the worst moment, above what was allocated before; the answer itself counts.

    On CUDA from the allocator's statistics; on the CPU the largest running sum of the allocations and frees that the
    profiler saw (scratch space inside libraries such as oneDNN is not seen), and all blocks of our own that were used.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        answer = step()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del answer
        return peak
    with blocks_used() as used:
        events = allocation_events(step)
    return peak_of_events(events) + sum(used.values())


def allocation_events(step: Run) -> list[int]:
    """Bytes of each allocation (positive) and free (negative) on the CPU during one step, in order."""
    kinds = [ProfilerActivity.CPU]
    with quiet_stderr(), profile(activities=kinds, profile_memory=True, acc_events=True) as recorded:
        answer = step()
    del answer
    results = recorded.profiler.kineto_results if recorded.profiler else None
    if results is None:
        raise RuntimeError("the profiler recorded nothing")
    events = [e for e in results.events() if e.name() == "[memory]"]
    return [int(e.nbytes()) for e in sorted(events, key=lambda e: e.start_ns())]


def peak_of_events(events: Sequence[int]) -> int:
    """The largest running sum."""
    running = peak = 0
    for size in events:
        running += size
        peak = max(peak, running)
    return peak


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Sends file descriptor 2 to nowhere: the profiler's native code prints a line at each start and stop."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
