"""Inductor's loops in C++ check indices, and a check that fails throws: in a parallel region that ends the process.

So there the rest of the iteration is left out, and so are those after it in the same region: what they would read may
not be written.  What the first check has thrown is thrown again behind the region.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from psg_fx.torch_private.patching import wrapped_here

_CHECK = re.compile(r"\bTORCH_CHECK\(|\bAOTI_TORCH_CHECK\(")
_SHARED = re.compile(r"#pragma omp (?:(single)\b|for\b(?:.*\bcollapse\((\d+)\))?)")
"""What a thread's share begins with: one of iterations, of so many loops, or of a block."""

_REMEMBERED = ["std::exception_ptr psg_fx_thrown;", "std::atomic<bool> psg_fx_has_thrown{false};"]
_TRY = "if (!psg_fx_has_thrown.load(std::memory_order_relaxed)) try"
_CATCH = "catch (...) { if (!psg_fx_has_thrown.exchange(true)) psg_fx_thrown = std::current_exception(); }"
_THROW = "if (psg_fx_thrown) std::rethrow_exception(psg_fx_thrown);"


@contextlib.contextmanager
def checks_behind_regions() -> Iterator[None]:
    """While open, checks in parallel loops that this thread has inductor write throw behind these loops."""
    from torch._inductor.codegen import cpp  # slow to import, and only who compiles needs it

    with wrapped_here(getattr(cpp, "KernelGroup", None), "codegen_group", _written):
        yield


def _written(original: Callable[..., str]) -> Callable[..., str]:
    def codegen_group(self: Any, *args: Any, **kwargs: Any) -> str:
        return thrown_behind(original(self, *args, **kwargs))

    return codegen_group


def thrown_behind(code: str) -> str:
    """The code of kernels, each parallel region with checks in a block that throws what these have thrown."""
    if "#pragma omp parallel" not in code or not _CHECK.search(code):
        return code
    lines, found, place = code.split("\n"), list[str](), 0
    while place < len(lines):
        if not lines[place].lstrip().startswith("#pragma omp parallel"):
            found.append(lines[place])
            place += 1
            continue
        end = _end(lines, place)
        found += _region(lines[place:end])
        place = end
    return "\n".join(found)


def _region(lines: Sequence[str]) -> list[str]:
    """A parallel region in which nothing is thrown out of a thread's share, if it has checks."""
    if not any(_CHECK.search(line) for line in lines):
        return list(lines)
    found, place = list[str](), 0
    while place < len(lines):
        shared = _SHARED.search(lines[place])
        if shared is None:
            found.append(lines[place])
            place += 1
            continue
        begin = _body(lines, place, 0 if shared[1] else int(shared[2] or 1))
        end = _end(lines, begin)
        found += [*lines[place:begin], _TRY, *lines[begin:end], _CATCH]
        place = end
    return ["{", *_REMEMBERED, *found, _THROW, "}"]


def _body(lines: Sequence[str], place: int, loops: int) -> int:
    """Where the body of so many loops begins, one inside of the other."""
    while loops or lines[place].strip() != "{":
        loops -= lines[place].lstrip().startswith("for(")
        place += 1
    return place


def _end(lines: Sequence[str], begin: int) -> int:
    """The line behind the first block from there on."""
    depth = 0
    for place in range(begin, len(lines)):
        depth += lines[place].count("{") - lines[place].count("}")
        if depth == 0 and "}" in lines[place]:
            return place + 1
    return len(lines)
