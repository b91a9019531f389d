"""A stand-in for a CUDA device: what is asked of one runs on the CPU, or on no data at all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

NAME = "NVIDIA Stand-in"


class _There(TorchFunctionMode):
    """Functions that name the device get another."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def there(value: Any) -> Any:
            is_cuda = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return self.device if is_cuda and func is not torch.device else value

        return func(*map(there, args), **{name: there(value) for name, value in (kwargs or {}).items()})


class _Event:
    """A millisecond lies between any two."""

    def __init__(self, **_: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: object) -> float:
        return 1.0


class _Stream:
    def wait_stream(self, _: object) -> None: ...


class _Graph:
    """Replays nothing, and counts how often."""

    replays = 0

    def replay(self) -> None:
        _Graph.replays += 1


@contextlib.contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, device: str) -> Any:
    """While open, "cuda" is `device`: "cpu", or "meta" to run every line without its work."""
    for name, value in {
        "is_available": lambda: True, "get_device_name": lambda *_: NAME, "get_device_properties": lambda *_: None,
        "synchronize": lambda *_: None, "empty_cache": lambda: None, "memory_allocated": lambda *_: 100,
        "max_memory_allocated": lambda *_: 300, "reset_peak_memory_stats": lambda *_: None, "Event": _Event,
        "Stream": _Stream, "current_stream": lambda *_: _Stream(), "CUDAGraph": _Graph,
        "stream": lambda _: contextlib.nullcontext(), "graph": lambda _: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    with _There(device):
        yield
