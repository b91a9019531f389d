"""What torch warns of in its own code while it compiles a step: nobody who reads it can do anything about it, and where
warnings are errors the step does not compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from psg_fx.torch_private.patching import wrapped_here


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """While open, this thread has inductor lower `diagonal` without the check that torch 2.13 calls deprecated, and ops
    on complex numbers without a word: torch runs them.
    """
    from torch._inductor import lowering  # slow to import, and only who compiles needs it

    with (
        wrapped_here(lowering, "check", _undeprecated),
        wrapped_here(lowering, "_warn_complex_not_supported", lambda remark: lambda: None),
    ):
        yield


def _undeprecated(check: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(check, "__wrapped__", check)
    return found
