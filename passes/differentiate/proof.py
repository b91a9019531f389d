"""The proof of the joint graph: what the forward proof has found is carried over, and the cotangents are proven."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis, fact

from ..independence import Result, prove_joint


def carried(values: Mapping[Node, Sequence[Any]]) -> dict[Node, Result]:
    """What is known of the values of the forward, by the nodes that hold them.

    values: of each node of the forward, the nodes of its tensors.
    """
    found: dict[Node, Result] = {}
    for node, holders in values.items():
        of = fact(node)
        axes = of.samples if isinstance(of.samples, tuple) else itertools.repeat(of.samples)
        for holder, axis in zip(holders, axes, strict=False):
            if isinstance(holder, Node):
                found.setdefault(holder, Result(axis, of.uniform, of.index, of.reduced, of.structure))
    return found


def prove_cotangents(gm: GraphModule, traced: GraphModule, known: dict[Node, Result]) -> None:
    """The samples lie in every cotangent where they lie in the value it belongs to; where that is the same for all
    samples, so that any order of the rows of a dim would be right, they lie in it as in the cotangent.

    known: what the forward proof has found of nodes of the joint graph.
    """
    named = {n.name: n for n in gm.graph.nodes}
    by_output = {spec.name: node for spec, node in facts.returned(gm)}
    for node in facts.placeholders(traced):
        given = facts.input_spec(node)
        if given.kind == "tangent" and (output := by_output[given.name]) is not None:
            known[node] = Result(fact(output).samples)
    wanted: list[tuple[Node, Node, SampleAxis | None]] = []
    for spec, entry in facts.returned(traced):
        if spec.kind not in ("cotangent", "input_gradient") or entry is None:
            continue
        name, _, place = spec.name.rpartition(".") if spec.kind == "cotangent" else (spec.name, "", "0")
        axes = fact(named[name]).samples
        wanted.append((entry, named[name], axes[int(place)] if isinstance(axes, tuple) else axes))
    # What is the same for all samples may be repeated, and meet rows in any order, without a trace in the forward
    rows = facts.graph_facts(gm).rows
    free = [each for each in wanted if _is_in_any_order(*each[1:]) or (not rows and each[2] and fact(each[1]).uniform)]
    try:
        found = prove_joint(traced, known, wanted)
    except (SamplesMixed, NotYetSupported):
        if any(map(is_foreign, traced.graph.nodes)):
            raise
        wanted, found = free, prove_joint(traced, known, free)
    for (_, value, before), axis in zip(wanted, found, strict=True):
        if _is_in_any_order(value, before):
            axes = fact(value).samples
            moved = tuple(axis if a == before else a for a in axes) if isinstance(axes, tuple) else axis
            facts.update(value, samples=moved)


def _is_in_any_order(node: Node, axis: SampleAxis | None) -> bool:
    """Whether the forward does not say in which order a value, the same for all, holds its samples."""
    return fact(node).uniform and axis is not None and axis.outer * axis.inner > 1


def is_foreign(node: Node) -> bool:
    """Whether the op's backward is somebody else's than torch's.

    The derivative of an op that keeps samples apart keeps them apart, and torch's own formulas compute derivatives. A
    proof that does not find its way through one of them (it may number rows, or read strides) is no reason to refuse.
    Backwards of custom functions are proven with their forward.
    """
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _OWN


_OWN = ("aten", "prims", "psg_fx", "psg_fx_functions")
