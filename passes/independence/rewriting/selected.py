"""Rows that a mask picks, computed with, and put back where they were: `out[m] = f(x[m])`, experts in a loop.

    t, c = torch.where(ids == e);  out.index_add_(0, t, f(x[t]) * w[t, c])

How many rows a mask picks depends on the data.  So f is computed of all rows that it could pick, and those that it does
not pick count nothing where rows are put back.  In their place f sees the first row of their sample that is picked, so
that it is computed from values that the program itself computes with; where a sample has none, a number, or of integers
a row of another sample.  That f treats each row by itself is proven (`region.py`).  Rows that are summed are for
`masked.py`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxes, SampleAxis
from psg_fx.ops.some_row import some_row

from ..arguments import bound, op_name
from ..values import NUMBERING, Result
from ..walk import Prover
from .numbers import counts_rows
from .picked import LISTS, asserts, said_once
from .region import Unfit
from .shared import RowRewriting
from .spare import count_nothing
from .sums import last_choice

aten = torch.ops.aten
_INDEX = ("aten.index", "aten._unsafe_index")
_FLAT = ("aten.squeeze", "aten.view", "aten.reshape", "aten.flatten")
_PUT = ("aten.index_put", "aten._unsafe_index_put")


def put_selected_back(gm: GraphModule) -> None:
    """Rewrite what is computed from rows that a mask picks, where it is put back.  All else stays as it is."""
    tried: set[Node] = set()
    while masks := [n for n in gm.graph.nodes if n not in tried and _is_mask(n) and any(_picks(u, n) for u in n.users)]:
        masks = said_once(gm, masks)
        prover = Prover(gm)
        with contextlib.suppress(PsgError):  # of what other rewritings are for; what is known by then is known
            prover.walk(skip=facts.descendants(user for n in masks for user in n.users if _picks(user, n)))
        for mask in masks:
            tried.add(mask)
            if not mask._erased:  # as one that was put back: another node is in its place
                with contextlib.suppress(Unfit):
                    Selection(gm, mask, prover.known.get(mask, Result()).axes).run()
                gm.graph.eliminate_dead_code()
    if tried:
        gm.recompile()


def _is_mask(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim > 0


def _picks(node: Node, mask: Node) -> bool:
    """Whether a node holds rows that the mask picks, or the places where it is not zero."""
    if node.target in LISTS:
        return True
    if node.target is aten.masked_select.default:
        return node.args[1] is mask and facts.shape(node.args[0].meta["val"]) == facts.shape(mask.meta["val"])  # type: ignore[union-attr]
    return mask.meta["val"].dtype is torch.bool and op_name(node) in _INDEX and mask in node.args[1]  # type: ignore[operator]


class Selection(RowRewriting):
    """What is computed from the rows of one mask, `[N]`, or of N rows with k choices each, `[N, k]`, `[k, N]` or of
    more dims, of which one has the N.

    N is the number of rows of all samples, `each` that of one sample, in `outer` blocks that lie apart (the steps of
    sequences with the time first).  columns: a node with the picked places along a dim of the mask -> the dim.  listed:
    all columns at once.
    """

    def __init__(self, gm: GraphModule, mask: Node, axis: SampleAxes = None) -> None:
        """axis: where the samples lie in the mask, if that is known."""
        self.mask = mask
        shape, batch = facts.shape(mask.meta["val"]), facts.graph_facts(gm).batch
        dims = [d for d, size in enumerate(shape) if size.free_symbols]
        if len(dims) != 1 or not sympy.cancel(shape[dims[0]] / batch).is_Integer:
            raise Unfit
        (self.dim,) = dims
        self.each = int(sympy.cancel(shape[self.dim] / batch))
        self.outer = axis.outer if isinstance(axis, SampleAxis) and axis.dim == self.dim else 1
        self.others = [int(size) for d, size in enumerate(shape) if d != self.dim]
        self.k = math.prod(self.others)
        self.dims = [self.dim, *(d for d in range(len(shape)) if d != self.dim)]
        super().__init__(gm, [n for n in mask.users if _picks(n, mask)], shape[self.dim] * self.k)
        self.listed: set[Node] = set()
        self.columns: dict[Node, int] = {}
        self._place: Node | None = None

    def run(self) -> None:
        """Put the ends in the place of what the mask picked, once it is proven that each row is treated by itself."""
        for node in self.order:
            if node.op == "call_function" and not asserts(node) and self.touched(node):
                known = self.listing(node) or self.numbering(node) or self.picking(node)
                _ = known or self.putting_back(node) or self.by_row(node)
        if not self.ends:
            raise Unfit
        rows = self.prove()
        if (place := self._place) is not None:
            count_nothing(self.gm, rows, lambda: self.spliced(place.next, self.has_rows, place))
        ragged = {*self.twins, *self.columns, *self.listed}
        for node, (end, _) in self.ends.items():
            node.replace_all_uses_with(end)
        for node in reversed(self.order):
            if asserts(node) and not node._erased and ragged & facts.ancestors([node]):
                self.gm.graph.erase_node(node)

    def is_picked(self, node: Node) -> bool:
        """Whether a node holds picked rows, their number or their places."""
        return node in self.twins or node in self.columns or node in self.listed

    def touched(self, node: Node) -> bool:
        """Whether a node is made of picked rows, rather than of what was put back."""
        return _picks(node, self.mask) or any(map(self.is_picked, node.all_input_nodes))

    def listing(self, node: Node) -> bool:
        """The places that the mask picks: all columns, or one."""
        source: Any = node.args[0] if node.args else None
        if node.target in LISTS and source is self.mask:
            self.listed.add(node)
            return True
        if source not in self.listed and source not in self.columns:
            return False
        name = op_name(node)
        if source in self.columns and name in ("aten.squeeze", "aten.alias", "aten.slice", "aten._to_copy"):
            same = facts.shape(node.meta["val"])[:1] == facts.shape(source.meta["val"])[:1]
            if node.meta["val"].ndim == 1 and same and node.meta["val"].dtype in NUMBERING:
                self.columns[node] = self.columns[source]
                return True
        if source not in self.listed:
            return False
        if node.target is operator.getitem:
            index: Any = node.args[1]
            self.columns[node] = int(index)
        elif name == "aten.unbind" and bound(node)["dim"] in (1, -1):
            self.listed.add(node)
        elif name == "aten.select" and bound(node)["dim"] in (1, -1):
            self.columns[node] = int(bound(node)["index"]) % self.mask.meta["val"].ndim
        elif name in _FLAT and self.mask.meta["val"].ndim == 1 and node.meta["val"].ndim == 1:
            self.columns[node] = 0
        elif name == "aten.slice" and facts.shape(node.meta["val"]) == facts.shape(source.meta["val"]):
            self.listed.add(node)
        else:
            return False
        return True

    def numbering(self, node: Node) -> bool:
        """The numbers of the samples whose rows are picked, `arange(B)[:, None].expand(B, N)[mask]`: a column."""
        if self.each != 1 or node.target in LISTS or not _picks(node, self.mask):
            return False
        x = bound(node)["self"]
        if self.dim or not counts_rows(x) or facts.shape(x.meta["val"]) != facts.shape(self.mask.meta["val"]):
            return False
        self.columns[node] = self.dim
        return True

    def looked_up(self, node: Node) -> tuple[int, list[int]] | None:
        """The first dim that an index runs over, and the dim of the mask that each of its adjacent indices is for."""
        given: Sequence[Any] = list(bound(node)["indices"])
        places = [d for d, n in enumerate(given) if n is not None]
        if not places or places != list(range(places[0], places[0] + len(places))):
            return None
        if [given[d] for d in places] == [self.mask]:
            return places[0], list(range(self.mask.meta["val"].ndim))
        found = [self.columns.get(given[d]) for d in places]
        if None in found or len(set(found)) != len(found) or len(found) not in (1, len(self.dims)):
            return None
        return places[0], found  # type: ignore[return-value]

    def picking(self, node: Node) -> bool:
        """Rows of x that the mask picks: all that it could."""
        if not (_picks(node, self.mask) or op_name(node) in _INDEX):
            return False
        x = bound(node).get("self")  # not of `torch.where(other_mask)`
        if x is None or self.is_picked(x):
            return False
        whole = node.target is aten.masked_select.default
        found = (0, list(range(len(self.dims)))) if whole else self.looked_up(node)
        if found is None or x is self.mask:
            return False
        at, dims = found
        shape, own = facts.shape(x.meta["val"]), facts.shape(self.mask.meta["val"])
        if any(shape[at + d] != own[dim] for d, dim in enumerate(dims)) or self.dim not in dims:
            return False
        fill, k, order = 0.3 + 0.07 * len(self.entries), self.k, self.dims
        front = list(range(len(order)))
        floats = facts.is_differentiable(x.meta["val"])

        def run(x: Tensor, place: Tensor) -> Tensor:
            if len(dims) == 1:
                moved = x.movedim(at, 0).unsqueeze(1)
                moved = moved.expand(-1, k, *moved.shape[2:])
            else:
                moved = x.movedim([at + dims.index(d) for d in order], front).flatten(1, len(order) - 1)
            rows = self.by_sample(moved.flatten(0, 1))
            index = place.clamp(min=0).view(*place.shape, *[1] * (rows.ndim - 2)).expand(rows.shape)
            taken = rows.gather(1, index)
            other = torch.full((), fill, dtype=x.dtype, device=x.device) if floats else some_row(rows, place)
            taken = torch.where((place >= 0).view(*place.shape, *[1] * (rows.ndim - 2)), taken, other)
            return self.in_order(taken).movedim(0, at)

        twin = self.spliced(node, run, x, self.place())
        self.twins[node] = twin
        self.entries[twin] = at
        return True

    def place(self) -> Node:
        """For each row the row of its sample that it takes, `[B, each·k]`: itself, or else the first that is picked; -1
        where there is none.
        """
        if self._place is None:

            def run(mask: Tensor) -> Tensor:
                each = self.by_sample(self.all_rows(mask))
                own = torch.arange(each.shape[1], device=mask.device)
                first = each.to(torch.int64).argmax(1, keepdim=True)
                return torch.where(each.any(1, keepdim=True), torch.where(each, own, first), -1)

            self._place = self.spliced(self.order[0], run, self.mask)
        assert self._place is not None
        return self._place

    def has_rows(self, place: Tensor) -> Tensor:
        """`[N·k]`: whether a row of its sample is picked."""
        return self.in_order(place >= 0)

    def all_rows(self, mask: Tensor) -> Tensor:
        """`[N·k]`, the k of a row side by side."""
        picked = mask if mask.dtype is torch.bool else mask != 0
        return picked.movedim(self.dim, 0).reshape(-1)

    def by_sample(self, rows: Tensor) -> Tensor:
        """`[N·k, ..]` -> `[B, each·k, ..]`."""
        found: Tensor = rows.unflatten(0, (self.outer, -1, self.each * self.k // self.outer))
        return found.squeeze(0) if self.outer == 1 else found.transpose(0, 1).flatten(1, 2)

    def in_order(self, rows: Tensor) -> Tensor:
        """`[B, each·k, ..]` -> `[N·k, ..]`."""
        found: Tensor = rows.unflatten(1, (self.outer, self.each * self.k // self.outer))
        return found.transpose(0, 1).flatten(0, 2)

    def putting_back(self, node: Node) -> bool:
        """Rows added or written to where they came from."""
        name = op_name(node)
        if name not in ("aten.index_add", "aten.masked_scatter", *_PUT):
            return False
        given = bound(node)
        onto, values = given["self"], given.get("values", given.get("source"))
        if values not in self.twins or self.is_picked(onto):
            return False
        if name == "aten.index_add":
            if given["dim"] != 0 or given["index"] not in self.columns:
                return False
            at, dims = 0, [self.columns[given["index"]]]
        elif name == "aten.masked_scatter":
            if given["mask"] is not self.mask or facts.shape(onto.meta["val"]) != facts.shape(self.mask.meta["val"]):
                return False
            at, dims = 0, list(range(len(self.dims)))
        else:
            found = self.looked_up(node)
            if found is None:
                return False
            at, dims = found
        shape, own = facts.shape(onto.meta["val"]), facts.shape(self.mask.meta["val"])
        rest = facts.shape(values.meta["val"])[1:]
        fits = at == 0 and self.dim in dims and all(shape[d] == own[dim] for d, dim in enumerate(dims))
        adds = name == "aten.index_add" or given.get("accumulate", False)
        if not fits or shape[len(dims) :] != rest:
            return False
        twin = self.twins[values]
        self.ends[node] = self.put(node, onto, twin, dims, adds, given.get("alpha", 1)), twin
        return True

    def put(self, node: Node, onto: Node, twin: Node, dims: list[int], adds: bool, alpha: Any) -> Node:
        """Onto with the rows that are picked, or + α times their sums."""
        there = [self.dims.index(d) for d in dims]

        def run(z: Tensor, x: Tensor, mask: Tensor) -> Tensor:
            kept = self.all_rows(mask)
            kept, rows = (t.unflatten(0, (-1, self.k)) for t in (kept, x))
            kept = kept.view(*kept.shape, *[1] * (x.ndim - 1))
            if len(dims) > 1:
                kept, rows = (t.unflatten(1, self.others).movedim(there, list(range(len(dims)))) for t in (kept, rows))
            elif not adds:
                kept, rows = last_choice(kept, rows)
            if not adds:
                return torch.where(kept, rows.to(z.dtype), z)
            added = torch.where(kept, rows, torch.zeros((), dtype=x.dtype, device=x.device))
            return torch.add(z, added if len(dims) > 1 else added.sum(1), alpha=alpha)

        return self.spliced(node, run, onto, twin, self.mask)

    def by_row(self, node: Node) -> bool:
        """The op on all rows."""
        places = any(n in self.columns or n in self.listed or n is self.mask for n in node.all_input_nodes)
        return not places and self.copied(node)
