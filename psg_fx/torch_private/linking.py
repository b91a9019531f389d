"""An option by which a library of kernels is linked in a third of the time.

Kernels are linked with libtorch_cpu, and where GNU ld takes a single symbol from there, it reads all that this library
needs: 0.3 s instead of 0.1.  Kernels that check indices take what exceptions need from it, which is the C++ library's:
that comes first, therefore.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch._inductor import codecache

from psg_fx.torch_private.patching import wrapped_here

LINKED = ("-lstdc++",) if sys.platform == "linux" else ()
"""Behind the file that is compiled."""


@contextlib.contextmanager
def headers_of_all() -> Iterator[None]:
    """While open, this thread takes headers that were compiled without it, as all do: it is nothing to them."""

    def without(original: Callable[..., str]) -> Callable[..., str]:
        def precompile(header: str, command: str, **options: Any) -> str:
            return original(header, command.replace(" ".join(LINKED), ""), **options | {"extra_flags": ()})

        return precompile

    with wrapped_here(codecache, "_precompile_header", without):
        yield
