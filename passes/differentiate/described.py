"""Sites with all that rules may look at, their values named as in the outputs of the joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx.algebra.network import Kind, Source
from psg_fx.algebra.site import PREFIXES, Operand, Site, Value
from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import OutputSpec, SampleAxis, fact
from psg_fx.source import locate


def described(gm: GraphModule, layout: Sequence[OutputSpec]) -> tuple[Site, ...]:
    """The sites with all that rules need, values named as in the joint graph's outputs."""
    known = {spec.name for spec in layout if spec.kind == "cotangent"}
    batch = facts.graph_facts(gm).batch
    return tuple(_site(gm, node, known, batch) for node in gm.graph.nodes if fact(node).site)


def _site(gm: GraphModule, node: Node, known: set[str], batch: Any) -> Site:
    axes = fact(node).samples
    axes = axes if isinstance(axes, tuple) else (axes,)
    order = next((axis for axis in axes if axis is not None), None)

    def convert(arg: Any) -> Any:
        if isinstance(arg, Node):
            value = arg.meta["val"]
            return _value(arg, value, order) if isinstance(value, torch.Tensor) else facts.expr(value)
        return arg

    args, kwargs = pytree.tree_map(convert, (node.args, node.kwargs))
    flat, _ = pytree.tree_flatten_with_path((node.args, node.kwargs))
    prefixes = PREFIXES.of(gm)
    operands = tuple(
        Operand(i, _argument(path), _value(a, a.meta["val"], None), prefixes[a.name])
        for i, (path, a) in enumerate(flat)
        if isinstance(a, Node) and fact(a).params
    )
    outs = list(facts.tensors(node.meta["val"]))
    outputs, cotangents = [], []
    for k, (out, axis) in enumerate(zip(outs, axes, strict=True)):
        source = Source(Kind.COTANGENT, f"{node.name}.{k}")
        outputs.append(Value(Source(Kind.OUTPUT, f"{node.name}.{k}"), facts.shape(out), out.dtype, axis))
        cotangents.append(Value(source, facts.shape(out), out.dtype, axis) if source.name in known else None)
    found = Site(
        node.name, node.target, tuple(args), dict(kwargs), operands, tuple(outputs), tuple(cotangents), batch,
        locate(node),
    )  # fmt: skip
    rows = facts.graph_facts(gm).rows
    return replace(found, batch=_counted(found, {batch, *rows})) if rows else found


def _counted(site: Site, counts: set[Any]) -> Any:
    """The symbol that the samples, or the rows, of a site are counted by.  Raises NotYetSupported."""
    carrying = [(v.shape, v.samples.dim) for v in (*site.values, *site.outputs) if v is not None and v.samples]
    found = {symbol for shape, dim in carrying for symbol in shape[dim].free_symbols} & counts
    if any(sum(bool(size.free_symbols & counts) for size in shape) > 1 for shape, _ in carrying):
        raise NotYetSupported(
            f"a parameter is an argument of {site.op} on pairs of rows", where=site.where,
            why="its gradient there would be of rows of one sample and of another",
            fix="let the parameter meet the rows before the scores of attention are made of them",
        )  # fmt: skip
    if len(found) > 1:
        raise NotYetSupported(
            f"a parameter is an argument of {site.op}, which joins rows of several axes", where=site.where,
            why="the gradient at such an op is of rows of one axis and of another",
            fix="let the parameter meet the rows in an op of its own before or after",
        )  # fmt: skip
    return found.pop()


def _argument(path: pytree.KeyPath) -> str:
    return ".".join(str(getattr(k, "idx", getattr(k, "key", k))) for k in path[1:])


def _value(node: Node, value: torch.Tensor, order: SampleAxis | None) -> Value:
    """order: how the site holds the rows of its samples; what is the same for all samples has its rows in any order."""
    axis = fact(node).samples
    assert not isinstance(axis, tuple)
    if (
        fact(node).uniform
        and axis is not None
        and order is not None
        and axis.outer * axis.inner == order.outer * order.inner
    ):
        axis = replace(axis, outer=order.outer, inner=order.inner)
    return Value(Source(Kind.ACTIVATION, node.name), facts.shape(value), value.dtype, axis)
