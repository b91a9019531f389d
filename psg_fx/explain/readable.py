"""A graph as readable Python."""

from __future__ import annotations

import re

from torch.fx import Graph, GraphModule

from psg_fx.graph import facts
from psg_fx.source import source_line

_COMMENT = "# File: code:1 in _, code: "


_NO_COMMENT = "# No stacktrace found for following nodes"


_FREED = re.compile(r";  (\w+ = )+None$")


def readable(gm: GraphModule) -> str:
    """The graph as Python with shapes: B for the batch size, and above the ops the line of the user's code."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        line = source_line(node)
        node.stack_trace = f'File "code", line 1, in _\n    {line}' if line else None
    module = GraphModule(gm, graph, "PerSample")
    text: str = module.print_readable(print_output=False, include_stride=False, include_device=False)
    if facts.KEY in gm.meta:
        text = re.sub(rf"\b{facts.graph_facts(gm).batch}\b", "B", text)
    lines = [line for line in text.strip().splitlines() if line.strip() != _NO_COMMENT]
    return "\n".join(_FREED.sub("", line.replace(_COMMENT, "# ")).rstrip() for line in lines)
