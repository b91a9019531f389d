"""The joint graph as it is written, segment by segment."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.facts import InputSpec
from psg_fx.graph.nodes import call
from psg_fx.source import provenance
from psg_fx.torch_private.graphs import module_without_code

from .segments import Segment
from .vjp import Vjp


class Written:
    """A graph of forward and backward, without outputs so far.

    made: for each node of the forward graph, the node of its tensor or size.  values: the nodes of all its tensors.
    cotangents: of what nodes make, by node and place.  tangents: the further inputs.
    """

    def __init__(self, forward: GraphModule, tangents: Sequence[str], like: Sequence[Tensor]) -> None:
        self.gm = module_without_code({}, Graph())
        self.made: dict[Node, Any] = {}
        self.values: dict[Node, list[Any]] = {}
        self.cotangents: dict[tuple[Node, int], Node] = {}
        self._sizes: dict[sympy.Expr, Node] = {}
        self._copies: dict[Segment, dict[Node, Any]] = {}
        self._constants = count()
        for node in facts.placeholders(forward):
            value = node.meta["val"]
            detached = value.detach() if isinstance(value, Tensor) else value
            self.made[node] = self._input(node.name, detached, facts.input_spec(node))
            self.values[node] = [self.made[node]] if isinstance(value, Tensor) else []
        given = zip(tangents, like, strict=False)
        self.tangents = [self._input(f"tangent_{n}", value, InputSpec("tangent", n)) for n, value in given]

    def sizes(self, nodes: Iterable[Node]) -> None:
        """Sizes that follow from those of the inputs."""
        self._copy(nodes, self.made)

    def forward(self, segment: Segment, vjp: Vjp) -> None:
        """The forward of a segment."""
        given = (self.made[n] for n in segment.reads)
        there = self._copies[segment] = dict(zip(facts.placeholders(vjp.gm), given, strict=True))
        self._copy(vjp.forward, there)
        for node, values in zip(segment.nodes, vjp.values, strict=True):
            found = [there[value] if isinstance(value, Node) else value for value in values]
            if isinstance(node.meta.get("val"), (Tensor, torch.SymInt)):
                self.made[node] = found[0]
            self.values[node] = [] if isinstance(node.meta.get("val"), torch.SymInt) else found
        if vjp.segment is not segment:
            for node, origin in vjp.origins.items():
                there[node].meta |= provenance(segment.nodes[origin])

    def backward(self, segment: Segment, vjp: Vjp, seeds: Sequence[Node]) -> Mapping[Node, Node]:
        """The backward of a segment whose forward is there: the cotangents of what it reads."""
        there = self._copies.pop(segment)
        there.update(zip(vjp.seeds, seeds, strict=True))
        self._copy(vjp.backward, there)
        self.cotangents.update({(segment.nodes[place], k): there[n] for (place, k), n in vjp.taps.items()})
        return {segment.reads[i]: there[n] for i, n in vjp.reads.items()}

    def add(self, one: Node, other: Node) -> Node:
        """The sum of two cotangents."""
        return call(self.gm, torch.ops.aten.add.Tensor, one, other)

    def _input(self, name: str, value: Any, spec: InputSpec) -> Node:
        made = self.gm.graph.placeholder(name)
        made.meta |= {"val": value, "psg_fx_input": spec}
        return made

    def _copy(self, nodes: Iterable[Node], there: dict[Node, Any]) -> None:
        """Copies; a size that is there already is not computed again."""
        for node in nodes:
            value = node.meta.get("val")
            size = facts.expr(value) if isinstance(value, torch.SymInt) else None
            if size is not None and size in self._sizes:
                there[node] = self._sizes[size]
                continue
            there[node] = copy = self.gm.graph.node_copy(node, there.__getitem__)
            if node.op == "get_attr":
                copy.target = f"_joint_constant_{next(self._constants)}"
                constant = operator.attrgetter(str(node.target))(node.graph.owning_module)
                setattr(self.gm, copy.target, constant)
            if size is not None:
                self._sizes[size] = copy
