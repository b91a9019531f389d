"""When two nodes compute the same."""

from __future__ import annotations

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
    key = (node.target, _typed(node.args), tuple((k, _typed(v)) for k, v in sorted(node.kwargs.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _typed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_typed(v) for v in value)
    if isinstance(value, slice):
        return ("slice", _typed(value.start), _typed(value.stop), _typed(value.step))
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)  # 0.0 == -0.0


def merge_equal(gm: GraphModule) -> None:
    """Common sub-expressions, by target and arguments.  Random ops stay apart."""
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        key = computation(node)
        if key is None:
            continue
        if key in seen:
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
        else:
            seen[key] = node


def alike(gm: GraphModule) -> dict[Node, int]:
    """A number for each node, the same for nodes that compute the same."""
    numbers: dict[Any, int] = {}
    found: dict[Node, int] = {}
    for node in gm.graph.nodes:
        key: Any = node
        if node.op == "call_function" and not draws(node):
            inputs = {n: i for i, n in enumerate(node.all_input_nodes)}
            plain = torch.fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
            key = (node.target, repr(plain), tuple(found[n] for n in inputs))
        found[node] = numbers.setdefault(key, len(numbers))
    return found


def draws(node: Node) -> bool:
    """Whether an op draws at random.  Attention is said to, also where its dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return not ("dropout_p" in names and given.get("dropout_p", 0.0) == 0.0)
