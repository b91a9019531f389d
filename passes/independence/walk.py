"""The walk over the graph: apply each op's rule, and follow values that are reduced over the samples."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Set

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import InternalError, PsgError
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.sample_axis import Misfit, single
from psg_fx.source import locate, source_line
from psg_fx.tensors import SYMBOLS

from .arguments import op_name, symbolic_sizes
from .logged import logged
from .ragged.row_values import RowValues
from .refused import NUMBERS, NUMBERS_FIX, mixed, no_place
from .rules import (  # noqa: F401  (they fill the table)
    across,
    along,
    contractions,
    elementwise,
    factories,
    functions,
    gradients,
    indexing,
    joins,
    layer_gradients,
    recurrent,
    reductions,
    views,
    windows,
)
from .table import SampleRule, find
from .unruled import no_graph_inside, refuse_effects, without_rule
from .values import REDUCED, Op, Result, tensors

_ROW_BY_ROW = ("embedding", "contraction", "along another dim", "trailing dims")
"""Proofs of ops that make each row of the samples of one row of each input: rows that are the same give the same."""

_COUNT = "the number of samples is an int among the inputs whose batch_dim is 0; keep other numbers tensors"
_STATISTIC = "a statistic over the batch makes each sample's loss depend on the others; take it within a sample"


def prove_part(gm: GraphModule, given: Mapping[Node, Result]) -> list[Result]:
    """What is known of the outputs of a graph inside of an op, from what is known of its inputs."""
    prover = Prover(gm, given)
    prover.walk()
    return [prover.known[n] if isinstance(n, Node) else Result() for n in facts.outputs(gm)]


class Prover:
    """State of the walk: what is known of each node, and where a reduced value was first reduced.

    given: what is known of nodes beforehand.  refusals: what to say of nodes, if they are refused.
    """

    def __init__(
        self, gm: GraphModule, given: Mapping[Node, Result] | None = None,
        refusals: Mapping[Node, PsgError] | None = None,
    ) -> None:  # fmt: skip
        self.gm = gm
        self.given, self.refusals = given or {}, refusals or {}
        self.batch: sympy.Symbol = facts.graph_facts(gm).batch
        counts = facts.graph_facts(gm).rows
        self.rows = RowValues(gm) if counts else None
        self.known: dict[Node, Result] = {}
        self.origin: dict[Node, Node] = {}
        self.notes: list[str] = []
        self.logged = logged(gm)
        self.statistics: set[Node] = set()  # those of the logged nodes that know the samples

    def walk(self, skip: Set[Node] = frozenset()) -> None:
        """Visit all nodes in order, but those of `skip` (and all that is computed from them)."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                break
            if node in skip:
                continue
            if node in self.logged and self.is_statistic(node):
                self.statistics.add(node)
                self.known[node] = Result()
                facts.update(node, samples=None, reduced=False, proof="logged")
                continue
            self.settle(node)

    def settle(self, node: Node) -> Result:
        """Find out what is known of a node, check it, and set its fact."""
        try:
            found, proof = self.visit(node)
            self.check(node, found)
        except PsgError as error:
            raise self.refusals.get(node, error) from error.__cause__
        self.note(node, found)
        facts.update(
            node, samples=found.axes, reduced=found.reduced, uniform=found.uniform, index=found.index,
            structure=found.structure, proof=proof,
        )  # fmt: skip
        return found

    def note(self, node: Node, found: Result) -> None:
        """Keep what is known of a node, and where it was first reduced."""
        self.known[node] = found
        if found.reduced:
            inputs = [self.origin[n] for n in node.all_input_nodes if n in self.origin]
            self.origin[node] = inputs[0] if inputs else node

    def is_statistic(self, node: Node) -> bool:
        """Whether a logged value depends on the samples."""
        return node in self.statistics or any(
            n in self.statistics or self.known[n].reduced or self.known[n].axes is not None
            for n in node.all_input_nodes
        )

    def visit(self, node: Node) -> tuple[Result, str]:
        """What is known of the value of a node, and the name of the proof."""
        if node in self.given:
            return self.given[node], "input"
        if node.op == "placeholder":
            spec = facts.input_spec(node)
            dim = spec.samples if spec.rows is None else spec.rows
            return Result(None if dim is None else SampleAxis(dim), structure=spec.structure), "input"
        if node.op == "get_attr":
            return Result(), "constant"
        if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise no_graph_inside(node)
        if node.target is operator.getitem:
            return self.getitem(node)
        if not tensors(node.meta.get("val")):
            return self.number(node), "number"
        return self.operate(node)

    def getitem(self, node: Node) -> tuple[Result, str]:
        """One output of an op with several."""
        source, index = node.args
        assert isinstance(source, Node)
        assert isinstance(index, int)
        found = self.known[source]
        if found.structure and self.rows is not None:
            self.rows.parts.note(Op(node, self.batch, self.known, prove_part))
            return self.rows.structure(node), "structure"
        axes = found.axes[index] if isinstance(found.axes, tuple) else found.axes
        return Result(axes, found.uniform, found.index, found.reduced, pairs=found.pairs), facts.fact(source).proof

    def number(self, node: Node) -> Result:
        """Sizes and asserts; a number read out of a tensor (`.item()`) that knows the samples is refused."""
        refuse_effects(node)
        value = node.meta.get("val")
        if isinstance(value, (*SYMBOLS, int, float)) and "sym_" not in op_name(node):
            for source in node.all_input_nodes:
                known = self.known[source]
                if known.structure:
                    raise mixed(node, f"it reads one number out of %{source.name}, that of all samples", _COUNT)
                if isinstance(source.meta.get("val"), torch.Tensor) and (known.axes is not None or known.reduced):
                    raise mixed(node, f"it reads one number out of the samples in %{source.name}",
                                "keep it a tensor: no .item(), no int() of a tensor")  # fmt: skip
        return Result()

    def operate(self, node: Node) -> tuple[Result, str]:
        """An op with tensor outputs."""
        rule = find(node.target)
        inputs = [n for n in node.all_input_nodes if n in self.known]
        if self.rows is not None:
            seen = self.rows.visit(Op(node, self.batch, self.known, prove_part))
            if seen is not None:
                return seen
        if rule is not None and rule.shapes_only and not self.like_reduced(node, inputs):
            return self.apply(node, rule), rule.proof
        carrying = [n for n in inputs if self.known[n].axes is not None]
        reduced = [n for n in inputs if self.known[n].reduced]
        if reduced and carrying:
            self.meet(node, carrying[0], reduced[0])
        if reduced:
            return REDUCED, "reduced"
        if not carrying and not self.knows_batch(node):
            return Result(), "no samples"
        if rule is None:
            self.refuse_numbers(node)
            known = {n: self.known[n] for n in inputs}
            return without_rule(Op(node, self.count(node, False), known, prove_part), self.notes)
        return self.apply(node, rule), rule.proof

    def like_reduced(self, node: Node, inputs: list[Node]) -> bool:
        """Whether a factory takes its shape from a reduced value (`zeros_like(loss)`): then it is per sample too."""
        if not any(self.known[n].reduced for n in inputs):
            return False
        return op_name(node).endswith("_like") or not self.knows_batch(node)

    def apply(self, node: Node, rule: SampleRule) -> Result:
        """A rule's answer as a Result."""
        count = self.count(node, rule.shapes_only)
        op = Op(node, count, self.known, prove_part)
        sizes = symbolic_sizes(node, count)
        if sizes and not rule.sizes:
            raise op.refuse(f"its argument %{sizes[0].name} depends on the batch size")
        if not rule.index and not rule.shapes_only:
            self.refuse_numbers(node)
        answer = rule.apply(op)
        found = self.complete(node, answer if isinstance(answer, Result) else Result(answer))
        if rule.proof in _ROW_BY_ROW and op.sampled() and all(v.found.uniform for v in op.sampled()):
            found = dataclasses.replace(found, uniform=True)
        if found.reduced and self.rows is not None:
            self.rows.refuse_reduced(node, count)
        empty = found.axes is None or (isinstance(found.axes, tuple) and not any(found.axes))
        if empty and not found.reduced and not found.uniform and not rule.shapes_only and op.sampled():
            raise op.unsupported("no dim of its output holds the samples of its inputs")
        return found

    def count(self, node: Node, shapes_only: bool) -> sympy.Symbol:
        """The batch size, as the rule of an op sees it: the number of rows, where these are what it keeps apart."""
        if self.rows is None:
            return self.batch
        return self.rows.symbol(Op(node, self.batch, self.known, prove_part), shapes_only)

    def refuse_numbers(self, node: Node) -> None:
        """The numbers of the samples, `arange(B)`, may only pick rows."""
        if any(self.known[n].index for n in node.all_input_nodes if n in self.known):
            raise mixed(node, NUMBERS, NUMBERS_FIX)

    def complete(self, node: Node, found: Result) -> Result:
        """One axis for an op with several outputs stands for each of them that knows the batch."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)) and isinstance(found.axes, SampleAxis):
            outs = [t if isinstance(t, torch.Tensor) and self.symbolic(t) else None for t in value]
            axes = tuple(found.axes if t is not None else None for t in outs)
            return Result(axes, found.uniform, found.index, found.reduced)
        return found

    def symbolic(self, tensor: torch.Tensor) -> bool:
        """Whether the batch size occurs in the shape."""
        counts = {self.batch} if self.rows is None else self.rows.counts
        return any(counts & size.free_symbols for size in facts.shape(tensor))

    def counted(self, tensor: torch.Tensor) -> sympy.Symbol:
        """What the samples or rows of a value are counted by."""
        if self.rows is None:
            return self.batch
        found = self.rows.counts & {s for size in facts.shape(tensor) for s in size.free_symbols}
        return found.pop() if len(found) == 1 else self.batch

    def knows_batch(self, node: Node) -> bool:
        """Whether the batch size occurs in the shape of an output."""
        return any(self.symbolic(t) for t in tensors(node.meta["val"]))

    def meet(self, node: Node, carrying: Node, reduced: Node) -> None:
        """Refuse an op of a value with samples and one reduced over them."""
        origin = self.origin[reduced]
        line = source_line(origin)
        raise mixed(
            node,
            f"%{carrying.name} carries samples, %{reduced.name} is reduced over them by %{origin.name} "
            f"({op_name(origin)}{', ' + line if line else ''})",
            _STATISTIC,
            f"sample {self.known[carrying].axes}" if isinstance(self.known[carrying].axes, SampleAxis) else "",
        )

    def check(self, node: Node, found: Result) -> None:
        """The shape must say the same as the rule: exactly one dim knows B, and it is outer * B * inner."""
        values = node.meta.get("val")
        if found.reduced or found.structure or found.pairs or values is None or not tensors(values):
            return
        each = [values] if isinstance(values, torch.Tensor) else list(values)
        axes = found.axes if isinstance(found.axes, tuple) else (found.axes,) * len(each)
        for tensor, axis in zip(each, axes, strict=True):
            if not isinstance(tensor, torch.Tensor):
                continue
            try:
                layout = single(facts.shape(tensor), self.counted(tensor))
            except Misfit as misfit:
                raise no_place(node, misfit) from None
            wanted = None if axis is None else axis.dim
            if layout.dim != wanted or (axis is not None and layout.factor != axis.outer * axis.inner):
                raise InternalError(
                    f"the independence rule of {op_name(node)} does not fit the shape of its output",
                    where=locate(node),
                    why=f"it says {axis or 'no samples'}, the shape is {tuple(tensor.shape)}",
                    fix="please report this as a bug, with the line above",
                )
