"""Writes in place where a value and what may be its copy meet.

`h.transpose(0, 1).contiguous()` is a copy, unless the batch has one sample: then the transposed h is contiguous as it
lies, and the two are one.  A write into one of them, `relu_()`, is then seen by whoever reads the other.  A graph holds
the copy.

Some ops give views of what they are given and do not say so (`torch.einsum` of one operand, `torch.meshgrid`), so the
functional form of a graph takes what they give for memory of its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx.graph.at_sizes import SEVERAL, sized_arguments
from psg_fx.source import locate
from psg_fx.tensors import storage_of
from psg_fx.torch_private.ops import MAY_COPY, writes, written_of

aten = torch.ops.aten


def writes_a_copy(gm: GraphModule) -> str:
    """The place of the first write in place into memory that a value has in common with another one for one sample
    only, where that one was there before and is read afterwards; "" for none.  gm: before writes are made functional.
    """
    nodes = list(gm.graph.nodes)
    if not any(writes(node.target) for node in nodes):
        return ""
    meets = _first_that_meets(nodes, _memory(gm, SEVERAL), _memory(gm, 1))
    return "" if meets is None else locate(meets[0])


@dataclass(frozen=True)
class LostWrite:
    """A write in place that the functional form of a graph does not do as torch does."""

    where: str
    why: str
    fix: str = "write it without the underscore (x = x.clamp(..)), or into a copy: x.clone()"


def lost_write(gm: GraphModule) -> LostWrite | None:
    """The first one, where a value is a view and its op does not say so, or windows that hold a part of what they are
    of.  gm: before writes are made functional.
    """
    nodes = list(gm.graph.nodes)
    if not any(writes(node.target) for node in nodes):
        return None
    for node in nodes:
        if any(_leaves_gaps(written) for written in _written(node)):
            return LostWrite(
                locate(node), "it writes through unfold, whose windows do not hold all of what they are of"
            )
    said, true = _memory(gm, SEVERAL, of_hidden_views=False), _memory(gm, SEVERAL)
    if (meets := _first_that_meets(nodes, said, true)) is None:
        return None
    node, view = meets
    name = str(getattr(view.target, "__name__", view.target)).partition(".")[0]
    return LostWrite(
        locate(node),
        f"what {name} gives (%{view.name}) is a view of what it is given, which no graph is told, and both are used",
    )


def _first_that_meets(
    nodes: list[Node], apart: Mapping[Node, Node], together: Mapping[Node, Node]
) -> tuple[Node, Node] | None:
    """The first write into memory that is one in `together` and several in `apart`, where another of these was there
    before and is read afterwards; and the op that makes the later of the two.
    """
    order = {node: i for i, node in enumerate(nodes)}
    shared, last = defaultdict(set), _last_reads(nodes, apart)
    for node in nodes:
        shared[together[node]].add(apart[node])
    for node in nodes:
        for written in _written(node):
            own = apart[written]
            for other in shared[together[written]] - {own}:
                if order[other] < order[node] < last.get(other, -1):
                    return node, max(other, own, key=order.__getitem__)
    return None


def _leaves_gaps(node: Any) -> bool:
    """Whether a node is a view of windows that do not hold all of what they are of."""
    while isinstance(node, Node) and node.op == "call_function" and node.all_input_nodes:
        if node.target is aten.unfold.default:
            x, dim, size, step = node.args
            length = x.meta["val"].shape[dim] if x.meta["val"].ndim else 1  # type: ignore[union-attr]
            if size != step or not isinstance(length, int) or length % step:  # type: ignore[operator]
                return True
        if not (_written(node) or _lies_in_its_input(node, SEVERAL)):
            return False
        node = (_written(node) or node.all_input_nodes)[0]
    return False


def _written(node: Node) -> list[Node]:
    """The arguments that an op writes into."""
    if not writes(node.target):
        return []
    given = written_of(node.target, node.args, node.kwargs)
    return [n for n in pytree.tree_leaves(given) if isinstance(n, Node)]


def _last_reads(nodes: list[Node], memory: Mapping[Node, Node]) -> dict[Node, int]:
    """Memory -> the index of the op that reads it last; what there was before the call is read by the next one."""
    found = {}
    for index, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr"):
            found[node] = len(nodes)
        for used in node.all_input_nodes:
            if memory[used] is not memory[node] or writes(node.target):  # else it is a view
                found[memory[used]] = max(index, found.get(memory[used], 0))
    return found


def _memory(gm: GraphModule, size: int, of_hidden_views: bool = True) -> dict[Node, Node]:
    """The nodes in whose memory values lie for so many samples: through views, writes, and copies that are none."""
    found: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if (source := _hidden_source(node)) is not None:
            found[node] = found[source] if of_hidden_views else node
            continue
        given = _written(node) or node.all_input_nodes
        lies = bool(given) and node.op == "call_function" and _lies_in_its_input(node, size)
        found[node] = found[given[0]] if lies else node
    return found


def _hidden_source(node: Node) -> Node | None:
    """What a node is a view of by an op that does not say so."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(made, Node) or made.target in _NEW or not isinstance(made.target, torch._ops.OpOverload):
        return None
    if any(a.alias_info is not None for a in (*made.target._schema.arguments, *made.target._schema.returns)):
        return None
    place = storage_of(node.meta.get("val"))
    same = (n for n in made.all_input_nodes if place is not None and storage_of(n.meta.get("val")) == place)
    return next(same, None)


_NEW = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten._unsafe_view.default)
"""Ops by which a tensor is one that was just made, or memory that nothing else has."""


def _lies_in_its_input(node: Node, size: int) -> bool:
    """Whether an op returns memory of its first argument, or of the one that it writes into."""
    if node.target is operator.getitem or node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    if node.target is aten.clone.default:  # what `contiguous` and `reshape` are made of under torch.func
        return "memory_format" in node.kwargs and size == 1 and _is_as_asked(node)
    is_view = any(value.alias_info is not None for value in schema.returns)
    return _shares(node, size) if is_view and schema.name.removeprefix("aten::") in MAY_COPY else is_view


def _is_as_asked(node: Node) -> bool:
    """Whether what a clone is made of lies in memory as it asks where there is one sample."""
    (value, *_), kwargs = sized_arguments(node, 1)
    asked = kwargs["memory_format"]
    return asked is not torch.preserve_format and bool(value.is_contiguous(memory_format=asked))


def _shares(node: Node, size: int) -> bool:
    """Whether an op that copies what does not lie in memory as it needs it leaves its argument where it is."""
    args, kwargs = sized_arguments(node, size)
    try:
        found = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # of sizes that are no such numbers
        return size == 1
    return storage_of(found) == storage_of(args[0])
