"""What two rewritings share: rows whose order or number depends on the data become all rows, where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.same_op import draws
from psg_fx.graph.splicing import splice
from psg_fx.source import provenance
from psg_fx.torch_private.modes import enable_python_dispatcher

from ..run import run_node
from ..values import Result
from .region import ROWS, TimesRows, Unfit, row_by_row


class RowRewriting:
    """What is computed from some rows, and the same from all of them, where they are.

    order: all that is computed from `starts`.  count: how many rows all are.
    twins: a value of those rows, or their number -> the same of all rows.  entries: twins where rows enter -> the dim
    in which they lie.  inside: twins computed from others.
    ends: a value of samples as ever -> what it is of all rows, and the twin that is put back for it.
    """

    def __init__(self, gm: GraphModule, starts: Iterable[Node], count: sympy.Expr) -> None:
        self.gm, self.count = gm, count
        computed = facts.descendants(starts)
        self.order = [n for n in gm.graph.nodes if n in computed]
        self.twins: dict[Node, Node] = {}
        self.entries: dict[Node, int] = {}
        self.inside: list[Node] = []
        self.ends: dict[Node, tuple[Node, Node]] = {}

    def copied(self, node: Node, value: Any = None) -> bool:
        """The op on all rows, which is the same for each of them if it treats each row by itself: that is proven later.
        Not of random draws, which would be others in another order.  value: what it gives, if that is known.
        """
        if draws(node) or not any(n in self.twins for n in node.all_input_nodes):
            return False
        with self.gm.graph.inserting_before(node):
            twin = self.gm.graph.node_copy(node, lambda n: self.twins.get(n, n))
        twin.meta = provenance(node)
        try:
            twin.meta["val"] = self._run(twin) if value is None else value
        except Exception:  # shapes that do not fit all rows: it is not computed row by row
            self.gm.graph.erase_node(twin)
            return False
        self.twins[node] = twin
        self.inside.append(twin)
        return True

    def _run(self, twin: Node) -> Any:
        around = (*twin.all_input_nodes, *facts.placeholders(self.gm)[:1])
        values = [n.meta["val"] for n in around if isinstance(n.meta.get("val"), Tensor)]
        with contextlib.ExitStack() as stack:
            if values:
                stack.enter_context(values[0].fake_mode)
                stack.enter_context(enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            return run_node(twin)

    def fits(self, node: Node) -> bool:
        """Whether it is a number, or the same for all rows."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return not any(size.free_symbols for size in facts.shape(value))
        return isinstance(value, (int, float, torch.SymInt))

    def prove(self) -> dict[Node, SampleAxis]:
        """Each row is treated by itself on the way to the ends, and lies in dim 0 there; or `Unfit`.  Where the rows
        lie in each value on the way.
        """
        return self.prove_places({source: 0 for _, source in self.ends.values()})

    def prove_places(self, sources: Mapping[Node, int]) -> dict[Node, SampleAxis]:
        """Each row is treated by itself on the way to these twins, and lies in this dim of them; or `Unfit`."""
        above = facts.ancestors(sources, through=lambda n: n not in self.entries)
        own = dict.fromkeys(n for n in self.inside if n in above)
        inputs: dict[Node, tuple[Tensor, int | None]] = {}
        numbers: dict[Node, Any] = {}
        for n in dict.fromkeys(m for node in own for m in node.all_input_nodes if m not in own):
            value = n.meta["val"]
            if isinstance(value, Tensor):
                inputs[n] = self._example(n, value)
            else:
                numbers[n] = self._number(n)
        for n in list(self.entries)[: not any(place is not None for _, place in inputs.values())]:
            inputs[n] = self._example(n, n.meta["val"])
        found: dict[Node, Result] = row_by_row([*own], inputs, numbers) if own else {}
        for source, dim in sources.items():
            axis = found[source].axes if source in found else SampleAxis(self.entries.get(source, -1))
            if axis != SampleAxis(dim) or (source in found and found[source].reduced):
                raise Unfit
        return {n: result.axes for n, result in found.items() if isinstance(result.axes, SampleAxis)}

    def _example(self, node: Node, value: Tensor) -> tuple[Tensor, int | None]:
        shape, place = list(facts.shape(value)), self.entries.get(node)
        if place is not None:
            shape[place] = sympy.Integer(ROWS)
        if any(size.free_symbols for size in shape):
            raise Unfit
        return torch.empty([int(size) for size in shape], dtype=value.dtype, device="meta"), place

    def _number(self, node: Node) -> Any:
        """A number in terms of the number of rows."""
        value = node.meta["val"]
        size = facts.expr(value)
        each = sympy.cancel(size / self.count)
        if each.is_Integer and size.free_symbols:
            return TimesRows(int(each))
        if size.free_symbols:
            raise Unfit
        return int(value)

    def spliced(self, node: Node, function: Callable[..., Tensor], *arguments: Node) -> Node:
        """The function's nodes on these arguments, before a node."""
        try:
            found: Node = splice(self.gm, node, function, arguments)
        except PendingUnbackedSymbolNotFound:  # the rows of another mask have met these
            raise Unfit from None
        return found
