"""As many rows for every sample in place of those that a mask picks: the proof that rows stay apart, and the rewriting.

A row that the mask does not pick is replaced by the first one of its sample that it picks; where rows are summed, such
rows count zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.graph.facts import GraphFacts, InputSpec, SampleAxis
from psg_fx.op_table import known
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.graphs import traced_without_code
from psg_fx.torch_private.modes import enable_python_dispatcher
from psg_fx.torch_private.tracer import trace_fakes

from .prove import Prover
from .row_sums import apart, together
from .values import Result, bound

aten = torch.ops.aten
_ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom")
_ROWS, _OTHERS = 11, 7
"""Sizes at which ops on rows are tried: of rows, and of samples beside them."""


class Unfit(Exception):
    """These rows cannot be padded."""


@dataclass
class Rows:
    """The rows that one mask picks.

    key: equal for masks that are computed alike.  mask: its node; axis: where the samples lie in it.  shape: to which
    it is expanded (`masked_select`), or None.
    """

    key: Any
    mask: Node
    axis: SampleAxis | None
    picks: list[Node]
    shape: tuple[Any, ...] | None = None


def pick_place(pick: Node) -> int:
    """The dim of the result in which the rows lie."""
    if pick.target is aten.masked_select.default:
        return 0
    return next(d for d, n in enumerate(pick.args[1]) if n is not None)  # type: ignore[arg-type]


class Padding:
    """The rewriting of what is computed from the rows of one mask.

    symbols: the unknown numbers of rows, all equal.  new: a node with such rows -> the one with padded rows.
    """

    def __init__(self, gm: GraphModule, rows: Rows, after: set[Node], number: int) -> None:
        self.gm, self.rows, self.number = gm, rows, number
        self.symbols = {s for pick in rows.picks for s in _symbols(pick)} - {facts.graph_facts(gm).batch}
        self.order = [n for n in gm.graph.nodes if n in after]
        self.ragged = {n for n in self.order if self.knows(n)}
        self.new: dict[Node, Node] = {}

    def knows(self, node: Node) -> bool:
        """Whether the number of rows is in the shape of the node, or in the number that it is."""
        return bool(_symbols(node) & self.symbols)

    def run(self) -> None:
        """Prove that rows stay apart, then write the padded program."""
        axes = self.proven()
        sinks = self.sinks(axes)
        valid, place = self.valid_rows()
        for node in self.order:
            if node in self.rows.picks:
                self.new[node] = self.padded(node, place)
            elif node in self.ragged and not isinstance(node.meta["val"], (torch.SymBool, bool)):
                self.new[node] = self.copied(node)
            elif node in sinks:
                node.replace_all_uses_with(self.summed(node, axes, valid))
        self.erase()

    # --- the proof ----------------------------------------------------------------------------------------------

    def proven(self) -> dict[Node, Result]:
        """Where the rows lie in each value; rows stand for samples in a graph of their own."""
        graph = Graph()
        copies: dict[Node, Any] = {}
        inputs: list[Node] = []
        for node in self.order:
            if node in self.rows.picks:
                continue
            if not self.is_of_rows(node):
                continue
            for n in node.all_input_nodes:
                if n not in copies and (n in self.rows.picks or not self.is_of_rows(n)):
                    copies[n] = None
                    inputs.append(n)
        numbers = {n: self.number_of(n) for n in inputs if not isinstance(n.meta.get("val"), Tensor)}
        tensors = [n for n in inputs if n not in numbers]
        fakes = symbolic_inputs(*self.examples(tensors))
        with fakes[0].fake_mode, enable_python_dispatcher(), torch.no_grad():  # type: ignore[attr-defined]
            for n, fake in zip(tensors, fakes, strict=True):
                copies[n] = graph.placeholder(n.name)
                value = torch.empty(fake.shape, dtype=fake.dtype, device=n.meta["val"].device)
                copies[n].meta = {"val": value, "psg_fx_input": InputSpec("input", n.name, self.place_of(n))}
            for node in self.order:
                if node not in self.rows.picks and self.is_of_rows(node):
                    copies[node] = graph.node_copy(node, lambda n: numbers[n] if n in numbers else copies[n])
                    copies[node].meta["val"] = _run_or_unfit(copies[node])
        graph.output(())
        gm = GraphModule({}, graph)
        carrier = next(n for n in tensors if self.place_of(n) is not None)
        symbol = facts.expr(copies[carrier].meta["val"].shape[self.place_of(carrier)])
        if not isinstance(symbol, sympy.Symbol):
            raise Unfit
        gm.meta[facts.KEY] = GraphFacts(symbol)
        prover = Prover(gm)
        try:
            prover.walk()
        except PsgError as error:
            raise Unfit from error
        return {node: prover.known[copy] for node, copy in copies.items() if copy in prover.known}

    def is_of_rows(self, node: Node) -> bool:
        """Whether a node has rows, or is made of a value or number that has them."""
        if _asserts(node):
            return False
        if node in self.ragged:
            return not isinstance(node.meta["val"], (torch.SymBool, bool))
        return any(n in self.ragged and isinstance(n.meta["val"], (Tensor, tuple, list)) for n in node.all_input_nodes)

    def place_of(self, node: Node) -> int | None:
        return pick_place(node) if node in self.rows.picks else None

    def number_of(self, node: Node) -> Any:
        """A number that is not of the rows, with some number of samples."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            raise Unfit
        return facts.at(facts.expr(value), facts.graph_facts(self.gm).batch, _OTHERS)

    def examples(self, nodes: Sequence[Node]) -> tuple[list[Tensor], list[int | None]]:
        """Tensors of the nodes' shapes with some number of rows and of samples, and where the rows lie."""
        batch, made = facts.graph_facts(self.gm).batch, []
        for n in nodes:
            value = n.meta["val"]
            sizes = {batch: _OTHERS} | dict.fromkeys(self.symbols, _ROWS)
            shape = [s.subs(sizes) for s in facts.shape(value)]
            if not all(s.is_Integer for s in shape):
                raise Unfit
            made.append(torch.empty([int(s) for s in shape], dtype=value.dtype, device="meta"))
        return made, [self.place_of(n) for n in nodes]

    def sinks(self, axes: Mapping[Node, Result]) -> set[Node]:
        """The nodes that sum rows, or count them; anything else at which the rows end is unfit."""
        found = set()
        for node in self.order:
            if node in self.ragged or _asserts(node) or not any(n in self.ragged for n in node.all_input_nodes):
                continue
            numbers = [n for n in node.all_input_nodes if n in self.ragged and isinstance(n.meta["val"], torch.SymInt)]
            tensors = [n for n in node.all_input_nodes if n in self.ragged and n not in numbers]
            counted = bool(numbers) and not tensors and self.counts(node, numbers)
            if not counted and (numbers or len(tensors) != 1 or not _is_sum(node) or not axes[node].reduced):
                raise Unfit
            found.add(node)
        return found

    def counts(self, node: Node, numbers: Sequence[Node]) -> bool:
        """Whether the number of rows enters as a value, c rows for one: `x.sum() / x.shape[0]`."""
        if node.op != "call_function" or node.target not in (aten.div.Tensor, aten.mul.Tensor):
            return False
        return all(self.per_row(n) is not None for n in numbers)

    def per_row(self, number: Node) -> int | None:
        """The c of c rows."""
        value = facts.expr(number.meta["val"])
        (symbol,) = value.free_symbols & self.symbols if len(value.free_symbols) == 1 else (None,)
        each = value / symbol if symbol is not None else None
        return int(each) if each is not None and each.is_Integer else None

    # --- the rewriting ------------------------------------------------------------------------------------------

    def valid_rows(self) -> tuple[Node, Node]:
        """Which of the padded rows the mask picks, `[B·S]`; and for each the row of its sample that it takes,
        `[B, S]`, or -1 where the sample has none.
        """
        rows, shape = self.rows, self.rows.shape

        def function(mask: Tensor) -> tuple[Tensor, Tensor]:
            each = apart(mask.expand(shape) if shape is not None else mask, rows.axis)
            own = torch.arange(each.shape[1], device=mask.device)
            first = each.to(torch.int64).argmax(1, keepdim=True)
            place = torch.where(each, own, first)
            return each.reshape(-1), torch.where(each.any(1, keepdim=True), place, -1)

        valid, place = self.splice(rows.picks[0], function, [rows.mask])
        return valid, place

    def padded(self, pick: Node, place: Node) -> Node:
        """`[.., B·S, ..]`: the rows that the mask picks, and copies of them."""
        rows, at, shape = self.rows, pick_place(pick), self.rows.shape
        width = len(shape) if shape is not None else rows.mask.meta["val"].ndim
        fill = 0.3 + 0.07 * self.number + 0.11 * rows.picks.index(pick)  # where a sample has no row: no special value

        def function(x: Tensor, place: Tensor) -> Tensor:
            x = x.expand(shape) if shape is not None else x
            lead, trail = x.shape[:at], x.shape[at + width :]
            count = math.prod(x.shape[at : at + width]) // place.shape[1] if rows.axis is None else place.shape[0]
            moved = together(x, rows.axis, at, width)  # [B, L, S, R]
            index = place.clamp(min=0)[:, None, :, None].expand(moved.shape)
            taken = moved.gather(2, index)
            zero = torch.zeros((), dtype=x.dtype, device=x.device)
            other = zero + fill if x.is_floating_point() else zero
            taken = torch.where((place >= 0)[:, None, :, None], taken, other)
            return taken.transpose(0, 1).reshape(*lead, count * place.shape[1], *trail)

        found: Node = self.splice(pick, function, [pick.args[0], place])
        return found

    def copied(self, node: Node) -> Node:
        """The same op on padded rows."""
        with self.gm.graph.inserting_before(node):
            fresh = self.gm.graph.node_copy(node, lambda n: self.new.get(n, n))
        fresh.meta = {key: node.meta[key] for key in _ORIGINS if key in node.meta}
        tensors = [n.meta["val"] for n in fresh.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if not tensors:
            fresh.meta["val"] = _run(fresh)
            return fresh
        with tensors[0].fake_mode, enable_python_dispatcher(), torch.no_grad():
            fresh.meta["val"] = _run(fresh)
        return fresh

    def summed(self, node: Node, axes: Mapping[Node, Result], valid: Node) -> Node:
        """A sum over rows of which some count zero; or an op whose number of rows is counted."""
        numbers = [n for n in node.all_input_nodes if n in self.ragged and isinstance(n.meta["val"], torch.SymInt)]
        if numbers:
            return self.counted(node, numbers, valid)
        (source,) = [n for n in node.all_input_nodes if n in self.ragged]
        axis = axes[source].axes
        if not isinstance(axis, SampleAxis):
            raise AssertionError(f"no rows in {source}")
        function = known(node.target).over_kept_rows
        assert function is not None
        named = {key: value for key, value in bound(node).items() if key != "self"}

        def run(x: Tensor, valid: Tensor) -> Tensor:
            rows = valid.view(1, -1, 1).expand(axis.outer, valid.shape[0], axis.inner).reshape(-1)
            kept = rows.view([-1 if d == axis.dim else 1 for d in range(x.ndim)])
            found: Tensor = function(x, kept, **named)
            return found

        found: Node = self.splice(node, run, [self.new[source], valid])
        return found

    def counted(self, node: Node, numbers: Sequence[Node], valid: Node) -> Node:
        each = {n: self.per_row(n) or 1 for n in numbers}
        tensors = [n for n in node.all_input_nodes if n not in numbers]

        def run(valid: Tensor, *values: Tensor) -> Any:
            known: dict[Node, Any] = dict(zip(tensors, values, strict=True))
            filled = torch.fx.map_arg(
                (node.args, node.kwargs), lambda n: known[n] if n in known else valid.sum() * each[n]
            )
            return node.target(*filled[0], **filled[1])  # type: ignore[operator]

        found: Node = self.splice(node, run, [valid, *tensors])
        return found

    def splice(self, node: Node, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Trace the function on the nodes' fake values and put its nodes before `node`."""
        with torch.no_grad(), traced_without_code():
            traced = trace_fakes(function, [n.meta["val"] for n in arguments])
        traced.graph.eliminate_dead_code()
        made: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
        with self.gm.graph.inserting_before(node):
            for old in traced.graph.nodes:
                if old.op in ("placeholder", "output"):
                    continue
                if old.op == "get_attr":
                    raise AssertionError("a constant in what pads rows")
                made[old] = self.gm.graph.node_copy(old, made.__getitem__)
                made[old].meta = {key: node.meta[key] for key in _ORIGINS if key in node.meta}
                made[old].meta["val"] = old.meta["val"]
        return torch.fx.map_arg(traced.graph.output_node().args[0], made.__getitem__)

    def erase(self) -> None:
        """Drop what has rows by number, and what export asserts of it."""
        for node in reversed(self.order):
            if not node.users and (node in self.ragged or node in self.rows.picks or _asserts(node)):
                if _asserts(node) and not any(self.knows(n) for n in node.all_input_nodes):
                    continue
                self.gm.graph.erase_node(node)


def _is_sum(node: Node) -> bool:
    """Whether rows of zeros leave the result as it is, and no rows at all give one."""
    order = bound(node)["ord"] if node.target is aten.linalg_vector_norm.default else 1
    return known(node.target).over_kept_rows is not None and 0 < order < float("inf")


def _symbols(node: Node) -> set[Any]:
    """The symbols in the shapes of a node, or in the number that it is."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return set(value.node.expr.free_symbols)
    return {s for t in facts.tensors(value) for size in facts.shape(t) for s in size.free_symbols}


def _asserts(node: Node) -> bool:
    return node.op == "call_function" and any(
        word in str(node.target) for word in ("_assert", "sym_constrain_range")
    )  # fmt: skip


def _run_or_unfit(node: Node) -> Any:
    """The same; ops that need the number of rows refuse in many ways."""
    try:
        return _run(node)
    except Exception as error:
        raise Unfit from error


def _run(node: Node) -> Any:
    """The value of a node from those of its inputs."""
    fill = lambda n: n.meta["val"]  # noqa: E731
    return node.target(*torch.fx.map_arg(node.args, fill), **torch.fx.map_arg(node.kwargs, fill))  # type: ignore[operator]
