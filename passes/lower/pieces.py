"""Plain torch functions written into a graph piece by piece: what was traced once is copied the next time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.same_op import computation
from psg_fx.graph.tracing import trace

Piece = Callable[..., tuple[list[torch.Tensor], Any]]
"""Tensors -> the results, and a note that holds for every copy."""


class Pieces:
    """Writes pieces in front of the output of one graph.  What is there already is not written again."""

    def __init__(self, gm: GraphModule, written_by: str) -> None:
        self._gm, self._written_by = gm, written_by
        self._traced: dict[Hashable, tuple[GraphModule, Any]] = {}
        self._seen: dict[Hashable, Node] = {}
        self._sizes: dict[sympy.Expr, Node] = {}
        self._constants = 0
        self._pieces: list[list[Node]] = []

    def write(self, piece: Piece, inputs: Sequence[Node], key: Hashable = None) -> tuple[list[Node], Any]:
        """Nodes for the results of `piece` on `inputs` (at least one), and its note.

        key: pieces with equal ones are the same function; on inputs of the same shapes and strides their nodes are
        copies.  None: like no other.
        """
        values = [node.meta["val"] for node in inputs]
        whole = (key, *(_metadata(value) for value in values))
        if key is None or whole not in self._traced:
            self._traced[whole] = self._trace(piece, values)
        traced, note = self._traced[whole]
        return self._copy(traced, inputs), note

    def settle(self) -> None:
        """Move each piece behind the last value that it reads: what is read by it alone is needed no longer, and in a
        graph of alike layers what is computed of a layer's gradients stands beside the layer's backward.
        """
        written = {node for piece in self._pieces for node in piece}
        there = [node for node in self._gm.graph.nodes if node not in written and node.op != "output"]
        place = {node: i for i, node in enumerate(there)}
        inputs = sum(node.op == "placeholder" for node in there)
        behind: dict[int, list[Node]] = {}
        for piece in self._pieces:
            own = set(piece)
            read = [n for node in piece for n in node.all_input_nodes if n not in own]
            last = max([inputs - 1, *(place[n] for n in read)])
            place.update(dict.fromkeys(piece, last))
            behind.setdefault(last, []).extend(piece)
        for last, nodes in behind.items():
            after = there[last]
            for node in nodes:
                after.append(node)
                after = node

    def _trace(self, piece: Piece, values: list[torch.Tensor]) -> tuple[GraphModule, Any]:
        notes: list[Any] = []

        def results(*tensors: torch.Tensor) -> list[torch.Tensor]:
            found, note = piece(*tensors)
            notes[:] = [note]
            return found

        with torch.no_grad():
            traced = trace(results, values)
        traced.graph.eliminate_dead_code()
        return traced, notes[0]

    def _copy(self, traced: GraphModule, inputs: Sequence[Node]) -> list[Node]:
        mapping: dict[Node, Node] = dict(zip(facts.placeholders(traced), inputs, strict=True))
        self._pieces.append([])
        with self._gm.graph.inserting_before(self._gm.graph.output_node()):
            for node in traced.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    mapping[node] = self._node(traced, node, mapping)
        (results,) = traced.graph.output_node().args
        return [mapping[node] for node in results]  # type: ignore[union-attr,index]

    def _node(self, traced: GraphModule, node: Node, mapping: dict[Node, Node]) -> Node:
        """The node in the graph, or an equal one that is there."""
        value = node.meta.get("val")
        size = facts.expr(value) if isinstance(value, torch.SymInt) else None
        if size in self._sizes:
            return self._sizes[size]
        copy = self._gm.graph.node_copy(node, mapping.__getitem__)
        copy.meta["psg_fx_pass"] = self._written_by
        if node.op == "get_attr":
            copy.target = self._constant(getattr(traced, str(node.target)))
        if size is not None:
            self._sizes[size] = copy
        key = computation(copy)
        if key is None or self._seen.setdefault(key, copy) is copy:
            self._pieces[-1].append(copy)
            return copy
        self._gm.graph.erase_node(copy)
        return self._seen[key]

    def _constant(self, value: Any) -> str:
        self._constants += 1
        name = f"_{self._written_by}_constant_{self._constants}"
        setattr(self._gm, name, value)
        return name


def _metadata(value: torch.Tensor) -> Hashable:
    """What tracing can depend on."""
    strides = tuple(facts.expr(stride) for stride in value.stride())
    return (facts.shape(value), strides, facts.expr(value.storage_offset()), value.dtype, value.device)
