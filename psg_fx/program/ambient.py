"""The modes around a call: what a program's meaning depends on is part of its key, the rest does not reach it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from psg_fx.torch_private.modes import (
    autocast_dtype,
    default_device,
    no_cached_parametrizations,
    no_function_modes,
    no_functorch_levels,
    no_hooks_of_ours,
    no_modes,
    no_module_tracker,
    no_saved_tensor_hooks,
)

_CAPTURING = threading.RLock()
_HERE = threading.local()

F = TypeVar("F", bound=Callable[..., Any])


def not_taken_apart(function: F) -> F:
    """Run as it is where it is called inside of a function that `torch.compile` compiles."""
    outside = torch.compiler.disable(function, reason="a step is compiled by itself")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    return called  # type: ignore[return-value]


def ambient_key(device: str) -> Any:
    """What of the caller's modes a captured program depends on: autocast, and defaults for new tensors."""
    return (
        autocast_dtype(device), torch.get_default_dtype(), default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """One capture at a time, and none of the caller's modes in it but those of `ambient_key`.

    `inference_mode` and `no_grad` do not reach it, nor do modes of dispatch (`FakeTensorMode`), levels of
    `torch.func`, hooks on saved tensors, cached parametrizations, and anomaly detection, which torch has for the whole
    process.
    """
    device = torch.get_default_device()
    with (
        _CAPTURING, _in_this_thread(), no_functorch_levels(), no_function_modes(), no_modes(), no_module_tracker(),
        no_hooks_of_ours(), no_saved_tensor_hooks(), no_cached_parametrizations(), torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else contextlib.nullcontext(),
        device if device != torch.device("cpu") else contextlib.nullcontext(),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    before, _HERE.capturing = captures_here(), True
    try:
        yield
    finally:
        _HERE.capturing = before


def captures_here() -> bool:
    """Whether this thread captures a program, or runs passes."""
    return getattr(_HERE, "capturing", False)


def _in_a_forked_child() -> None:
    """A thread that captured is not there, and would hold the lock for ever."""
    global _CAPTURING
    if not captures_here():
        _CAPTURING = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)


@contextlib.contextmanager
def without_defaults() -> Iterator[None]:
    """For passes after capture, whose ops say what they make: no autocast, and no device for new tensors."""
    elsewhere = torch.get_default_device() != torch.device("cpu")
    with without_autocast(), torch.device("cpu") if elsewhere else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast: a captured graph has its casts written out."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
