"""A plan as nodes of a graph, written group by group: what is alike is traced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx.algebra.ask import Phase
from psg_fx.algebra.asks import FLOORS
from psg_fx.algebra.members import COUNT
from psg_fx.algebra.network import Kind, Source
from psg_fx.graph import facts
from psg_fx.graph.facts import OutputSpec
from psg_fx.graph.nodes import rename
from psg_fx.graph.slices import SLICES, Slices
from psg_fx.planner.evaluate import Evaluator
from psg_fx.planner.groups import Group, groups
from psg_fx.planner.plan import Plan
from psg_fx.quantities.base import Quantity, Results, Weights
from psg_fx.quantities.own import finished, no_input, no_weights, weights_of

from .pieces import Pieces

NodesByName = Mapping[str, Mapping[str, Node]]
"""Ask or weights -> parameter -> node."""

_Note = tuple[list[tuple[str, int]], list[tuple[str, int]]]
"""What the results of a group are (key), and its contractions (kind), each with the index of its parameter."""


class Writer:
    """Writes a plan: norms first, then the weights that follow from them, then what reads weights.

    batch: an input with a row for each sample that is planned for, which may be a group.  samples: one with a row for
    each sample.  known: what leaves and prefixes may read, by name.  extras: the further inputs of
    quantities.  leaving_out: the weights whose zeros leave samples out.
    """

    def __init__(
        self, gm: GraphModule, plan: Plan, batch: Node, samples: Node, known: Mapping[Source, Node],
        extras: Mapping[str, Node], leaving_out: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.leaving_out = leaving_out
        self.plan, self.batch, self.samples, self.known, self.extras = plan, batch, samples, known, extras
        self.gm, self.pieces = gm, Pieces(gm, "lower")
        self.groups = groups(plan)
        self.found: dict[str, dict[str, Node]] = {key: {} for key in (*(ask.key for ask in plan.asks), FLOORS)}
        self.contractions = 0

    def results(self, quantities: Sequence[Quantity]) -> list[tuple[OutputSpec, Node]]:
        """Every field of every quantity.  Weighted sums of the last layers come first, as in a backward pass: they are
        often the largest, and what a library needs beside such a sum is free again before there are many.
        """
        handed = [self._first(group) for group in self.groups]
        if (slices := SLICES.found(self.gm)) is not None:
            self._add_slices(slices)
        weights = self._weights(quantities)
        for group, nodes in reversed(list(zip(self.groups, handed, strict=True))):
            self._second(group, nodes, weights)
        fields = self._fields(quantities, weights)
        if not self.plan.need:  # a budget is kept in the order in which its memory was counted
            self.pieces.settle()
        return fields

    def _first(self, group: Group) -> list[Node]:
        """Everything that needs no weights; what the second phase reads of it."""

        def piece(carrier: torch.Tensor, *values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
            evaluator = self._evaluator(group, carrier, values)
            evaluator.first()
            totals = [evaluator.env[Source(Kind.GRADS, name)] for name in group.totals]
            return _returned(evaluator, group, [*(evaluator.known[key] for key in group.handed), *totals])

        inputs = [self.batch, *self._inputs(group)]
        return self._take(*self.pieces.write(piece, inputs, ("first", group.signature)), group)

    def _add_slices(self, slices: Slices) -> None:
        """Norms and products of sliced parameters are sums over processes, of many at once; those of all others are
        found by each.
        """
        from psg_fx.ops.across import sum_across

        asked = {ask.key for ask in self.plan.asks if ask.adds_up} | {FLOORS}
        parts = [(key, name) for key in self.found if key in asked for name in self.found[key]]
        alike: dict[Any, list[tuple[str, str]]] = {}
        for key, name in (part for part in parts if part[1] in slices.parameters):
            value = self.found[key][name].meta["val"]
            alike.setdefault((facts.shape(value), value.dtype), []).append((key, name))

        def piece(*values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
            return list(sum_across(torch.stack(values), slices.group).unbind()), None

        for places in alike.values():
            nodes, _ = self.pieces.write(piece, [self.found[key][name] for key, name in places])
            for (key, name), node in zip(places, nodes, strict=True):
                self.found[key][name] = node

    def _second(self, group: Group, handed: list[Node], weights: NodesByName) -> None:
        """The weighted sums."""
        asks = [ask for ask in self.plan.asks if ask.phase >= Phase.WEIGHTED]
        wanted = [(ask.reads, name) for ask in asks for name in group.names]
        kept = [*group.handed, *group.totals]

        def piece(carrier: torch.Tensor, *values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
            given, rest = values[: len(wanted)], values[len(wanted) :]
            known = dict(zip(kept, rest, strict=False))
            evaluator = self._evaluator(group, carrier, rest[len(kept) :])
            evaluator.known |= {key: known[key] for key in group.handed}
            evaluator.env |= {Source(Kind.GRADS, name): known[name] for name in group.totals}
            evaluator.second(_by_name(dict(zip(wanted, given, strict=True))))
            return _returned(evaluator, group, [])

        if missing := [name for name, _ in wanted if name and name not in weights]:
            raise no_weights(missing[0])
        if asks:
            inputs = [self.batch, *(weights[w][name] for w, name in wanted), *handed, *self._inputs(group)]
            self._take(*self.pieces.write(piece, inputs, ("second", group.signature)), group)

    def _evaluator(self, group: Group, carrier: torch.Tensor, values: Sequence[torch.Tensor]) -> Evaluator:
        env = dict(zip(group.sources, values, strict=True))
        plan = dataclasses.replace(self.plan, parameters=group.parameters)
        return Evaluator(plan, env, _count(self.batch, carrier), carrier.device, leaving_out=self.leaving_out)

    def _inputs(self, group: Group) -> list[Node]:
        if missing := [source.name for source in group.sources if source not in self.known]:
            raise no_input(missing[0])
        return [self.known[source] for source in group.sources]

    def _take(self, nodes: list[Node], note: _Note, group: Group) -> list[Node]:
        """Keep the results of a group and name its contractions; whatever else it returned."""
        results, contractions = note
        rest = iter(nodes)
        for key, index in results:
            self.found[key][group.names[index]] = next(rest)
        for kind, index in contractions:
            node, name = next(rest), group.names[index]
            facts.update(node, contracts=name)
            rename(node, f"{name}_{kind}_{self.contractions}")
            self.contractions += 1
        return list(rest)

    def _asked(self) -> NodesByName:
        """What is found, parameters in the plan's order."""
        names = [parameter.gradient.name for parameter in self.plan.parameters]
        return {key: {name: of[name] for name in names if name in of} for key, of in self.found.items()}

    def _weights(self, quantities: Sequence[Quantity]) -> NodesByName:
        """The weights that quantities make of the norms and of their further inputs."""

        names = [parameter.gradient.name for parameter in self.plan.parameters]

        def function(counts: Counts, results: Results, extras: Mapping[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
            found = weights_of(quantities, results, extras, names, counts.rows)
            return {(weights, name): of[name] for weights, of in found.items() for name in names}

        return _by_name(self._written(function, self._asked(), self.extras))

    def _fields(self, quantities: Sequence[Quantity], weights: NodesByName) -> list[tuple[OutputSpec, Node]]:
        """What quantities make of the results."""

        def function(counts: Counts, results: Results, weights: Weights) -> dict[Any, torch.Tensor]:
            return _finished(quantities, results, weights, counts)

        return list(self._written(function, self._asked(), weights).items())

    def _written(self, function: Callable[..., dict[Any, torch.Tensor]], *named: Any) -> dict[Any, Node]:
        """`function(counts, *named)` with tensors in place of nodes, as nodes."""
        flat, spec = pytree.tree_flatten(named)
        total = self.extras.get(COUNT.name)
        inputs = list(dict.fromkeys([self.batch, self.samples, *([] if total is None else [total]), *flat]))

        def piece(*values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
            tensors = dict(zip(inputs, values, strict=True))
            filled = pytree.tree_unflatten([tensors[node] for node in flat], spec)
            rows = _count(self.batch, tensors[self.batch]) if total is None else tensors[total]
            found = function(Counts(rows, _count(self.samples, tensors[self.samples])), *filled)
            return list(found.values()), list(found)

        nodes, keys = self.pieces.write(piece, inputs)
        return dict(zip(keys, nodes, strict=True))


class Counts(NamedTuple):
    """What means are over: the number of samples, or of groups as a tensor; and how many samples there are."""

    rows: Any
    samples: Any


def _count(node: Node, value: torch.Tensor) -> Any:
    """The number of rows of an input."""
    return value.shape[facts.input_spec(node).samples or 0]


def _by_name(flat: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (key, name), value in flat.items():
        found.setdefault(key, {})[name] = value
    return found


def _returned(evaluator: Evaluator, group: Group, others: list[torch.Tensor]) -> tuple[list[torch.Tensor], _Note]:
    """The results, the contractions and other tensors of a group, and the note on them."""
    results = {(key, group.names.index(name)): t for key, of in evaluator.results.items() for name, t in of.items()}
    named = [tensor for _, _, tensor in evaluator.named]
    contractions = [(kind, group.names.index(name)) for name, kind, _ in evaluator.named]
    return [*results.values(), *named, *others], (list(results), contractions)


def _finished(
    quantities: Sequence[Quantity], results: Results, weights: Weights, counts: Counts
) -> dict[OutputSpec, torch.Tensor]:
    """Every field, from results and weights."""
    found: dict[OutputSpec, torch.Tensor] = {}
    asked = {quantity.field for quantity in quantities}
    for quantity in quantities:
        count = counts.samples if quantity.over_samples else counts.rows
        for field, value in finished(quantity, results, weights, count).items():
            if field != quantity.field and field in asked:
                continue  # a by-product (the norms of a clipped sum) gives way to the quantity that is asked for it
            entries = value.items() if isinstance(value, Mapping) else [("", value)]
            found.update({OutputSpec("answer", name, field): tensor for name, tensor in entries})
    return found
