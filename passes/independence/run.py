"""One node of a graph, run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node, map_arg


def run_node(node: Node) -> Any:
    """The value of a node from those that its inputs have in the graph."""
    return _run(node, {n: n.meta["val"] for n in node.all_input_nodes}, {})


def run_on_cpu(node: Node, values: Mapping[Node, Any]) -> Any:
    """The value of a node from these of its inputs, wherever the graph makes it."""
    return _run(node, values, {"device": "cpu"} if "device" in node.kwargs else {})


def _run(node: Node, values: Mapping[Node, Any], options: Mapping[str, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **{**kwargs, **options})  # type: ignore[operator]
