"""What cannot be in a file, said before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from psg_fx.errors import InternalError, NotYetSupported, first_line
from psg_fx.graph import facts
from psg_fx.graph.same_op import draws
from psg_fx.program.arguments.call import Call
from psg_fx.source import locate

_TORCH = ("aten", "prims", "_operator", "math", "builtins")
OWN = ("psg_fx", "psg_fx_functions")
"""Namespaces of ops of psg_fx."""

_WHERE = "step.export(path, inputs, targets)"


def refuse(gm: GraphModule, call: Call, cut: bool, inside: Sequence[str]) -> None:
    """Refuse a lowered graph that a file does not stand for.

    cut: whether the batch runs in parts within the memory budget.  inside: parameters and buffers that code
    reads by itself.
    """
    known = facts.graph_facts(gm)
    if known.one_size:
        raise _refusal("the graph serves one batch size only", known.notes[0], "take sizes from the input (x.shape[0])")
    if known.most is not None:
        raise _refusal(f"the graph serves up to {known.most} samples", known.notes[0], "leave the branch out")
    if cut:
        raise _refusal(
            "the step runs in parts within its memory budget", "a file holds one graph, for the whole batch",
            "leave memory_budget out, and pass the file batches that fit",
        )  # fmt: skip
    if inside:
        raise _refusal(
            f"a custom function reads {inside[0]} by itself", "the file would have its value of now for ever",
            "pass it to the function as an argument",
        )  # fmt: skip
    for spec, _ in facts.returned(gm):
        if spec.kind == "written":
            raise _refusal(
                "the code stores tensors in attributes", "there is no model beside a file that could hold them",
                "register them as buffers, whose new values are outputs",
            )  # fmt: skip
        if spec.kind == "buffer" and not spec.name.startswith("model."):
            raise _of_the_loss(spec.name)
    for _, value in call.constants:
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise _refusal(
                f"an argument is a {type(value).__name__}",
                "what is neither tensor, number nor text cannot be compared when the file is used",
                "let the model make it, or pass tensors and numbers",
            )  # fmt: skip
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            _refuse_op(node, node.target)


def _refuse_op(node: Node, target: OpOverload) -> None:
    name = f"{target.namespace}.{target._opname}"
    if target.namespace not in (*_TORCH, *OWN):
        raise NotYetSupported(
            f"{name} is a custom operator", where=locate(node),
            why="its code is not in the file, and the process that loads it may not have it",
            fix="export a model of torch's own ops, or write the operator as a composite of them",
        )  # fmt: skip
    if draws(node):
        raise NotYetSupported(
            f"{name} draws random numbers", where=locate(node),
            why="a file has no generator of the caller's to draw from, so that its draws could not be repeated",
            fix="model.eval(), or pass the random tensor as an input",
        )  # fmt: skip


def check_of_torch_alone(graph: Graph) -> None:
    """Nothing in the graph of a file needs psg_fx to be there."""
    own = [n for n in graph.nodes if isinstance(n.target, OpOverload) and n.target.namespace in OWN]
    if own:
        raise InternalError(
            f"{own[0].target} is left in a file", where=_WHERE, why="a process without psg_fx could not load it",
            fix="please report this as a bug",
        )  # fmt: skip


def _of_the_loss(name: str) -> NotYetSupported:
    return _refusal(
        f"the loss writes its buffer {name.removeprefix('loss_fn.')}",
        "a file takes parameters and buffers of the model",
        "make the loss a part of the model that returns it: loss_fn=lambda out: out",
    )  # fmt: skip


def _refusal(what: str, why: str, fix: str) -> NotYetSupported:
    return NotYetSupported(what, where=_WHERE, why=why, fix=fix)


def not_exported(error: Exception) -> NotYetSupported:
    """The refusal of a graph that torch does not write."""
    said = [first_line(error), *(line.strip() for line in str(error).splitlines() if line.startswith("  - "))]
    return _refusal(
        "torch could not make a file of the lowered graph", f"{type(error).__name__}: {' '.join(said[:2])}",
        "run the step itself, which is compiled for the sizes of a call; please report this, with the error above",
    )  # fmt: skip
