"""Values that only the model's buffers read: statistics of the batch that lead to no loss and no output."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from psg_fx.graph import facts


def logged(gm: GraphModule) -> set[Node]:
    """The nodes that lead to new values of buffers and attributes, or to checks, alone: there samples may mix.

    A buffer holds, after a step, what one ordinary forward of the batch leaves there; only what leads to a loss or an
    output has to be that of each sample alone, and masks of which the graph holds what it is if they pick nothing.
    """
    left_behind = (*facts.LEFT_BEHIND, *facts.ABOUT_ROWS)
    if not any(spec.kind in left_behind for spec in facts.graph_facts(gm).outputs):
        return set()
    returned = [(spec, n) for spec, n in facts.returned(gm) if isinstance(n, Node)]
    entries = [(spec.kind in left_behind and spec.field != facts.ARM, n) for spec, n in returned]
    kept, read = ([n for left, n in entries if left is of] for of in (True, False))
    dead = [n for n in gm.graph.nodes if not n.users and n.op == "call_function"]
    return facts.ancestors(kept) - facts.ancestors([*read, *dead])
