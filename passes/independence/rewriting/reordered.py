"""Rows of all samples in an order that is data: experts sort the tokens by expert, and put the results back.

    π = argsort(e),   v[p] = u[π[p]],   f(u[π]) = f(u)[π] for every f that treats each row by itself

So what is computed from sorted rows is computed from the rows where they were, and an op that undoes the order has its
result already: f(x[π])[argsort(π)] = f(x), and `index_add(z, 0, π // k, f(x[π // k]))` adds the k rows of each token.
Only grouped products need the order, to know each row's expert: they are given e instead (`psg_fx/ops/experts.py`).
That f treats each row by itself is proven as it is of samples, with the rows in their place (`region.py`).
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.order import is_same
from psg_fx.graph.same_op import alike
from psg_fx.ops.experts import expert_mm

from ..arguments import bound, op_name
from ..bounds import bounds
from ..values import NUMBERING
from .counts import ends_of_experts, no_experts
from .numbers import Number, divisor, number_of, remainder
from .picked import asserts
from .region import Unfit
from .shared import RowRewriting

_SORTS = ("aten.sort", "aten.argsort")
_GROUPED = ("aten._grouped_mm", "psg_fx.grouped_mm", "transformers.grouped_mm_fallback")
_WRITES = ("aten.index_put", "aten.scatter", "aten.index_copy")
_ADDS = ("aten.index_add", "aten.scatter_add")
_SYMMETRIC = ("aten.histc", "aten.bincount")
"""Ops that do not know the order of the rows."""


def undo_orders(gm: GraphModule) -> None:
    """Rewrite what is computed from rows in the order of a sort.  What cannot be rewritten stays, to be refused."""
    sorts = [n for n in gm.graph.nodes if op_name(n) in _SORTS and _of_all_rows(gm, n)]
    for sort in sorts:
        if not sort._erased:
            with contextlib.suppress(Unfit):
                Reordering(gm, sort).run()
            gm.graph.eliminate_dead_code()
    if sorts:
        gm.recompile()


def _of_all_rows(gm: GraphModule, sort: Node) -> bool:
    """Whether it sorts, upwards, one dim with all samples or rows of samples."""
    given = bound(sort)
    shape, info = facts.shape(given["self"].meta["val"]), facts.graph_facts(gm)
    return len(shape) == 1 and bool({info.batch, *info.rows} & shape[0].free_symbols) and not given["descending"]


def _same_shape(node: Node, source: Any) -> bool:
    """Whether a slice takes all."""
    return isinstance(source, Node) and facts.shape(node.meta["val"]) == facts.shape(source.meta["val"])


class Reordering(RowRewriting):
    """What one sort orders, by the ids `key`.

    keys: nodes that compute the same.  numbers: a node that holds numbers of rows, in that order -> which.  inverse:
    argsort of the order.  counted: where experts' rows end.  each: how many rows a sample has; 0 if that is data.
    """

    def __init__(self, gm: GraphModule, sort: Node) -> None:
        self.sort, self.key = sort, bound(sort)["self"]
        super().__init__(gm, [sort], facts.shape(self.key.meta["val"])[0])
        each = sympy.cancel(self.count / facts.graph_facts(gm).batch)
        self.each = int(each) if each.is_Integer else 0
        numbers = alike(gm)
        self.keys = {n for n in gm.graph.nodes if numbers[n] == numbers[self.key]}
        self.numbers: dict[Node, Number] = {}
        self.inverse: set[Node] = set()
        self.counted: list[Node] = []
        self.entries[self.key] = 0

    def run(self) -> None:
        """Put the ends in the place of what undid the order, once it is proven that each row is treated by itself."""
        for node in self.order:
            readers = (self.sorting, self.numbering, self.picking, self.putting_back, self.multiplying, self.counting)
            if node.op == "call_function" and not any(reader(node) for reader in readers):
                self.by_row(node)
        self.prove()
        for node, (end, _) in self.ends.items():
            node.replace_all_uses_with(end)
        counts = facts.ancestors(self.counted) - facts.ancestors([self.key])
        gone = {self.sort, *self.numbers, *self.inverse, *self.twins} | counts
        for node in list(self.gm.graph.nodes):
            if asserts(node) and gone & facts.ancestors([node]):  # of dtypes, and how many counts there are
                self.gm.graph.erase_node(node)

    # --- what a node is; each reader says whether it knows the node ---

    def sorting(self, node: Node) -> bool:
        """The sort itself: its values and its order; and the sort of the order, which is its inverse."""
        if node is self.sort or (op_name(node) in _SORTS and node.args[0] in self.numbers):
            inverts, source = node is not self.sort, bound(node)["self"]
            if inverts and (self.numbers[source] != Number(1) or bound(node)["descending"]):
                return False
            values = {n.args[1]: n for n in node.users if n.target is operator.getitem}
            order = values.get(1) if isinstance(node.meta["val"], (tuple, list)) else node
            if order is not None and inverts:
                self.inverse.add(order)
            elif order is not None:
                self.numbers[order] = Number(1)
            if not inverts and 0 in values:
                self.twins[values[0]] = self.key
            return True
        return node.target is operator.getitem and node.args[0] is self.sort

    def numbering(self, node: Node) -> bool:
        """Numbers made of numbers; the inverse, as the places that the order is written to."""
        if op_name(node) in _WRITES:
            return self.inverting(node)
        source: Any = node.args[0] if node.args else None
        same = (
            is_same(node)
            or op_name(node) in ("aten.unsqueeze", "aten.expand")
            or (op_name(node) == "aten.slice" and _same_shape(node, source))
        )
        if same and source in self.numbers and self.has_rows_first(node) and node.meta["val"].dtype in NUMBERING:
            self.numbers[node] = self.numbers[source]
            return True
        for found, within in ((divisor(node), False), (remainder(node), True)):
            if found is not None and self.numbers.get(found[0]) == Number(1):
                self.numbers[node] = Number(found[1], within)
                return True
        return False

    def has_rows_first(self, node: Node) -> bool:
        """Whether rows lie in dim 0 alone."""
        first, *rest = facts.shape(node.meta["val"])
        return first == self.count and not any(size.free_symbols for size in rest)

    def inverting(self, node: Node) -> bool:
        """`inverse[order] = arange(R)`."""
        given = bound(node)
        at = given["indices"] if "indices" in given else [given["index"]]
        values = given.get("values") or given.get("src") or given.get("source")
        whole = len(at) == 1 and self.numbers.get(at[0]) == Number(1) and not given.get("accumulate", False)
        whole = whole and given.get("reduce") is None
        whole = whole and facts.shape(node.meta["val"]) == (self.count,)
        if whole and isinstance(values, Node) and number_of(values, self.count) == Number(1):
            self.inverse.add(node)
            return True
        return False

    def picking(self, node: Node) -> bool:
        """Rows taken in the order, or put back by its inverse."""
        source, at = self.looked_up(node)
        if source is None:
            return False
        if len(at) == 1 and at[0] in self.inverse and source in self.twins:
            self.ends[node] = self.twins[source], self.twins[source]
            return True
        numbers = [self.numbers.get(n) for n in at]
        if self.is_ordered(source) or None in numbers or any(n.meta["val"].ndim != 1 for n in at):
            return False
        if numbers == [Number(1)] and (found := number_of(source, self.count)) is not None:
            self.numbers[node] = found
            return True
        twin = self.taken(node, source, numbers)
        if twin is not None:
            self.twins[node] = twin
            self.entries[twin] = 0
        return twin is not None

    def looked_up(self, node: Node) -> tuple[Node | None, list[Any]]:
        """The source and the leading indices of `x[i]`, `x[i, j]`."""
        given = bound(node) if isinstance(node.target, torch._ops.OpOverload) else {}
        if op_name(node) in ("aten.index", "aten._unsafe_index"):
            at = [n for n in given["indices"] if n is not None]
            return (given["self"], at) if at == list(given["indices"][: len(at)]) else (None, [])
        if op_name(node) == "aten.index_select" and given["dim"] == 0:
            return given["self"], [given["index"]]
        return None, []

    def taken(self, node: Node, source: Node, numbers: list[Number | None]) -> Node | None:
        """The rows of the source, each as often as it is taken, in their own order."""
        shape = facts.shape(source.meta["val"])
        first = numbers[0]
        assert first is not None
        if len(numbers) == 2 and numbers == [Number(first.k), Number(first.k, within=True)]:
            if shape[0] * first.k != self.count or shape[1] != first.k:
                return None
            return self.spliced(node, lambda x: x.flatten(0, 1), source)
        if len(numbers) != 1 or first.within or shape[0] * first.k != self.count:
            return None
        if first.k == 1:
            return source
        k = first.k
        return self.spliced(node, lambda x: x.unsqueeze(1).expand(-1, k, *x.shape[1:]).flatten(0, 1), source)

    def putting_back(self, node: Node) -> bool:
        """Rows written or added to where they came from."""
        if op_name(node) not in (*_ADDS, *_WRITES):
            return False
        given = bound(node)
        at = given["indices"] if "indices" in given else [given["index"]]
        values, onto = given.get("values") or given.get("src") or given.get("source"), given["self"]
        number = self.numbers.get(at[0]) if len(at) == 1 else None
        if values not in self.twins or number is None or number.within or given.get("dim", 0) != 0:
            return False
        if given.get("reduce") is not None:  # scatter(.., reduce="add")
            return False
        shape, written = facts.shape(onto.meta["val"]), facts.shape(values.meta["val"])
        if shape[0] * number.k != self.count or written[0] != self.count or shape[1:] != written[1:]:
            return False
        wide = op_name(node) in ("aten.scatter_add", "aten.scatter")
        if facts.shape(at[0].meta["val"]) != (written if wide else written[:1]):
            return False
        adds = op_name(node) in _ADDS or given.get("accumulate", False)
        if not adds and number.k != 1:
            return False
        self.ends[node] = self.put(node, onto, self.twins[values], number.k if adds else 0, given.get("alpha", 1))
        return True

    def put(self, node: Node, onto: Node, twin: Node, k: int, alpha: Any) -> tuple[Node, Node]:
        """Onto + α times the sum of k rows each; the rows themselves for k = 0."""

        def run(z: Tensor, x: Tensor) -> Tensor:
            if not k:
                return x.to(z.dtype)
            return torch.add(z, x.unflatten(0, (-1, k)).sum(1) if k > 1 else x, alpha=alpha)

        return self.spliced(node, run, onto, twin), twin

    def multiplying(self, node: Node) -> bool:
        """The product of each row with the matrix of its expert."""
        if op_name(node) not in _GROUPED:
            return False
        x, w, offs, *rest = node.args
        plain = (
            not self.key.meta["val"].is_floating_point()
            and all(r is None for r in rest)
            and not any(v is not None for v in node.kwargs.values())
        )
        if x not in self.twins or not isinstance(w, Node) or self.is_ordered(w) or not plain:
            return False
        experts, own = w.meta["val"].shape[0], {n for n, twin in self.twins.items() if twin in self.keys}
        low, high = bounds(self.key)
        beyond = [n for n in no_experts(experts) if low <= n <= high]
        if low < 0 and not self.each:
            return False
        if w.meta["val"].ndim != 3 or not ends_of_experts(offs, self.keys, own, experts, beyond):  # type: ignore[arg-type]
            return False
        self.counted.append(offs)  # type: ignore[arg-type]
        self.twins[node] = self.multiplied(node, self.twins[x], w)  # type: ignore[index]
        return True

    def multiplied(self, node: Node, x: Node, w: Node) -> Node:
        """The product of rows in their own order; of ids that are no expert's, which come last, it is zero, and NaN for
        a sample that has negative ones: these come first and move all its rows to others' places.
        """
        experts = w.meta["val"].shape[0]
        low, high = bounds(self.key)
        known = low >= 0 and high < experts

        def moved(ids: Tensor) -> Tensor:
            each = (ids < 0).view(-1, self.each)
            return each.any(1, keepdim=True).expand(each.shape).reshape(-1)

        def run(x: Tensor, w: Tensor, ids: Tensor, moved: Tensor | None = None) -> Tensor:
            y: Tensor = expert_mm(x, w, ids if known else ids.clamp(0, experts - 1))
            if not known:
                y = y.where((ids < experts).unsqueeze(1), 0.0)
            return y if moved is None else y * torch.where(moved, torch.nan, 1.0).to(y.dtype).unsqueeze(1)

        given = [x, w, self.key]
        if low < 0:
            given.append(self.spliced(node, moved, self.key))
            self.entries[given[-1]] = 0
        before = set(self.gm.graph.nodes)
        found = self.spliced(node, run, *given)
        self.inside += [n for n in self.gm.graph.nodes if n not in before]
        return found

    def counting(self, node: Node) -> bool:
        """The same of rows in any order."""
        if op_name(node) not in _SYMMETRIC or not self.by_row(node):
            return False
        twin = self.twins.pop(node)
        self.inside.remove(twin)
        source: Node = bound(twin)["self"]
        self.ends[node] = twin, source
        return True

    def by_row(self, node: Node) -> bool:
        """The op on the rows in their own order."""
        others = [n for n in node.all_input_nodes if n not in self.twins]
        value = node.meta.get("val")
        if not isinstance(value, (Tensor, tuple, list)):
            return False
        return not any(self.is_ordered(n) or not self.fits(n) for n in others) and self.copied(node, value)

    def is_ordered(self, node: Node) -> bool:
        """Whether the node knows the order."""
        return node is self.sort or node in self.numbers or node in self.inverse or node in self.twins
