"""The sites and the plan in 120 columns: parameters of layers that are alike share a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from tabulate import tabulate

from psg_fx.algebra.site import Site
from psg_fx.explain.tables import (
    SITE_HEADERS,
    count_text,
    instead,
    methods,
    parameter_shape,
    shape_text,
    source_of,
    time_text,
    uses,
)
from psg_fx.planner.expr import peak_bytes
from psg_fx.planner.plan import ParameterPlan, Part, Plan

WIDTH = 120
PLAN_COLUMNS = ("parameter", "shape", "asked", "tree", "method", "peak", "time")
_LEAST = 8
"""Characters that a column keeps."""

T = TypeVar("T")
Row = list[str]


def sites_table(sites: Sequence[Site], plan: Plan) -> str:
    """Where parameters meet data; sites that are alike in a row."""
    return table(site_rows(sites, plan), SITE_HEADERS, shrinking=(5, 2, 0))


def site_rows(sites: Sequence[Site], plan: Plan) -> list[Row]:
    """A row for all sites that are alike."""
    used = uses(plan)
    return [_site_row(group, used) for group in _alike(sites, lambda site: _site_key(site, used))]


def _site_key(site: Site, used: Mapping[str, Sequence[str]]) -> Hashable:
    out, names = site.output, tuple(map(_pattern, used.get(site.name, ())))
    return site.op, names, out.shape, str(out.samples), _pattern(source_of(site))


def _site_row(group: Sequence[Site], used: Mapping[str, Sequence[str]]) -> Row:
    site, out = group[0], group[0].output
    named = [_together(names) for names in zip(*(used.get(s.name, ()) for s in group), strict=True)]
    return [
        site.name if len(group) == 1 else f"{site.name}, … ({len(group)}×)", site.op,
        ", ".join(_short(named)) or "none reaches the loss", shape_text(out.shape, site.batch), str(out.samples),
        _together([source_of(s) for s in group]),
    ]  # fmt: skip


def plan_table(plan: Plan, times: Mapping[tuple[str, int], float]) -> str:
    """What is computed of each parameter's gradient, how, and which other way was closest; times: measured."""
    rows = [row for _, group in plan_groups(plan, times) for row in group]
    return table(rows, PLAN_COLUMNS, shrinking=(3, 0, 4, 2))


def plan_groups(plan: Plan, times: Mapping[tuple[str, int], float]) -> list[tuple[float, list[Row]]]:
    """The rows of the plan, together for parameters that are alike, with the predicted seconds of these."""
    alike = _alike(plan.parameters, lambda parameter: _plan_key(plan, parameter, times))
    return [(sum(p.seconds for p in group), list(_plan_rows(plan, group, times))) for group in alike]


def _plan_key(plan: Plan, parameter: ParameterPlan, times: Mapping[tuple[str, int], float]) -> Hashable:
    name = parameter.gradient.name
    parts = tuple(
        (part.ask, str(part.tree), methods(part.tree), time_text(part.seconds), tuple(_instead(plan, part)))
        for part in parameter.parts
    )
    return _pattern(name), parameter.gradient.shape, parameter.why, parts, name if times else ""


def _plan_rows(plan: Plan, group: Sequence[ParameterPlan], times: Mapping[tuple[str, int], float]) -> Iterable[Row]:
    parameter = group[0]
    first = [_together([p.gradient.name for p in group]), parameter_shape(parameter.gradient)]
    many = f"{len(group)}× " if len(group) > 1 else ""
    if not parameter.parts:
        yield [*first, parameter.why, "0", "", "", ""]
    for index, part in enumerate(parameter.parts):
        seconds = times.get((parameter.gradient.name, index))
        told = f"{many}{time_text(part.seconds)}" + (f", measured {time_text(seconds)}" if seconds is not None else "")
        yield [*first, str(part.ask), str(part.tree), methods(part.tree), f"{count_text(peak_bytes(part.tree))}B", told]
        first = ["", ""]
        if not parameter.total or part.contraction.terms == ():
            if other := _instead(plan, part):
                yield ["", "", "  instead", *other]
        elif index == 0 and parameter.why:
            yield ["", "", f"  {parameter.why}", "", "", "", ""]


def _instead(plan: Plan, part: Part) -> Row:
    """The best tree of another shape, what it would cost, and for which size it would be the faster one."""
    tree, method, time = instead(plan, part)
    return [tree, method, "", time] if tree else []


def _alike(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _together(names: Sequence[str]) -> str:
    """`h.0…11.fc.weight` for names that differ in their numbers alone."""
    pieces = [re.split(r"(\d+)", name) for name in names]
    return "".join(_numbers(column) for column in zip(*pieces, strict=True))


def _numbers(column: Sequence[str]) -> str:
    found = list(dict.fromkeys(column))
    if len(found) == 1:
        return found[0]
    values = sorted(map(int, found))
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}…{values[-1]}"
    return "{" + ",".join(map(str, values)) + "}"


def _short(names: Sequence[str]) -> list[str]:
    """Names after the first without the module that they share with it."""
    if not names:
        return []
    module = names[0].rpartition(".")[0]
    return [names[0], *(n[len(module) :] if module and n.startswith(f"{module}.") else n for n in names[1:])]


def joined(rows: Iterable[Sequence[str]]) -> list[Row]:
    """The rows, those together that differ in the numbers of their first cell alone."""
    alike = _alike(rows, lambda row: (_pattern(row[0]), *row[1:]))
    return [[_together([row[0] for row in group]), *group[0][1:]] for group in alike]


def table(rows: list[Row], headers: Sequence[str], shrinking: Sequence[int]) -> str:
    """The table, cells of some columns cut so that it fits; which columns: those that are cut first come first."""
    # tabulate keeps two characters more than a header has.
    widths = [max([len(h) + 2, *(len(row[i]) for row in rows)]) for i, h in enumerate(headers)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    for _ in range(max(over, 0)):
        column = max(shrinking, key=lambda i: (widths[i] > _LEAST, widths[i], -shrinking.index(i)))
        widths[column] -= 1
    cut = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return tabulate(cut, headers, tablefmt="simple", disable_numparse=True)


def _cut(cell: str, width: int) -> str:
    """The cell in so many characters, without some in its middle."""
    if len(cell) <= width:
        return cell
    kept = width - 1
    return cell[: kept - kept // 2] + "…" + cell[len(cell) - kept // 2 :]
