"""Pass `unreduce`: the loss of the batch becomes the losses of its samples, `[B]`.

The loss of sample i is by definition the captured program at B = 1 on sample i.  A value reduced over the samples, of
shape S, is replaced by its per-sample version `[B, *S]`: the op that reduces gets its input as `[B, *single shape]` and
runs under `vmap`; what follows carries dim 0 on.  A number that depends on B (`x.sum() / x.shape[0]`) is that of B = 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import BadArgument, InternalError, NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.same_op import draws
from psg_fx.graph.sample_axis import Misfit, single
from psg_fx.graph.strides import free_of_strides
from psg_fx.source import locate, provenance
from psg_fx.tensors import number_at
from psg_fx.torch_private.graphs import traced_without_code
from psg_fx.torch_private.tracer import trace_fakes

from ..independence import add_conditions, prove
from ..independence.arguments import flat_nodes, is_symbolic, op_name, symbolic_values, value_arguments
from .lift import lifted

aten = torch.ops.aten


def unreduce(gm: GraphModule) -> GraphModule:
    """Make the output "loss" the per-sample losses `[B]`.  Without a loss there is nothing to do.

    After: nothing reduced over the samples leads to the loss, and all facts are proven anew on the new graph.
    """
    place = next((k for k, spec in enumerate(facts.graph_facts(gm).outputs) if spec.kind == "loss"), None)
    if place is None:
        return gm
    _check_loss(gm, facts.outputs(gm)[place])
    Unreduction(gm, place).run()
    free_of_strides(gm)
    gm.graph.eliminate_dead_code()
    links = prove(gm)
    _check_result(gm, place)
    add_conditions(gm, links)
    gm.graph.lint()
    gm.recompile()
    return gm


def _check_loss(gm: GraphModule, loss: object) -> None:
    """The loss is one number reduced over the samples, or one for each sample; its other dims have size 1."""
    value = loss.meta.get("val") if isinstance(loss, Node) else loss
    if not isinstance(loss, Node) or not isinstance(value, Tensor):
        raise BadArgument(
            f"the loss is not a tensor but {type(value).__name__}",
            where="loss_fn",
            why="the loss of a step is a scalar or [B]",
            fix="return the loss tensor alone",
        )
    known = facts.fact(loss)
    axis = known.samples
    if known.reduced and value.numel() == 1:
        return
    ordinary = isinstance(axis, SampleAxis) and facts.shape(value)[axis.dim].free_symbols == {
        facts.graph_facts(gm).batch
    }
    if isinstance(axis, SampleAxis) and not ordinary:
        raise BadArgument(
            "the loss has a value for each row, not for each sample", where=locate(loss),
            why="a sample has any number of rows, and the loss of a step is one for each sample, [B], or their mean",
            fix="sum the rows of each sample: zeros(B).index_add(0, ids, losses), or divide that by its number of rows",
        )  # fmt: skip
    if isinstance(axis, SampleAxis) and axis.outer * axis.inner == 1 and len(_ones(value)) == value.ndim - 1:
        return
    shape = "[" + ", ".join(str(s).replace(str(facts.graph_facts(gm).batch), "B") for s in facts.shape(value)) + "]"
    if known.samples is None and not known.reduced:
        what, why = "the loss does not depend on the samples", "no input or target with samples leads to it"
        fix = "compute the loss from the output of the model; check batch_dim"
    else:
        what, why = "the loss is neither a scalar nor [B]", f"its shape is {shape}"
        fix = "reduce it to one number for each sample ([B]) or to one in all (mean or sum)"
    raise BadArgument(what, where=locate(loss), why=why, fix=fix)


def _ones(value: Tensor) -> list[int]:
    """The dims of size 1."""
    return [d for d, size in enumerate(facts.shape(value)) if size == 1]


def _check_result(gm: GraphModule, place: int) -> None:
    loss = facts.outputs(gm)[place]
    if not isinstance(loss, Node) or facts.fact(loss).samples != SampleAxis(0) or loss.meta["val"].ndim != 1:
        raise InternalError(
            "the loss is not per sample after unreduce",
            where=locate(loss) if isinstance(loss, Node) else "loss",
            why=f"its fact is {facts.fact(loss) if isinstance(loss, Node) else loss}",
            fix="please report this as a bug, with the loss function",
        )


class Unreduction:
    """The rewriting of one graph: old nodes on the way to the loss -> their per-sample versions.

    place: of the loss among the outputs.
    """

    def __init__(self, gm: GraphModule, place: int) -> None:
        self.gm, self.place = gm, place
        self.batch = facts.graph_facts(gm).batch
        self.outputs = facts.outputs(gm)
        self.wanted = facts.ancestors(filter(None, [self.outputs[place]]))
        self.shared = facts.ancestors(n for k, n in enumerate(self.outputs) if n is not None and k != place)
        self.new: dict[Node, Any] = {}

    def run(self) -> None:
        """Rewrite in order, then let the output point to the new loss."""
        for node in list(self.gm.graph.nodes):
            if node not in self.wanted or node.op != "call_function" or _is_number(node) or facts.fact(node).structure:
                continue
            if facts.fact(node).reduced:
                self.per_sample(node)
            else:
                self.renumber(node)
        loss: Any = self.outputs[self.place]
        self.outputs[self.place] = self.flat(self.new.get(loss, loss))
        self.gm.graph.output_node().args = (tuple(self.outputs),)

    def flat(self, loss: Node) -> Node:
        """The losses `[B]`, without dims of size 1."""
        value = loss.meta["val"]
        if value.ndim == 1:
            return loss
        with self.gm.graph.inserting_before(self.gm.graph.output_node()):
            found: Node = self.gm.graph.call_function(aten.squeeze.dims, (loss, _ones(value)))
        found.meta = provenance(loss)
        with value.fake_mode:
            found.meta["val"] = value.squeeze(_ones(value))
        return found

    def number(self, node: Node) -> Any:
        """A number among the arguments of an op for one sample."""
        value = node.meta["val"]
        return number_at(value, {self.batch: 1}) if is_symbolic(node, self.batch) else value

    def renumber(self, node: Node) -> None:
        """A value that is not reduced: numbers that depend on B become those of B = 1."""
        numbers = set(symbolic_values(node, self.batch))
        value = node.meta["val"]
        counts = isinstance(value, Tensor) and any(self.batch in size.free_symbols for size in facts.shape(value))
        everywhere = facts.fact(node).samples is None and not counts  # what counts the samples, arange(B), still does
        if everywhere:
            numbers = {n for n in node.all_input_nodes if is_symbolic(n, self.batch)}
        if not numbers and not any(n in self.new for n in node.all_input_nodes):
            return
        target = node
        if node in self.shared:
            if draws(node):
                raise _not_yet(node, "it draws at random, and both the loss and a buffer need it, at different B")
            with self.gm.graph.inserting_before(node):
                target = self.gm.graph.node_copy(node)
            self.new[node] = target

        def changed(name: str, argument: Any) -> Any:
            known = numbers if everywhere or name in values else set()
            return torch.fx.map_arg(argument, lambda n: self.number(n) if n in known else self.new.get(n, n))

        values = value_arguments(node)
        names = [a.name for a in node.target._schema.arguments] if values else [""] * len(target.args)  # type: ignore[union-attr]
        target.args = tuple(changed(name, given) for name, given in zip(names, target.args, strict=False))
        target.kwargs = {name: changed(name, given) for name, given in target.kwargs.items()}

    def per_sample(self, node: Node) -> None:
        """A reduced value: its op for each sample."""
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, Node)
            self.new[node] = self.new[source][place]
            return
        if draws(node):
            raise _not_yet(node, "it draws at random from values reduced over the samples")
        inputs = [n for n in dict.fromkeys(flat_nodes([node.args, list(node.kwargs.values())])) if _is_tensor(n)]
        spread = [n for n in inputs if facts.fact(n).reduced or facts.fact(n).samples is not None]
        kept = [n for n in inputs if n not in spread]
        function = lifted(node, spread, kept, self.number)
        arguments = [self.new.get(n, n) for n in (*spread, *kept)]
        self.new[node] = self.splice(node, function, arguments)

    def splice(self, node: Node, function: Callable[..., Any], arguments: Sequence[Node]) -> Any:
        """Trace the function on the nodes' fake values and put its nodes before `node`."""
        values = [n.meta["val"] for n in arguments]
        try:
            with torch.no_grad(), traced_without_code():
                traced = trace_fakes(function, values)
        except Exception as error:
            raise _not_yet(node, f"it cannot be batched over samples: {type(error).__name__}: {error}") from error
        self.check_symbol(node, arguments, traced)
        traced.graph.eliminate_dead_code()
        made: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
        result = traced.graph.output_node().args[0]
        with self.gm.graph.inserting_before(node):
            for old in traced.graph.nodes:
                if old.op not in ("placeholder", "output"):
                    made[old] = self.copy(node, old, traced, made, old is result)
        return torch.fx.map_arg(result, lambda n: made[n])

    def copy(self, node: Node, old: Node, traced: GraphModule, made: dict[Node, Any], last: bool) -> Node:
        """One traced node, with the meta of the node it comes from."""
        target = _functional(node, old)
        if old.op == "get_attr":
            target = f"{node.name}_{old.target}"
            self.gm.register_buffer(target, getattr(traced, str(old.target)), persistent=False)
        fresh = self.gm.graph.create_node(
            old.op,
            target,
            torch.fx.map_arg(old.args, lambda n: made[n]),
            torch.fx.map_arg(old.kwargs, lambda n: made[n]),
            name=f"{node.name}_per_sample" if last else old.name,
        )
        fresh.meta = provenance(node)
        if "val" in old.meta:
            fresh.meta["val"] = old.meta["val"]
        return fresh

    def check_symbol(self, node: Node, arguments: Sequence[Node], traced: GraphModule) -> None:
        """Tracing must not have fixed the batch size."""
        for source in arguments:
            axis = facts.fact(source).samples
            if isinstance(axis, SampleAxis) and single(facts.shape(source.meta["val"]), self.batch).dim is None:
                raise _not_yet(node, "batching it over samples fixes the batch size")
        result = traced.graph.output_node().args[0]
        for n in flat_nodes(result):
            try:
                keeps = single(facts.shape(n.meta["val"]), self.batch).dim == 0
            except Misfit as misfit:
                raise _not_yet(node, str(misfit)) from None
            if not keeps:
                raise _not_yet(node, "batching it over samples fixes the batch size")


def _is_number(node: Node) -> bool:
    """Sizes and the like."""
    return not isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _functional(node: Node, traced: Node) -> Any:
    """The op of a traced node; one that works in place on a value nothing else needs becomes the ordinary one."""
    target = traced.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return target
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or any(len(n.users) > 1 for n in traced.all_input_nodes):
        raise _not_yet(node, f"batching it over samples works in place ({target._schema.name})")
    return getattr(packet, target._overloadname)


def _not_yet(node: Node, why: str) -> NotYetSupported:
    return NotYetSupported(
        f"{op_name(node)} in the loss cannot be taken per sample",
        where=locate(node),
        why=why,
        fix="write this part of the loss for one row per sample, [B], e.g. with reduction='none'",
    )
