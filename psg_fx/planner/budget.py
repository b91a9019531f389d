"""The memory of a step: what a plan needs, and the fastest plan that stays inside a budget.

Counted is what a step allocates: values of forward and backward while they are needed, what contractions keep and use
on the way, and the results; not parameters and inputs, which are there anyway.  A graph that is compiled keeps fewer
values than it has nodes, so the figure is an upper bound but for scratch space inside libraries.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.algebra.ask import Ask, Phase
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.network import BATCH, Source
from psg_fx.algebra.site import READ, read_by_networks
from psg_fx.errors import BadArgument
from psg_fx.graph import facts
from psg_fx.graph.lifetimes import bytes_of, lifetimes
from psg_fx.planner.cost import Device
from psg_fx.planner.expr import LeafExpr, peak_bytes
from psg_fx.planner.plan import Part, Plan, kept_until_norms
from psg_fx.planner.search import plan_step
from psg_fx.tensors import accumulation_dtype

_PRICES = (1.0, 10.0, 1e9)
"""Times the device's price of kept memory (at least `_LEAST`): the last one keeps as little as any tree can."""

_LEAST = 1e-10


@dataclass(frozen=True)
class Budget:
    """limit: bytes that a step may allocate.  parts: whether the outputs of parts of a batch can be put together."""

    limit: int
    parts: bool


def plan_within(
    gm: GraphModule, gradients: Iterable[ParameterGradient], asks: Sequence[Ask], device: Device, batch: sympy.Symbol,
    size: int, budget: Budget, samples: float = 1.0,
) -> Plan:  # fmt: skip
    """The fastest plan for `size` samples at once, or if none fits and parts may be put together, for fewer.

    samples: of the joint graph, for each one that is planned for: those of a group.  The plan serves so many times the
    samples as even their square leaves room for, which is what the products of all pairs take.
    Raises BadArgument with the least budget that would do.
    """
    gradients, least = list(gradients), 0
    for count in _counts(size) if budget.parts else [size]:
        for factor in (0.0, *_PRICES):
            price = None if factor == 0 else max(device.kept, _LEAST) * factor
            plan = plan_step(gradients, asks, device, batch, count, price)
            need = memory_of(gm, plan, round(count * samples)) + (_kept(plan, size - count) if count < size else 0)
            if need <= budget.limit:
                times = math.isqrt(budget.limit // need) if need and count == size else 1
                return replace(plan, part=count * times, cut=size if count < size else 0, need=need)
            least = min(least or need, need)
    raise BadArgument(
        f"a memory budget of {in_words(budget.limit)} is too small", where="transform(memory_budget=...)",
        why=f"the least that would do is {in_words(least)}"
        + ("" if budget.parts else f": a quantity needs all of these {round(size * samples)} samples at once"),
        fix=f"set memory_budget={least}, ask for fewer quantities, or pass fewer samples",
    )  # fmt: skip


def _counts(size: int) -> list[int]:
    """The batch size, its half, its quarter, ... down to one."""
    found = [size]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def memory_of(gm: GraphModule, plan: Plan, size: int) -> int:
    """The most bytes that the step holds at once for `size` samples; gm: the joint graph."""
    order = _in_order(plan)
    networks = [part.contraction.network for part in order]
    last = {source: k for k, network in enumerate(networks) for leaf in network.leaves for source in leaf.sources}
    peak, owners, sizes = _joint(gm, set(last), size)
    ends = {owner: max(last[s] for s, o in owners.items() if o is owner) for owner in set(owners.values())}
    live = sum(sizes[owner] for owner in ends)
    waiting = {key for part in order if part.ask.phase is Phase.AFTER_NORMS for key in kept_until_norms(part.tree)}
    held: dict[int, int] = {}
    for k, part in enumerate(order):
        nodes = part.tree.nodes
        working = peak_bytes(part.tree) - sum(held.get(key, 0) for key in nodes)
        peak = max(peak, live + sum(held.values()) + working)
        held |= {key: node.bytes for key, node in nodes.items() if key in waiting and not isinstance(node, LeafExpr)}
        live += 0 if part.tree.key in held else part.tree.bytes
        live -= sum(sizes[owner] for owner, end in ends.items() if end == k)
    return peak


def _kept(plan: Plan, others: int) -> int:
    """Bytes of what is there while a part is computed: the sums of earlier ones, of half precision in float32, and the
    rows of all other samples, if these are more than a number each.
    """
    total = 0
    for part in (part for p in plan.parameters for part in p.parts if part.ask in plan.asks):
        if BATCH in part.contraction.network.out:
            total += part.tree.bytes * others // plan.size if len(part.tree.axes) > 1 else 0
        else:
            total += part.tree.bytes * accumulation_dtype(part.tree.dtype).itemsize // part.tree.dtype.itemsize
    return total


def _in_order(plan: Plan) -> list[Part]:
    """The parts of all parameters as they are computed."""
    parts = [part for parameter in plan.parameters for part in parameter.parts]
    return sorted(parts, key=lambda part: part.ask.phase >= Phase.WEIGHTED)


def _joint(gm: GraphModule, sources: set[Source], size: int) -> tuple[int, dict[Source, Node], dict[Node, int]]:
    """The most bytes alive at once while the graph runs; the node that owns the memory of each of `sources` that the
    graph computes; and the bytes of every node.
    """
    info, order = facts.graph_facts(gm), list(gm.graph.nodes)
    owner, last = lifetimes(order)
    owners = {source: owner[n] for source, n in read_by_networks(gm).items() if source in sources}
    results = [owner[n] for spec, n in facts.returned(gm) if n is not None and spec.kind not in READ]
    kept = {*owners.values(), *results}
    live, peak, sizes = 0, 0, {}
    for index, node in enumerate(order):
        if node.op == "call_function" and owner[node] is node:
            sizes[node] = bytes_of(node, info.batch, size)
            live += sizes[node]
            peak = max(peak, live)
        live -= sum(sizes.get(n, 0) for n in {owner[n] for n in node.all_input_nodes} - kept if last.get(n) == index)
    return peak, {s: n for s, n in owners.items() if n in sizes}, sizes


def in_bytes(budget: Any, total: int) -> int:
    """Bytes, or a fraction of the device's memory, as bytes."""
    is_number = isinstance(budget, Real) and not isinstance(budget, bool)
    is_fraction = is_number and not isinstance(budget, Integral) and 0 < budget <= 1
    is_count = is_number and budget >= 1 and budget % 1 == 0
    if not (is_fraction or is_count):
        raise BadArgument(
            f"memory_budget={budget!r} is neither bytes nor a fraction", where="transform(memory_budget=...)",
            why="it bounds what a step allocates", fix="an int of bytes, or a float up to 1.0 of the device's memory",
        )  # fmt: skip
    return int(float(budget) * total) if is_fraction else int(budget)


def memory_size(device: torch.device) -> int:
    """Bytes of the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def in_words(count: int) -> str:
    """`1.5 GB`"""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
