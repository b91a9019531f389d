"""The table of the grammar's instructions, by name and by family."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Val, Writer

Op = Callable[[Writer, Val], Val]
OPS: dict[str, Op] = {}
FAMILIES: dict[str, list[str]] = {}


def op(family: str) -> Callable[[Op], Op]:
    """Register an instruction under its function's name."""

    def register(function: Op) -> Op:
        name = f"{family}.{function.__name__}"
        assert name not in OPS
        OPS[name] = function
        FAMILIES.setdefault(family, []).append(name)
        return function

    return register
