"""What a CUDA device does in one call: kernels, and the time it spends in them. It does not depend on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a call: their seconds, and how many they are."""

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class DeviceWork:
    """seconds: the sum over all kernels, copies and fills of a call.  kernels: the longest first."""

    seconds: float
    kernels: tuple[Kernel, ...]

    @property
    def launches(self) -> float:
        return sum(kernel.calls for kernel in self.kernels)


def device_work(run: Callable[[], object], calls: int = 3) -> DeviceWork:
    """Means over some calls after one for warm-up, by torch's profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            spent[event.name].append(event.device_time / 1e6)
    found = [Kernel(name, sum(seconds) / calls, len(seconds) / calls) for name, seconds in spent.items()]
    found.sort(key=lambda kernel: -kernel.seconds)
    return DeviceWork(sum(kernel.seconds for kernel in found), tuple(found))
