"""When two nodes compute the same."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node


def computation(node: Node) -> Hashable | None:
    """What an op computes: equal for equal ops on equal arguments.  None for what must stay apart: random draws, and
    whatever is no op.  Types are part of it, since 1 == 1.0 == True.
    """
    if node.op != "call_function" or draws(node):
        return None
    given = node.kwargs
    key = (node.target, _typed(node.args), tuple([(k, _typed(given[k])) for k in sorted(given)]) if given else ())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _typed(value: Any) -> Any:
    kind = type(value)
    if kind is Node:
        return value
    if isinstance(value, (list, tuple)):
        return tuple([_typed(v) for v in value])
    if kind is slice:
        return (kind, _typed(value.start), _typed(value.stop), _typed(value.step))
    return (kind, repr(value) if kind is float or kind is complex else value)  # 0.0 == -0.0


def merge_equal(gm: GraphModule) -> None:
    """Common sub-expressions, by target and arguments.  Random ops stay apart."""
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        key = computation(node)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)


def alike(gm: GraphModule) -> dict[Node, int]:
    """A number for each node, the same for nodes that compute the same."""
    numbers: dict[Any, int] = {}
    found: dict[Node, int] = {}
    for node in gm.graph.nodes:
        key: Any = node
        if node.op == "call_function" and not draws(node):
            inputs = {n: i for i, n in enumerate(node.all_input_nodes)}
            plain = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{inputs[n]}")  # noqa: B023  (no number)
            key = (node.target, repr(plain), tuple(found[n] for n in inputs))
        found[node] = numbers.setdefault(key, len(numbers))
    return found


def draws(node: Node) -> bool:
    """Whether an op draws at random.  Attention is said to, also where its dropout is 0."""
    if not _may_draw(node.target):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return not ("dropout_p" in names and given.get("dropout_p", 0.0) == 0.0)


def any_draws(gm: GraphModule) -> bool:
    """Whether an op of the graph, or of one inside of it, draws at random."""
    graphs = [part.graph for part in gm.modules() if isinstance(part, GraphModule)]
    return any(node.op == "call_function" and draws(node) for graph in graphs for node in graph.nodes)


def without_unread(gm: GraphModule) -> None:
    """Remove what nobody reads, attention too, of which torch says that it draws."""
    gm.graph.eliminate_dead_code(lambda node: node.is_impure() and (draws(node) or not _may_draw(node.target)))


@functools.lru_cache(1024)
def _may_draw(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
