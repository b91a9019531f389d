"""How many bytes a step holds at each of its ops, read off the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch.fx import GraphModule, Node

from psg_fx.graph.lifetimes import bytes_of, lifetimes


@dataclass(frozen=True)
class MemoryProfile:
    """live: for each node in order, the bytes held while it runs.  peak: the first node at which that is largest.
    largest: what is held there, largest first.
    """

    live: list[int]
    peak: int
    largest: list[tuple[Node, int]]


def memory(
    gm: GraphModule, batch: sympy.Symbol, size: int, shown: int = 8, others: Mapping[sympy.Symbol, int] | None = None
) -> MemoryProfile:
    """The values alive at each node for `size` samples; not parameters and inputs, which are there anyway.  others:
    further symbols in their sizes.

    A value lives from the op that makes it to its last reader; results live to the end.  A view lies in the memory of
    its base.  Kernels that are fused keep fewer values, so this is an upper bound but for scratch space in libraries.
    """
    order = list(gm.graph.nodes)
    owner, last = lifetimes(order)
    results = {owner[n] for n in gm.graph.output_node().all_input_nodes}
    held: dict[Node, int] = {}
    live, peak, at_peak = [], 0, list[tuple[Node, int]]()
    for index, node in enumerate(order):
        if node.op == "call_function" and owner[node] is node:
            held[node] = bytes_of(node, batch, size, others)
        live.append(sum(held.values()))
        if not at_peak or live[index] > live[peak]:
            peak, at_peak = index, sorted(held.items(), key=lambda item: -item[1])[:shown]
        for used in {owner[n] for n in (*node.all_input_nodes, node)} - results:
            if last.get(used, index) == index:
                held.pop(used, None)
    return MemoryProfile(live, peak, at_peak)
