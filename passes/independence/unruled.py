"""Ops without a rule: written out where they are composed of others, tried out where the user vouches for them, refused
otherwise.  What has effects is never run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.same_op import draws
from psg_fx.graph.tracing import trace
from psg_fx.ops.of_users.trusted import is_trusted
from psg_fx.source import locate
from psg_fx.torch_private.ops import has_effect, python_decomposition

from .arguments import op_name
from .probe import probe
from .refused import not_shown
from .rules.functions import axes_of, proven, without_batch_size
from .values import Op, Result

_TORCH = ("aten", "prims", "prim", "_operator", "math")
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
_COLLECTIVE = "it is a collective, in which other processes take part"
_OUTSIDE = "leave it out of the model and loss: compute such things before or after the step"
_WHOLE = (
    "a step reads whole parameters: shard the model by torch.distributed.fsdp.fully_shard instead of slicing it, and "
    "add up over processes afterwards, by psg_fx.distributed.reduce"
)


def without_rule(op: Op, notes: list[str]) -> tuple[Result, str]:
    """What is known of the value of an op that has no rule, and the name of the proof; or a refusal."""
    node, known, target = op.node, op.known, op.node.target
    refuse_effects(node)
    if not isinstance(target, OpOverload):
        raise not_shown(node, "it is not an operator")
    if (graph := _written_out(node)) is not None:
        inputs = [known.get(n, Result()) for n in node.all_input_nodes]
        without_batch_size(op, graph, op.name, "what it is made of")
        try:
            found = proven(op, graph, inputs, op.name)
        except NotYetSupported as error:
            if target.namespace not in _TORCH:
                raise
            raise not_shown(node, "it has no rule that says how it treats the samples") from error
        if isinstance(node.meta["val"], torch.Tensor):
            return found[0], "written out"
        return Result(tuple(axes_of(op, found))), "written out"  # type: ignore[arg-type]
    if draws(node):
        raise not_shown(node, "it draws at random, and has no rule that says how")
    if target.namespace in _TORCH:
        raise not_shown(node, "it has no rule that says how it treats the samples")
    if not is_trusted(target):
        raise not_shown(
            node, "it is a custom operator, which cannot be looked into",
            f"if each row of its output, and of the gradient that its backward gives, is computed from that row alone: "
            f"psg_fx.trust(torch.ops.{target.namespace}.{target._opname})",
        )  # fmt: skip
    return probe(node, op.batch, {n: r.axes for n, r in known.items()}, notes), "trusted"


def refuse_effects(node: Node) -> None:
    """Refuse an op that does something beside computing its result, without running it."""
    if (why := _effect(node)) is not None:
        raise not_shown(node, why, _WHOLE if why is _COLLECTIVE else _OUTSIDE)


def no_graph_inside(node: Node) -> NotYetSupported:
    """The refusal of what holds a graph or another op: control flow, contexts, an op with effects."""
    inner = next((a for a in node.args if isinstance(a, OpOverload)), None)
    if isinstance(node.target, HigherOrderOperator) and inner is not None:
        name = inner._schema.name.replace("::", ".")
        return NotYetSupported(
            f"{name} cannot be shown to keep samples apart", where=locate(node),
            why="it writes into its argument" if inner._schema.is_mutable else "it has effects beside its result",
            fix=_OUTSIDE,
        )  # fmt: skip
    return NotYetSupported(
        f"{op_name(node)} holds a graph of its own, which is not looked into",
        where=locate(node),
        why="only flat graphs of ATen ops are proven sample by sample",
        fix="write this part of the model without control flow, contexts or custom operators",
    )


def _effect(node: Node) -> str | None:
    """Why an op must not be run to see what it does; None if nothing is known against it."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    if target.namespace in _COLLECTIVES:
        return _COLLECTIVE
    if target.namespace in _TORCH:
        return None
    if target._schema.is_mutable:
        return "it writes into its argument"
    if has_effect(target):
        return "it has effects beside its result"
    if not list(facts.tensors(node.meta.get("val"))):
        return "it returns no tensor, so it can only be there for its effects"
    return None


def _written_out(node: Node) -> GraphModule | None:
    """(inputs..) -> outputs in other ops, if the op is composed of such."""
    assert isinstance(node.target, OpOverload)
    function = python_decomposition(node.target)
    if function is None:
        return None
    inputs = node.all_input_nodes

    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args = torch.fx.map_arg(node.args, lambda n: given[n])
        kwargs = torch.fx.map_arg(node.kwargs, lambda n: given[n])
        return list(facts.tensors(function(*args, **kwargs)))

    try:
        with torch.no_grad():
            graph = trace(run, [n.meta["val"] for n in inputs])
    except Exception:  # it does not run on fake tensors, or not with a symbol for the batch size
        return None
    graph.graph.eliminate_dead_code()
    same = any(n.target is node.target for n in graph.graph.nodes)
    return None if same else graph
