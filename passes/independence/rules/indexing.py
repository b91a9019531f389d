"""Ops that pick or write rows by number: index, gather, scatter.  The numbers must pick within a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.order import is_reshaped, is_same

from ..arguments import bound, op_name
from ..bounds import bounds
from ..refused import NUMBERS, NUMBERS_FIX
from ..table import Placement, sample_rule
from ..values import Argument, Op, Result, broadcast

_AS_IT_IS = ("aten.expand", "aten.slice")
_PICK = "pick by x[torch.arange(B), ids], or gather along another dim"


def _indices(op: Op) -> list[Argument | None]:
    given = list(op.raw("indices", []))
    return [op.see(n) if n is not None else None for n in given]


def _is_mask(value: Argument) -> bool:
    return bool(value.node.meta["val"].dtype in (torch.bool, torch.uint8))


@sample_rule("index", "_unsafe_index", proof="indexing", index=True)
def index(op: Op) -> Placement:
    """y[.., n.., ..] = x[.., i_1[n..], i_2[n..], ..]; n.. stands for the indexed dims, or first if they are apart."""
    x, picks = op.need("self"), _indices(op)
    used = [d for d, p in enumerate(picks) if p is not None]
    chosen = [p for p in picks if p is not None]
    if any(_is_mask(p) for p in chosen):
        raise op.unsupported(
            "a mask picks a number of rows that depends on the data, so the samples have no fixed place",
            "use torch.where or multiply by the mask",
        )
    rows = max(p.ndim for p in chosen)
    picked = _picked(op, x, picks, rows)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    if picked is not None:
        return Result(sample_axis.moved(picked, first + picked.dim), index=x.found.index)
    if x.axis is None:
        return None
    before = sum(1 for d in range(x.axis.dim) if d not in used)
    place = before + (rows if before >= first else 0)
    return Result(sample_axis.moved(x.axis, place), x.found.uniform, x.found.index)


def _picked(op: Op, x: Argument, picks: Sequence[Argument | None], rows: int) -> SampleAxis | None:
    """The axis of the broadcast indices; None where the samples lie in a dim of x that is not indexed."""
    at_samples = picks[x.axis.dim] if x.axis is not None and x.axis.dim < len(picks) else None
    if x.axis is not None and at_samples is not None and _is_every_row(x.axis, at_samples):
        rest = [p for p in picks if p is not None and p is not at_samples]
        return _beside_every_row(op, at_samples, x.axis, rest, rows)
    chosen = [p for p in picks if p is not None]
    found = broadcast(op, chosen, rows)
    numbers = [p for p in chosen if p.found.index]
    if x.axis is not None and at_samples is not None:
        require_own_rows(op, x, at_samples)
        if len(numbers) > 1:
            raise op.refuse(f"its indices pick among the samples in dim {x.axis.dim} of %{x.node.name}", _PICK)
        return found.axes if isinstance(found.axes, SampleAxis) else None
    if numbers:
        raise op.refuse("it uses the number of the sample to look up a value that all samples share", _PICK)
    if x.axis is not None and isinstance(found.axes, SampleAxis):
        raise op.refuse(
            f"each sample's indices pick from every sample of %{x.node.name}: dim {x.axis.dim} is not indexed",
            _PICK,
        )
    return found.axes if isinstance(found.axes, SampleAxis) else None


def _is_every_row(axis: SampleAxis, picks: Argument) -> bool:
    """Whether it is `arange`, as long as the dim of the samples and with nothing computed: row p picks row p, in
    whatever order the samples lie.
    """
    node: Any = picks.node
    while isinstance(node, Node) and (is_same(node) or is_reshaped(node) or op_name(node) in _AS_IT_IS):
        if op_name(node) == "aten.slice" and node.meta["val"].shape != node.args[0].meta["val"].shape:  # type: ignore[union-attr]
            break
        node = node.args[0]
    if not isinstance(node, Node) or op_name(node) != "aten.arange" or bound(node).get("step", 1) != 1:
        return False
    a, size = picks.axis, axis.outer * axis.inner
    return a is not None and (a.outer, a.inner) == (1, size) and picks.found.index == size


def _beside_every_row(
    op: Op, every: Argument, axis: SampleAxis, rest: Sequence[Argument], rows: int
) -> SampleAxis | None:  # fmt: skip
    """The axis of the broadcast indices, of which one picks every row of x."""
    assert every.axis is not None
    if any(p.found.index for p in rest):
        raise op.refuse(NUMBERS, NUMBERS_FIX)
    there = replace(every, found=Result(SampleAxis(every.axis.dim, axis.outer, axis.inner)))
    found = broadcast(op, [there, *rest], rows)
    return found.axes if isinstance(found.axes, SampleAxis) else None


def require_own_rows(op: Op, x: Argument, picks: Argument) -> None:
    """Along the sample dim of x, i·T + c picks row c of sample i if each has T rows and 0 <= c < T."""
    assert x.axis is not None
    if not picks.found.index:
        raise op.refuse(f"its indices pick among the samples in dim {x.axis.dim} of %{x.node.name}", _PICK)
    rows, (low, high) = x.axis.inner, bounds(picks.node)
    if x.axis.outer != 1 or picks.found.index != rows:
        raise op.refuse(f"%{picks.node.name} does not number the rows of %{x.node.name}, which has {rows} a sample "
                        f"in dim {x.axis.dim}", _PICK)  # fmt: skip
    if low < 0 or high >= rows:
        raise op.refuse(
            f"in %{picks.node.name}, i·{rows} + c for sample i, c may lie outside of 0..{rows - 1}: then it picks from "
            "another sample",
            f"pick within the sample: x.view(-1, {rows}, ..)[torch.arange(B), c], or say so by c.clamp(0, {rows - 1})",
        )


def _at_own_rows(op: Op, x: Argument, ids: Argument, source: Argument | None, dim: int) -> bool:
    """Whether an op picks or writes rows of the samples, along their dim, that are numbered i·T + c for sample i: what
    is written must lie beside its number.  All other numbers are refused.
    """
    if x.found.index or (source is not None and source.found.index):
        raise op.refuse(NUMBERS, NUMBERS_FIX)
    if not ids.found.index:
        return False
    if x.axis is None or x.axis.dim != dim or ids.axis is None:
        raise op.refuse(NUMBERS, NUMBERS_FIX)
    require_own_rows(op, x, ids)
    along = 0 if ids.ndim == 1 else dim
    beside = source is None or not source.ndim or (source.axis is not None and source.axis.dim == dim and (
        source.found.uniform or (source.axis.outer, source.axis.inner) == (ids.axis.outer, ids.axis.inner)
    ))  # fmt: skip
    if ids.axis.dim != along or not beside:
        raise op.refuse("what it writes does not hold the samples as the numbers of its rows do", _PICK)
    return True


@sample_rule("index_put", "_unsafe_index_put", "_index_put_impl", proof="indexing", index=True)
def index_put(op: Op) -> Placement:
    """Y = x with x[i_1[n..], ..] = (or +=) values."""
    x, picks, values = op.need("self"), _indices(op), op.need("values")
    if x.found.index or values.found.index:
        raise op.refuse("it writes the numbers of the samples, which one sample alone lacks", _PICK)
    chosen = [p for p in picks if p is not None]
    if any(_is_mask(p) for p in chosen):
        return _masked_put(op, x, picks, values)
    rows = max(p.ndim for p in chosen)
    if x.axis is None:
        if any(v.axis is not None for v in (*chosen, values)):
            raise op.refuse(f"it writes the rows of all samples into %{x.node.name}, which all samples share",
                            "give every sample its own rows: start from zeros of shape [B, ...]")  # fmt: skip
        return None
    picked = _picked(op, x, picks, rows)
    used = [d for d, p in enumerate(picks) if p is not None]
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    width = rows + x.ndim - len(used)
    before = sum(1 for d in range(x.axis.dim) if d not in used)
    place = first + picked.dim if picked is not None else before + (rows if before >= first else 0)
    order = picked or x.axis  # row p of the values goes where the picks have row p
    if values.axis is not None and (
        values.axis.dim + width - values.ndim != place
        or (not values.found.uniform and (values.axis.outer, values.axis.inner) != (order.outer, order.inner))
    ):
        raise op.refuse(f"%{values.node.name} does not hold the samples where they are written")
    return x.axis


def _masked_put(op: Op, x: Argument, picks: Sequence[Argument | None], values: Argument) -> Placement:
    """x[mask] = values, where the values do not count the rows the mask picks: the same as `where`."""
    mask = picks[0]
    if len(picks) != 1 or mask is None or values.axis is not None or values.ndim > x.ndim - mask.ndim:
        raise op.unsupported("a mask picks a number of rows that depends on the data", "use torch.where")
    if mask.axis is not None and mask.axis != x.axis:
        raise op.refuse(f"the mask does not hold the samples where %{x.node.name} does")
    if mask.axis is None and x.axis is not None and x.axis.dim < mask.ndim:
        raise op.refuse("the mask picks among the samples")
    return x.axis


@sample_rule("psg_fx::some_row", proof="stands where nothing counts")
def some_row(op: Op) -> Result:
    """A row of any sample, for places of which nothing is read (`psg_fx/ops/some_row.py`)."""
    return Result(uniform=True)


@sample_rule("index_select", proof="indexing", index=True)
def index_select(op: Op) -> Placement:
    """y[.., j, ..] = x[.., ids[j], ..]."""
    x, ids = op.need("self"), op.need("index")
    dim = op.dim("dim", x.ndim)
    if x.axis is not None and x.axis.dim == dim and _is_every_row(x.axis, ids):
        return Result(x.axis, index=x.found.index)
    if x.axis is not None and ids.found.index and x.axis.dim == dim:
        require_own_rows(op, x, ids)
        assert ids.axis is not None
        return Result(SampleAxis(dim, ids.axis.outer, ids.axis.inner), index=x.found.index)
    if x.found.index or ids.found.index:
        raise op.refuse(NUMBERS, NUMBERS_FIX)
    if x.axis is None:
        return None if ids.axis is None else SampleAxis(dim, ids.axis.outer, ids.axis.inner)
    if ids.axis is not None or x.axis.dim == dim:
        raise op.refuse(f"its indices pick among the samples in dim {x.axis.dim} of %{x.node.name}", _PICK)
    return x.axis


@sample_rule("gather", "take_along_dim", proof="indexing", index=True)
def gather(op: Op) -> Placement:
    """y[i.., j, k..] = x[i.., ids[i.., j, k..], k..] along dim."""
    x = op.need("self")
    ids = op.value("index") or op.need("indices")
    if op.args.get("dim") is None:
        raise op.unsupported("without dim it flattens its input", "give dim")
    dim = op.dim("dim", x.ndim)
    if _at_own_rows(op, x, ids, None, dim):
        return ids.axis
    if x.axis is None:
        if ids.axis is not None and ids.axis.dim != dim:
            raise op.refuse(f"sample i looks up row i of %{x.node.name}, which all samples share",
                            "expand the table to the batch first")  # fmt: skip
        return ids.axis
    if x.axis.dim == dim:
        raise op.refuse(f"its indices pick among the samples in dim {dim} of %{x.node.name}", _PICK)
    if ids.axis is None:
        raise op.refuse(f"%{ids.node.name} picks from the first samples only", "expand the indices to the batch first")
    found = broadcast(op, [x, ids], x.ndim).axes
    return found if isinstance(found, SampleAxis) else None


@sample_rule("scatter", "scatter_add", "scatter_reduce", proof="indexing", index=True)
def scatter(op: Op) -> Placement:
    """Y = x with y[i.., ids[i.., j, k..], k..] = (or +=) src[i.., j, k..] along dim."""
    x, ids, source = op.need("self"), op.need("index"), op.value("src")
    dim = op.dim("dim", x.ndim)
    if _at_own_rows(op, x, ids, source, dim):
        return x.axis
    if x.axis is None:
        if any(v.axis is not None for v in op.values()):
            raise op.refuse(f"it writes the rows of all samples into %{x.node.name}, which all samples share",
                            "give every sample its own rows: start from zeros of shape [B, ...]")  # fmt: skip
        return None
    if x.axis.dim == dim:
        raise op.refuse(f"its indices write among the samples in dim {dim} of %{x.node.name}")
    if ids.axis is None or (source is not None and source.axis is None):
        raise op.refuse("it writes to the first samples only", "expand indices and source to the batch first")
    values = [x, ids] + ([source] if source is not None else [])
    found = broadcast(op, values, x.ndim).axes
    return found if isinstance(found, SampleAxis) else None


@sample_rule("index_add", "index_copy", "index_fill", "index_reduce", proof="indexing", index=True)
def index_write(op: Op) -> Placement:
    """Y = x with y[.., ids[j], ..] = (or +=) source[.., j, ..]."""
    x, ids, source = op.need("self"), op.need("index"), op.value("source")
    if _at_own_rows(op, x, ids, source, op.dim("dim", x.ndim)):
        return x.axis
    if x.axis is None and not op.sampled():
        return None
    if x.axis is None or x.axis.dim == op.dim("dim", x.ndim) or ids.axis is not None:
        raise op.refuse("its indices write among the samples",
                        "give every sample its own rows: scatter along another dim")  # fmt: skip
    if source is not None and source.axis is not None and source.axis != x.axis:
        raise op.refuse(f"%{source.node.name} does not hold the samples where %{x.node.name} does")
    return x.axis


@sample_rule("take", proof="indexing")
def take(op: Op) -> Placement:
    """y[..] = x.flatten()[ids[..]]."""
    x, ids = op.need("self"), op.need("index")
    if x.axis is not None:
        raise op.refuse("it counts places through the rows of all samples", _PICK)
    return ids.axis


@sample_rule("masked_scatter", "put", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "isin",
      "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "segment_reduce", proof="indexing")  # fmt: skip
def flat_places(op: Op) -> Placement:
    """Places are counted through all samples."""
    if op.name == "aten.isin":
        elements, tests = op.value("elements"), op.value("test_elements")
        if tests is None or tests.axis is None:
            return elements.axis if elements is not None else None
    if op.name == "aten.masked_scatter" and op.need("mask").axis is None:
        raise op.unsupported("it counts places through all samples: each has its own if it fills as many as it has",
                             "write to places that are numbers: out[:, rows, columns] = source")  # fmt: skip
    raise op.refuse("it counts places through the rows of all samples", _PICK)
