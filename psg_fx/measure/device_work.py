"""What a CUDA device does in one call: its kernels, the time it spends in them, which does not depend on the host, and
where it has nothing to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a call: their seconds, and how many they are."""

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Pause:
    """Seconds of a call in which nothing runs between two kernels, copies or fills of these names."""

    before: str
    after: str
    seconds: float


@dataclass(frozen=True)
class DeviceWork:
    """seconds: the sum over all kernels, copies and fills of a call.  kernels: the longest first.  pauses: likewise,
    those from call to call with them.
    """

    seconds: float
    kernels: tuple[Kernel, ...]
    pauses: tuple[Pause, ...] = ()

    @property
    def launches(self) -> float:
        return sum(kernel.calls for kernel in self.kernels)

    @property
    def idle(self) -> float:
        """Seconds of a call in which nothing runs."""
        return sum(pause.seconds for pause in self.pauses)


def device_work(run: Callable[[], object], calls: int = 3) -> DeviceWork:
    """Means over some calls after one for warm-up, one after the other, by torch's profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    for event in events:
        spent[event.name].append(event.device_time / 1e6)
    found = [Kernel(name, sum(seconds) / calls, len(seconds) / calls) for name, seconds in spent.items()]
    found.sort(key=lambda kernel: -kernel.seconds)
    return DeviceWork(sum(kernel.seconds for kernel in found), tuple(found), _pauses(events, calls))


def _pauses(events: Sequence[Any], calls: int) -> tuple[Pause, ...]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    ordered = sorted(events, key=lambda event: event.time_range.start)
    last: Any = ordered[0] if ordered else None
    for event in ordered[1:]:
        if (idle := event.time_range.start - last.time_range.end) > 0:
            found[last.name, event.name] += idle / 1e6 / calls
        last = max(last, event, key=lambda event: event.time_range.end)
    return tuple(sorted((Pause(*names, idle) for names, idle in found.items()), key=lambda pause: -pause.seconds))
