"""Values that only the model's buffers read: statistics of the batch that lead to no loss and no output."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from psg_fx.graph import facts

_LOGS = ("buffer", "written", "check")


def logged(gm: GraphModule) -> set[Node]:
    """The nodes that lead to new values of buffers and attributes, or to checks, alone: there samples may mix.

    A buffer holds, after a step, what one ordinary forward of the batch leaves there; only what leads to a loss or an
    output has to be that of each sample alone.
    """
    specs = facts.graph_facts(gm).outputs
    if not any(spec.kind in _LOGS for spec in specs):
        return set()
    entries = list(zip(facts.outputs(gm), specs, strict=True))
    kept = [n for n, spec in entries if isinstance(n, Node) and spec.kind in _LOGS]
    read = [n for n, spec in entries if isinstance(n, Node) and spec.kind not in _LOGS]
    dead = [n for n in gm.graph.nodes if not n.users and n.op == "call_function"]
    return facts.ancestors(kept) - facts.ancestors([*read, *dead])
