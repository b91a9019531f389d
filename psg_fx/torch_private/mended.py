"""Inductor without what it writes wrong or fails at, for steps alone: `torch.compile` of others is not touched."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from psg_fx.torch_private import checked, overlapping, ranges, remarks, scattered, tiled


@contextlib.contextmanager
def inductor_mended() -> Iterator[None]:
    """While open, what this thread has inductor write is right.  It is kept in torch's caches apart from what other
    code compiles, and from what other editions of the mending did.
    """
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} psg_fx {_edition()}"
    with (
        config.patch(cache_key_tag=tag),
        scattered.scattered_in_place(),
        tiled.tiles_apart(),
        ranges.unknown_ranges(),
        remarks.without_remarks(),
        checked.checks_behind_regions(),
        overlapping.written_apart(),
    ):
        yield


@functools.cache
def _edition() -> str:
    """Of all that this folder makes of inductor."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
