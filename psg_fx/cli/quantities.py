"""Quantities as they are written on the command line: `norms`, `clipped_sum(max_norm=0.5, per="parameter")`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from psg_fx.benchmarking.problem import Problem
from psg_fx.cli.usage import UsageError
from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.names import KINDS, USUAL

MADE_UP = {
    "weights": "weights: 1 for every sample",
    "directions": "directions: random normal numbers, seed 0",
}
"""What is said of values that a step reads at the call, and that are made up here."""


def parsed(texts: Sequence[str] | None) -> dict[str, Quantity]:
    """The quantities by how they were written, the usual three if none was; nothing of a text is executed."""
    return dict(USUAL) if texts is None else {text.strip(): quantity(text) for text in texts}


def quantity(text: str) -> Quantity:
    """One quantity; `clipped_sum` without arguments has a bound of 1."""
    name, arguments = _call(text)
    if name not in KINDS:
        raise UsageError(f"--quantity {text}: there is no quantity {name!r}; there are {', '.join(KINDS)}")
    if not arguments and name in USUAL:
        return USUAL[name]
    kind = KINDS[name]
    known = [f.name for f in fields(kind)]
    if unknown := [key for key in arguments if key not in known]:
        has = f"it has {', '.join(known)}" if known else "it takes none"
        raise UsageError(f"--quantity {text}: {name} has no argument {unknown[0]!r}; {has}")
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in arguments]:
        raise UsageError(f"--quantity {text}: {name} needs {missing[0]}")
    try:
        return kind(**arguments)
    except BadArgument as error:
        raise UsageError(f"--quantity {text}: {error.what}: {error.why}") from error


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the keyword arguments, which must be literals."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        example = "norms or 'clipped_sum(max_norm=0.5, per=\"parameter\")'"
        raise UsageError(f"--quantity {text}: not a name with keyword arguments, such as {example}") from error


def given(quantities: Sequence[Quantity], problem: Problem) -> tuple[dict[str, Any], list[str]]:
    """Made-up values for what the quantities read at the call, and what to say of them."""
    found: dict[str, Any] = {}
    for asked in quantities:
        found |= problem.given(asked)
    return found, [MADE_UP[name] for name in found]
