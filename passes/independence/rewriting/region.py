"""A part of a graph that treats each row by itself: proven as it is of samples, with the rows in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.graph.facts import GraphFacts, InputSpec
from psg_fx.graph.nodes import size_of
from psg_fx.source import provenance
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.graphs import module_without_code
from psg_fx.torch_private.modes import enable_python_dispatcher

from ..arguments import numbers_of_samples
from ..run import run_node
from ..values import Result
from ..walk import Prover

ROWS = 11
"""The number of rows with which ops are tried."""


class Unfit(Exception):
    """These rows are not treated one by one, or it cannot be shown."""


@dataclass(frozen=True)
class TimesRows:
    """A number that is `each` times the number of rows."""

    each: int


def row_by_row(
    own: Sequence[Node], inputs: Mapping[Node, tuple[Tensor, int | None]], numbers: Mapping[Node, Any]
) -> dict[Node, Result]:
    """Where the rows lie in each value of the nodes `own` and of their inputs, or `Unfit`.

    inputs: a tensor of the shape that each has with `ROWS` rows, and the dim that has them.  numbers: the value of each
    input that is no tensor.
    """
    graph = Graph()
    copies: dict[Node, Any] = {}
    if not any(place is not None for _, place in inputs.values()):
        raise Unfit
    fakes = symbolic_inputs([t for t, _ in inputs.values()], [place for _, place in inputs.values()])
    with fakes[0].fake_mode, enable_python_dispatcher(), torch.no_grad():  # type: ignore[attr-defined]
        for (n, (_, place)), fake in zip(inputs.items(), fakes, strict=True):
            copies[n] = graph.placeholder(n.name)
            value = torch.empty(fake.shape, dtype=fake.dtype, device=n.meta["val"].device)
            copies[n].meta = {"val": value, "psg_fx_input": InputSpec("input", n.name, place)}
        carrier, dim = next((copies[n], place) for n, (_, place) in inputs.items() if place is not None)
        sizes = {n: _number(graph, carrier, dim, value) for n, value in numbers.items()}
        for node in own:
            copies[node] = graph.node_copy(node, lambda n: sizes[n] if n in sizes else copies[n])
            copies[node].meta = {**provenance(node), "val": _run_or_unfit(copies[node])}
    graph.output(())
    gm = module_without_code({}, graph)
    symbol = facts.expr(carrier.meta["val"].shape[dim])
    if not isinstance(symbol, sympy.Symbol):
        raise Unfit
    if any(numbers_of_samples(node, symbol) for node in graph.nodes):
        raise Unfit  # rows by themselves are not as many
    gm.meta[facts.KEY] = GraphFacts(symbol)
    prover = Prover(gm)
    try:
        prover.walk()
    except PsgError as error:
        raise Unfit from error
    return {node: prover.known[copy] for node, copy in copies.items() if copy in prover.known}


def _number(graph: Graph, carrier: Node, dim: int, value: Any) -> Any:
    """A number in the graph of rows."""
    if not isinstance(value, TimesRows):
        return value
    return size_of(graph, carrier, dim, value.each)


def _run_or_unfit(node: Node) -> Any:
    """The value of a node; ops that need the number of rows refuse in many ways."""
    try:
        return run_node(node)
    except Exception as error:
        raise Unfit from error
