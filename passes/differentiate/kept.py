"""What an op keeps for its backward pass must still be there when that runs: of a buffer that the forward overwrites
afterwards it is not.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view, memory_of
from psg_fx.source import locate


def require_kept(traced: GraphModule) -> None:
    """Refuse a backward pass that reads the old value of a buffer with a new one.

    Autograd keeps the buffer itself, not its value: of a write that it sees it says so in the backward pass, and after
    one through `.data` its gradient is that of another forward.
    """
    returned = facts.returned(traced)
    written = {spec.name for spec, _ in returned if spec.kind == "buffer"}
    buffers = {
        node: spec.name for node in facts.placeholders(traced)
        if (spec := facts.input_spec(node)).kind == "buffer" and spec.target in written
    }  # fmt: skip
    if not buffers:
        return
    forward = facts.ancestors(n for spec, n in returned if n and spec.kind not in ("cotangent", "input_gradient"))
    readers = [n for n in traced.graph.nodes if n.op != "output" and not is_view(n)]
    for buffer, name in buffers.items():
        reads = [n for n in readers if any(memory_of(read) is buffer for read in n.all_input_nodes)]
        if not forward.issuperset(reads):
            raise _overwritten(name, reads[0])


def _overwritten(name: str, reader: Node) -> NotYetSupported:
    return NotYetSupported(
        f"the buffer {name!r} is overwritten after an op has kept it for its backward pass", where=locate(reader),
        why="autograd keeps the buffer itself, so that its gradient would be that of the new value, "
        "or an error where it sees the write",
        fix=f"read a copy: {name}.clone(), or write to it before it is read",
    )  # fmt: skip
