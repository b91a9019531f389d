"""Indices of which nothing is known: torch fails on some of them (2.11 to 2.13)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from psg_fx.torch_private.patching import patched_here, seen_here


@contextlib.contextmanager
def unknown_ranges() -> Iterator[None]:
    """While open, what this thread asks of the index of a loop whose range is not told is not known, and no error.

    Simplifying `Max(0, i - 1)`, what a padded convolution reads, torch asks whether i - 1 is negative, and leaves out
    the ranges of loops that it was given.
    """
    original: Any = seen_here(ShapeEnv, "_maybe_evaluate_static")

    @functools.wraps(original)  # whose cache torch clears
    def known(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except AssertionError as error:
            if "vr must not be None" not in str(error):
                raise
            return None

    with patched_here(ShapeEnv, "_maybe_evaluate_static", known):
        yield
