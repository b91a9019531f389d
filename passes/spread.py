"""spread: which values are equal in all processes, and which are each process's own.

A model that is sliced over processes is one program that each runs on its slices.  A value is equal in all of them, or
each its own: what is computed of something of its own is its own, until a sum or a gather over the processes makes it
one of all (`psg_fx/ops/across.py`).  Where a value that is one of all is used together with what is each process's own,
the gradients of these uses differ, and the gradient of the value is their sum.  So `enter` is put there, whose backward
is that sum.  After this pass every gradient is that of the whole computation: those of sliced parameters are slices of
it, those of all others are whole and equal in every process.  (The types are those of JAX's `shard_map`, where `enter`
is `pvary`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.nodes import is_detach
from psg_fx.graph.same_op import draws
from psg_fx.graph.slices import SLICES, Slices
from psg_fx.graph.stages import Stage
from psg_fx.ops.across import EACH_ITS_OWN, ENTER, JOINING, LIES, ONE_OF_ALL
from psg_fx.source import locate, provenance

from .runner import graph_pass

aten = torch.ops.aten


@graph_pass("spread", before=Stage.CAPTURED, after=Stage.CAPTURED)
def spread(gm: GraphModule, slices: Slices) -> GraphModule:
    """After: what each process has its own of is computed of such values alone; losses are equal in all processes."""
    own: dict[Node, str] = {}
    graded: set[Node] = set()
    entered: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            spec = facts.input_spec(node)
            if spec.kind == "parameter" and spec.target.removeprefix("model.") in slices.parameters:
                own[node] = f"the parameter {spec.name} is sliced"
            if spec.tracked:
                graded.add(node)
        elif node.target is LIES:
            _taken_out(gm, node, own)
        elif node.op == "call_function" and any(True for _ in facts.tensors(node.meta.get("val"))):  # no sizes
            if _has_gradient(node, graded):
                graded.add(node)
            _settle(gm, node, own, graded, entered, slices.group)
    _check_results(gm, own)
    SLICES.put(gm, slices)
    return gm


def _taken_out(gm: GraphModule, node: Node, own: dict[Node, str]) -> None:
    """Refuse an input of a layer that does not lie as its plan says."""
    value, cut = node.args
    assert isinstance(value, Node)
    if (value in own) is not cut:
        raise NotYetSupported(
            f"%{value.name} is {'whole in each process' if cut else 'cut into slices'}, and the plan says the other",
            where=locate(node), why=own.get(value, "nothing that it is computed of is cut"),
            fix="let input_layouts of this layer say how the layers before leave the value: Replicate() or Shard(dim)",
        )  # fmt: skip
    node.replace_all_uses_with(value)
    gm.graph.erase_node(node)


def _has_gradient(node: Node, graded: set[Node]) -> bool:
    """Whether a gradient passes through the node to a parameter that is asked."""
    if is_detach(node):
        return False
    differentiable = any(map(facts.is_differentiable, facts.tensors(node.meta.get("val"))))
    return differentiable and any(n in graded for n in node.all_input_nodes)


def _settle(
    gm: GraphModule, node: Node, own: dict[Node, str], graded: set[Node], entered: dict[Node, Node], group: str
) -> None:
    """Whether the value of a node is each process's own, and why; what it reads beside such values enters."""
    reads = [n for n in node.all_input_nodes if n in own]
    if draws(node):
        raise NotYetSupported(
            f"{node.target} draws at random in each process", where=locate(node),
            why="draws for a value that is equal in all processes must be equal, those for slices different, and each "
            "process has a generator of its own", fix="leave random layers out: model.eval(), or dropout of 0",
        )  # fmt: skip
    if node.target not in ONE_OF_ALL and (reads or node.target in EACH_ITS_OWN):
        own[node] = own[reads[0]] if reads else "it is cut into slices"
    if reads or node.target in JOINING:
        for operand in [n for n in node.all_input_nodes if n in graded and n not in own]:
            node.replace_input_with(operand, _entered(gm, operand, entered, own, graded, group))


def _entered(
    gm: GraphModule, value: Node, entered: dict[Node, Node], own: dict[Node, str], graded: set[Node], group: str
) -> Node:
    """The value as each process's own: one op for all its uses, so that its gradients are summed at once."""
    if value not in entered:
        after = facts.placeholders(gm)[-1] if value.op == "placeholder" else value
        with gm.graph.inserting_after(after):
            made = gm.graph.call_function(ENTER, (value, group))
        known: Any = value.meta["val"]
        with known.fake_mode:
            made.meta["val"] = torch.empty_like(known, memory_format=torch.contiguous_format)
        made.meta |= provenance(value)
        entered[value] = made
        own[made] = f"%{value.name} enters"
        graded.add(made)
    return entered[value]


_KINDS = {"loss": "the loss", "output": "the output", "check": "a condition in the code"}


def _check_results(gm: GraphModule, own: dict[Node, str]) -> None:
    """Refuse results that would differ between processes."""
    for spec, node in facts.returned(gm):
        if node in own:
            raise NotYetSupported(
                f"{_KINDS.get(spec.kind, f'the buffer {spec.name}')} is not the same in all processes of the mesh",
                where=locate(node), why=f"{own[node]}, and nothing on the way from there is a sum or a gather",
                fix="let the last sliced layer give whole outputs: RowwiseParallel(), or ColwiseParallel("
                "output_layouts=Replicate())",
            )  # fmt: skip
