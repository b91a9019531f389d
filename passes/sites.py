"""sites: find each op at which a tracked parameter meets data, and how its operands are made of parameters.

A value is *data* (it carries the samples), *param* (derived from tracked parameters alone) or *const*.  A site is an op
that carries the samples and reads a param.  After this pass every path from a tracked parameter to the loss starts at
one site, because a value derived from a parameter is either param or made at a site.

What is drawn at random on the way of a parameter to its site is read as the forward pass drew it: it has no gradient,
and another draw would be another function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx.algebra.site import PREFIXES, Prefix
from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import fact
from psg_fx.graph.nodes import is_detach
from psg_fx.graph.same_op import draws
from psg_fx.graph.stages import Stage
from psg_fx.op_table import enter, known
from psg_fx.ops.of_users.additive import is_additive
from psg_fx.ops.of_users.autograd_function import differentiable
from psg_fx.ops.of_users.custom_call import CustomCall, custom_call
from psg_fx.program.reads.observe import observing_backward
from psg_fx.source import locate
from psg_fx.tensors import HALF
from psg_fx.torch_private.graphs import module_without_code

from .runner import graph_pass

aten = torch.ops.aten

enter(
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
    "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "_to_copy",
    "alias", "movedim", "swapaxes", "numpy_T", "diagonal", selects=True,
)  # fmt: skip
enter(
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_functional",
    "uniform", "exponential", "bernoulli", "geometric", "log_normal", "cauchy", "random", "multinomial", "poisson",
    "binomial", undifferentiated=True,
)  # fmt: skip


@graph_pass("sites", before=Stage.UNREDUCED, after=Stage.SITED)
def find_sites(gm: GraphModule) -> GraphModule:
    """Mark each op that consumes a parameter.  After: `fact(node).site` names it, `fact(node).params` is complete."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            spec = facts.input_spec(node)
            if spec.tracked:
                _require_real(node)
                facts.update(node, params=frozenset([spec.name]))
        elif node.op == "call_function":
            _classify(node)
    _require_additive(gm)
    PREFIXES.put(gm, {operand.name: prefix(gm, operand) for operand in _operands(gm)})
    return gm


def _operands(gm: GraphModule) -> dict[Node, None]:
    """Every param that a site reads, once."""
    return {n: None for site in gm.graph.nodes if fact(site).site for n in site.all_input_nodes if fact(n).params}


def _classify(node: Node) -> None:
    operands = [n for n in node.all_input_nodes if fact(n).params]
    if not operands or is_detach(node):
        return
    if not any(map(facts.is_differentiable, facts.tensors(node.meta.get("val")))):
        return
    if fact(node).reduced or known(node.target).undifferentiated:
        return
    if facts.carries(node):
        facts.update(node, site=node.name)
    else:
        facts.update(node, params=frozenset().union(*(fact(n).params for n in operands)))


def _require_additive(gm: GraphModule) -> None:
    """Refuse a custom function of parameters that is used at several places, unless its backward of a sum is the sum
    of its backwards: the gradient of a parameter is the sum of what all sites give it, each by itself.
    """
    for node in gm.graph.nodes:
        if (call := custom_call(node.target)) is None or not fact(node).params:
            continue
        below = facts.descendants([node])
        sites = (n for n in below if fact(n).site)
        read = (n for site in sites for n in pytree.tree_leaves((site.args, site.kwargs)) if isinstance(n, Node))
        uses = [n for n in read if n in below and fact(n).params]
        if len(uses) > 1 and not is_additive(_transformable(call, node), [n.meta["val"] for n in node.args]):
            raise call.refusal(
                f"it is a function of parameters that is used at {len(uses)} places, and its backward is not linear",
                "apply it for each use by itself, if that is what is meant; or let its backward be linear",
            )


def _require_real(node: Node) -> None:
    if node.meta["val"].is_complex():
        raise NotYetSupported(
            f"the parameter {facts.input_spec(node).name} is complex", where=locate(node),
            why="norms and inner products of complex gradients have no agreed meaning here",
            fix="keep it as two real ones, or as a real one with a last dim of 2, and use torch.view_as_complex",
        )  # fmt: skip


def prefix(gm: GraphModule, operand: Node) -> Prefix:
    """The sub-graph that makes `operand` of parameters and constants.  It is the same for all batch sizes: those in it
    are 1.
    """
    names = tuple(sorted(fact(operand).params))
    if operand.op == "placeholder":
        return Prefix(operand.name, (operand.name,), names, {operand.name: names[0]}, trivial=True, selects=True)
    inputs, computed = _above(gm, operand)
    graph = Graph()
    copies: dict[Node, Any] = {n: _at_one(gm, n) for node in computed for n in node.all_input_nodes if _is_size(n)}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in computed:
        copies[node] = _copy(graph, node, copies)
    graph.output(copies[operand])
    owners = {n.name: next(iter(fact(n).params), "") for n in inputs}
    ops = [n for n in computed if n.op == "call_function" and n.target is not operator.getitem]
    real = not operand.meta["val"].is_complex()
    selects = real and len(inputs) == 1 and all(known(n.target).selects for n in ops)
    listed = tuple(str(n.target).split(".")[1] for n in ops)
    casts = any(getattr(n.target, "overloadpacket", None) is aten._to_copy for n in ops)
    across = any(str(n.target) == "psg_fx.enter.default" for n in ops)
    half = operand.meta["val"].dtype in HALF
    return Prefix(
        operand.name, tuple(owners), names, owners, listed, casts, selects=selects, across=across, half=half,
        drawn=frozenset(n.name for n in inputs if n.op != "placeholder"), graph=module_without_code(gm, graph),
    )  # fmt: skip


def _above(gm: GraphModule, operand: Node) -> tuple[list[Node], list[Node]]:
    """What the operand is computed from: placeholders and draws, and the ops on the way, without sizes."""
    above = facts.ancestors([operand], lambda n: not (_is_size(n) or _is_drawn(n)))
    masks = {_mask(gm, n) for n in above if n.target is aten.native_dropout.default}
    needed = above | masks
    order = [n for n in gm.graph.nodes if n in needed and not _is_size(n)]
    inputs = dict.fromkeys(n for n in order if n.op == "placeholder" or _is_drawn(n) or n in masks)
    computed = [n for n in order if n not in inputs]
    for node in computed:
        if draws(node) and node.target is not aten.native_dropout.default:
            raise NotYetSupported(
                f"{node.target} draws random numbers on the way of a parameter to its use", where=locate(node),
                why="its gradient is not that of an op on numbers that were drawn before",
                fix="draw the numbers by torch.randn, torch.rand or torch.bernoulli, and compute with them",
            )  # fmt: skip
    return [*inputs], computed


def _is_drawn(node: Node) -> bool:
    return known(node.target).undifferentiated and draws(node)


def _mask(gm: GraphModule, dropout: Node) -> Node:
    """The mask that dropout has drawn."""
    for node in dropout.users:
        if node.args[1] == 1:
            return node
    with gm.graph.inserting_after(dropout):
        made = gm.graph.call_function(operator.getitem, (dropout, 1))
    made.meta["val"] = dropout.meta["val"][1]
    facts.update(made)
    return made


def _copy(graph: Graph, node: Node, copies: dict[Node, Any]) -> Any:
    """The node of the sub-graph, its inputs there replaced.  Dropout is x · mask / (1 - p), and 0 for p = 1."""
    if node.target is aten.native_dropout.default:
        x, p, train = cast("tuple[Any, float, bool | None]", node.args)
        mask = next(copies[n] for n in node.users if n.args[1] == 1)
        scale = (1 / (1 - p) if p < 1 else 0.0) if train is not False else 1.0
        kept = graph.call_function(aten.mul.Tensor, (copies[x], mask))
        return graph.call_function(aten.mul.Tensor, (kept, scale)), mask
    if node.target is operator.getitem and isinstance(made := copies[node.all_input_nodes[0]], tuple):
        return made[cast("int", node.args[1])]
    copied = graph.node_copy(node, copies.__getitem__)
    if (call := custom_call(node.target)) is not None:
        copied.target = _transformable(call, node)
    return copied


def _transformable(call: CustomCall, node: Node) -> Callable[..., Any]:
    inputs: list[Node] = list(node.args)  # type: ignore[arg-type]
    values = [n.meta["val"] for n in inputs]
    shapes, asked = [tuple(int(s) for s in v.shape) for v in values], [bool(fact(n).params) for n in inputs]
    with observing_backward():
        return differentiable(call, shapes, [v.dtype for v in values], asked, _used(node))


def _used(node: Node) -> list[int]:
    """The outputs of an op that are used."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [0]
    return sorted({int(cast("int", user.args[1])) for user in node.users})


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _at_one(gm: GraphModule, size: Node) -> int:
    said, batch = facts.expr(size.meta["val"]), facts.graph_facts(gm).batch
    if said.free_symbols - {batch}:
        raise NotYetSupported(
            "a number that is read off a tensor has a part in how a parameter is used", where=locate(size),
            why="what is computed of parameters alone has the same sizes and places at every call",
            fix="index with a tensor of one dim (`p[i.view(1)].squeeze(0)`), or make the number one of Python's",
        )  # fmt: skip
    return facts.at(said, batch, 1)
