"""The state of the generators of random numbers, which all threads share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from psg_fx.torch_private.patching import patched_here


@contextlib.contextmanager
def never_rewound() -> Iterator[None]:
    """While open, this thread sets no generator back: torch does, when it has compiled, to where it was before, and
    what other threads have drawn meanwhile they would draw once more.
    """

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    with patched_here(torch.random, "set_rng_state", nothing), patched_here(torch.cuda, "set_rng_state", nothing):
        yield
