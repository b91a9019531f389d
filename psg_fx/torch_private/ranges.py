"""Indices of which nothing is known: torch fails on some of them (2.11 to 2.13)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from psg_fx.torch_private.patching import wrapped_here


def unknown_ranges() -> contextlib.AbstractContextManager[None]:
    """While open, what this thread asks of the index of a loop whose range is not told is not known, and no error.

    Simplifying `Max(0, i - 1)`, what a padded convolution reads, torch asks whether i - 1 is negative, and leaves out
    the ranges of loops that it was given.
    """
    return wrapped_here(ShapeEnv, "_maybe_evaluate_static", _or_not_known)


def _or_not_known(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # whose cache torch clears
    def known(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except AssertionError as error:
            if "vr must not be None" not in str(error):
                raise
            return None

    return known
