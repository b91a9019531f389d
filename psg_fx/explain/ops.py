"""The table of ops for people: what is known of an op, where it is written, and what happens where nothing is said."""

from __future__ import annotations

import enum
import inspect
import os
from dataclasses import Field, asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from tabulate import tabulate
from torch._ops import OpOverload

import psg_fx.ops.across
import psg_fx.passes.pipeline  # noqa: F401  (fills the table)
from psg_fx import op_table
from psg_fx.errors import BadArgument
from psg_fx.op_table import POINTWISE, GradientRule, SampleRule, printed
from psg_fx.torch_private.ops import python_decomposition

_TOPS = tuple(os.path.dirname(os.path.dirname(os.path.abspath(m.__file__))) for m in (torch, op_table) if m.__file__)
"""The folders that paths are given from; torch may lie inside of the checkout."""


@dataclass(frozen=True)
class Cell:
    """op: the printed key.  what: the title of the column.  text: what is said.  where: `file:line` of the function, or
    what filled a cell without one.  formula: the first line of the function's docstring.
    """

    op: str
    what: str
    text: str
    where: str
    formula: str = ""


def cells_of(name: str | None = None) -> list[Cell]:
    """What is known of an op (`linear`, `aten.linear.default`, `mylib::myop`, `ctc_loss`), or of all."""
    keys = list(op_table.rows()) if name is None else _keys(name)
    return [
        _cell(key, column, said)
        for key in sorted(keys, key=printed)
        for column in op_table.COLUMNS
        if (said := getattr(op_table.row(key), column.name))
    ]


def known_of(name: str) -> str:
    """All that is known of an op, and what happens where nothing is said of it."""
    found, ops = cells_of(name), _overloads(name)
    if not found and not ops:
        names = {printed(key).removeprefix("aten.") for key in op_table.rows()}
        close = get_close_matches(_plain(name).removeprefix("aten."), names, n=3)
        raise BadArgument(
            f"there is no op {name!r}", where="psg-fx ops", why="neither the table nor torch has it",
            fix=f"did you mean {', '.join(close)}?" if close else "give its name as in a graph: aten.linear.default",
        )  # fmt: skip
    lines = []
    for op in dict.fromkeys(cell.op for cell in found):
        is_class = op == POINTWISE and ops
        lines.append(f"{_plain(name)} is one of {op}; where it has no cell of its own:" if is_class else op)
        for cell in (e for e in found if e.op == op):
            lines.append(f"  {cell.what}: {cell.text}    {cell.where}".rstrip())
            lines += [f"      {cell.formula}"] if cell.formula else []
    said = {cell.what for cell in found}
    cells = [
        [f"  {column.metadata['title']}", _without(column, ops), column.metadata["by"]]
        for column in op_table.COLUMNS
        if column.metadata["title"] not in said and _applies(column.name, ops)
    ]
    return "\n".join([*lines, "not said", tabulate(cells, tablefmt="plain", preserve_whitespace=True)])


def table() -> str:
    """One line for each cell."""
    found = cells_of()
    ops = len({cell.op for cell in found})
    cells = [[cell.op, cell.what, cell.text, cell.where] for cell in found]
    return f"{tabulate(cells, ['op', 'what', 'said', 'where'], tablefmt='simple')}\n{len(found)} cells, of {ops} ops"


def as_data(name: str | None = None) -> list[dict[str, Any]]:
    """The cells as plain data."""
    return [asdict(cell) for cell in cells_of(name)]


def _cell(key: Any, column: Field[Any], said: Any) -> Cell:
    what, by = column.metadata["title"], column.metadata["by"]
    if isinstance(said, GradientRule):
        places = [f"{parameter} (argument {place})" for parameter, place in (said.params or {}).items()]
        return _of_function(key, what, said.function, f", for {', '.join(places)}" if places else "")
    if isinstance(said, SampleRule):
        flags = "".join(f", {f.name}" for f in fields(said) if getattr(said, f.name) is True)
        return _of_function(key, what, said.apply, f", proof: {said.proof}{flags}")
    if isinstance(said, enum.Enum):
        return Cell(printed(key), what, str(said.value), by)
    return Cell(printed(key), what, "yes", by) if said is True else _of_function(key, what, said, "")


def _of_function(key: Any, what: str, function: Any, more: str) -> Cell:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return Cell(printed(key), what, f"{function}{more}", "torch")
    where = f"{_relative(code.co_filename)}:{code.co_firstlineno}"
    lines = (inspect.getdoc(function) or "").splitlines()
    return Cell(printed(key), what, f"{function.__qualname__}{more}", where, lines[0] if lines else "")


def _relative(file: str) -> str:
    """A path from the folder that it was installed in, or from the checkout."""
    top = next((top for top in _TOPS if file.startswith(top + os.sep)), None)
    return file if top is None else os.path.relpath(file, top)


def _plain(name: str) -> str:
    """A name as the table prints it: `aten.linear`, `mylib.myop`, `<pointwise>`."""
    return name.removeprefix("torch.ops.").replace("::", ".")


def _keys(name: str) -> list[Any]:
    """The rows that a name means: an op with all its overloads, or one overload and what is said of all."""
    wanted = {_plain(name), f"aten.{_plain(name)}"}
    found = []
    for key in op_table.rows():
        full = printed(key)
        own = full in wanted or any(full.startswith(f"{word}.") for word in wanted)
        if own or any(word.startswith(f"{full}.") for word in wanted) or getattr(key, "__name__", None) == name:
            found.append(key)
    of_class = any(torch.Tag.pointwise in op.tags for op in _overloads(name))
    return found + [POINTWISE] * (of_class and POINTWISE not in found)


def _overloads(name: str) -> list[OpOverload]:
    """The overloads in torch that a name means."""
    library, *rest = _plain(name).split(".")
    for words in ((library, *rest), ("aten", library, *rest)):
        packet = getattr(getattr(torch.ops, words[0], None), words[1], None) if len(words) > 1 else None
        if isinstance(packet, torch._ops.OpOverloadPacket):
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            return [op for op in overloads if len(words) < 3 or (op._schema.overload_name or "default") == words[2]]
    return []


def _applies(column: str, ops: list[OpOverload]) -> bool:
    """Whether it can be said of ops (or, without ops, of a function), and of these."""
    if not ops or column == "at_capture":
        return not ops and column == "at_capture"
    return column != "trusted" or ops[0].namespace not in ("aten", "prims")


def _without(column: Field[Any], ops: list[OpOverload]) -> str:
    """What happens where nothing is said."""
    if column.name != "samples" or not ops:
        return str(column.metadata["without"])
    if any(map(python_decomposition, ops)):
        return "written out in the ops that it is composed of: they need one"
    trust = "" if ops[0].namespace == "aten" else ", unless the user trusts it"
    return f"refused where samples reach it{trust}"


__all__ = ["Cell", "as_data", "cells_of", "known_of", "table"]
