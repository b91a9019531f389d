"""differentiate: one joint graph of the forward pass and the cotangents at the sites.

The sited graph is interpreted with taps under autograd, inside `make_fx` on the capture's own fake tensors, so the
batch size stays the one symbol.  Parameters do not require gradients here: no ordinary weight gradient is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import preserve_node_meta

from psg_fx.algebra.site import PREFIXES, SITES
from psg_fx.errors import InternalError, NotYetSupported, first_line
from psg_fx.graph import facts
from psg_fx.graph.facts import InputSpec, OutputSpec, fact
from psg_fx.graph.stages import Stage
from psg_fx.graph.tracing import trace
from psg_fx.op_table import known
from psg_fx.ops.of_users.autograd_function import custom_call
from psg_fx.program.decisions.branches import no_plain_batch_size
from psg_fx.program.reads.observe import observing_backward
from psg_fx.source import locate

from ..runner import graph_pass
from .described import described
from .kept import require_kept
from .proof import carried, is_foreign, prove_cotangents


class _Tapped(Interpreter):
    """Runs the graph, keeps every site's arguments, and makes its outputs differentiable."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[str, tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = custom_call(target)
        with_backward = own.under_autograd if own else known(target).under_autograd
        return super().call_function(with_backward or target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        _same_shape(n, result)
        if fact(n).site:
            arguments = {a.name: self.env[a] for a in n.all_input_nodes if isinstance(self.env[a], torch.Tensor)}
            outputs = list(facts.tensors(result))
            for output in outputs:
                if facts.is_differentiable(output) and not output.requires_grad:
                    output.requires_grad_()
            self.seen[n.name] = (arguments, outputs)
        return result


@graph_pass("differentiate", before=Stage.SITED, after=Stage.JOINT)
def differentiate(gm: GraphModule, input_gradients: tuple[bool, ...] = ()) -> GraphModule:
    """After: outputs are those of before, then every activation a site reads and the cotangents of its outputs, then
    what was drawn on the way of a parameter to its use.

    With a loss the cotangents are those of the sum of the per-sample losses; without one the graph takes the
    cotangents of the model's outputs as further inputs ("tangent").
    """
    info = facts.graph_facts(gm)
    nodes = facts.placeholders(gm)
    values = [_plain(n.meta["val"]) for n in nodes]
    roots = [i for i, spec in enumerate(info.outputs) if spec.kind in ("loss", "output")]
    roots = [i for i in roots if _is_float(facts.outputs(gm)[i])]
    with_loss = any(spec.kind == "loss" for spec in info.outputs)
    if not with_loss:
        _require_sample_outputs(gm)
    tangents = [] if with_loss else [_like(facts.outputs(gm)[i]) for i in roots]
    inputs = [i for i, n in enumerate(nodes) if facts.input_spec(n).kind in ("input", "target")]
    wanted = [i for i, asked in zip(inputs, input_gradients, strict=False) if asked]
    layout: list[OutputSpec] = []
    drawn = {name for prefix in PREFIXES.of(gm).values() for name in prefix.drawn}
    forward: list[Node] = []

    def joint(*args: Any) -> tuple[Any, ...]:
        primals = list(args[: len(nodes)])
        for i in wanted:
            primals[i] = primals[i].requires_grad_()
        with torch.enable_grad():
            taps = _Tapped(gm)
            results = taps.run(*primals)
            heads = [results[i] for i in roots]
            seeds = [torch.ones_like(h) for h in heads] if with_loss else list(args[len(nodes) :])
            extra = [primals[i] for i in wanted]
            gradients = _gradients(heads, seeds, [t for _, outs in taps.seen.values() for t in outs] + extra)
        values_drawn = {n.name: v for n, v in taps.env.items() if n.name in drawn}
        layout[:], flat = _layout(info.outputs, taps.seen, gradients, [nodes[i].name for i in wanted], values_drawn)
        forward[:] = [n for n, v in taps.env.items() if n.op != "output" and isinstance(v, (torch.Tensor, tuple, list))]
        return (*results, *flat, *facts.tensors([taps.env[n] for n in forward]))

    theirs = any(custom_call(n.target) or is_foreign(n) for n in gm.graph.nodes)
    own = observing_backward() if theirs else contextlib.nullcontext()
    with preserve_node_meta(), no_plain_batch_size(), own:
        traced = trace(joint, [*values, *tangents])
    _require_symbol(gm)
    known = carried(traced, forward, len(layout))
    _describe(traced, nodes, [info.outputs[i].name for i in roots] if not with_loss else [])
    traced.meta[facts.KEY] = dataclasses.replace(info, outputs=tuple(layout), runs_code=theirs)
    require_kept(traced)
    prove_cotangents(gm, traced, known)
    SITES.put(traced, described(gm, layout))
    return traced


def _require_symbol(gm: GraphModule) -> None:
    """Refuse backward passes that make torch take the batch size for a number."""
    for node in facts.placeholders(gm):
        dim = facts.input_spec(node).samples
        if dim is not None and not facts.shape(node.meta["val"])[dim].free_symbols:
            raise NotYetSupported(
                "the backward pass of an operator fixes the batch size", where="the backward pass",
                why="something in it asks for the number of samples itself: a loop over them, or a split",
                fix="write it with ops on all samples at once",
            )  # fmt: skip


def _require_sample_outputs(gm: GraphModule) -> None:
    """Without a loss: every output with a gradient is real, and belongs to the samples."""
    for spec, node in facts.returned(gm):
        if node is None or spec.kind != "output":
            continue
        if node.meta["val"].is_complex():
            raise NotYetSupported(
                f"the output {spec.name!r} of the model is complex", where=locate(node),
                why="without a loss, gradients of complex outputs are not taken", fix="return torch.view_as_real of it",
            )  # fmt: skip
        if fact(node).params and node.meta["val"].is_floating_point():
            raise NotYetSupported(
                f"the output {spec.name!r} of the model is made of parameters alone", where=locate(node),
                why="its gradient belongs to no sample, and would be missing in every grad_sample",
                fix="detach it, or pass loss_fn: with the loss inside, it is part of the loss of each sample",
            )  # fmt: skip


def _same_shape(node: Node, result: Any) -> None:
    """A pass that changed an op's arguments must have kept its facts true."""
    known = node.meta.get("val")
    if not (isinstance(known, torch.Tensor) and isinstance(result, torch.Tensor)):
        return
    if facts.shape(known) != facts.shape(result):
        said = {s for size in facts.shape(known) for s in size.free_symbols}
        if any(size.free_symbols - said for size in facts.shape(result)):
            raise NotYetSupported(
                f"how many values {node.target} gives depends on values", where=locate(node),
                why="these are computed where the graph runs, and the model was captured with one size",
                fix="keep the mask as a buffer of the model, index with numbers (`mask.nonzero()` of before), or write "
                "torch.where",
            )  # fmt: skip
        raise InternalError(
            f"{node.target} has shape {facts.shape(result)}, and the graph says {facts.shape(known)}",
            where=locate(node),
            why="a pass changed the op and not what is known of it",
            fix="please report this with the model",
        )


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_float(node: Node | None) -> bool:
    return node is not None and node.meta["val"].is_floating_point()


def _like(node: Node | None) -> torch.Tensor:
    assert node is not None
    value: torch.Tensor = node.meta["val"].detach()
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_like(value)


def _gradients(
    heads: list[torch.Tensor], seeds: list[torch.Tensor], taps: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """∂(heads·seeds)/∂taps; None where no head depends on a tap."""
    pairs = [(h, s) for h, s in zip(heads, seeds, strict=True) if h.requires_grad]
    floating = [t for t in taps if t.requires_grad]
    if not pairs or not floating:
        return [None] * len(taps)
    try:
        found = torch.autograd.grad([h for h, _ in pairs], floating, [s for _, s in pairs], allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        raise NotYetSupported(
            "an op of the model or loss has a backward that torch does not run here", where="the backward pass",
            why=first_line(error) or type(error).__name__,
            fix="write that op with others: its backward must take a symbol for the batch size",
        ) from error  # fmt: skip
    by_tap = iter(found)
    return [next(by_tap) if t.requires_grad else None for t in taps]


def _layout(
    outputs: tuple[OutputSpec, ...],
    seen: dict[str, tuple[dict[str, torch.Tensor], list[torch.Tensor]]],
    gradients: list[torch.Tensor | None],
    inputs: list[str],
    drawn: dict[str, torch.Tensor],
) -> tuple[list[OutputSpec], list[torch.Tensor]]:
    """Name the extra outputs: activations, and what prefixes have drawn, by the node that makes them; cotangents
    `site.k`.
    """
    specs, flat = list(outputs), []
    kept: set[str] = set()
    remaining = iter(gradients)
    for site, (arguments, results) in seen.items():
        for name, value in arguments.items():
            if name not in kept:
                kept.add(name)
                specs.append(OutputSpec("activation", name))
                flat.append(value)
        for k, _ in enumerate(results):
            gradient = next(remaining)
            if gradient is not None:
                specs.append(OutputSpec("cotangent", f"{site}.{k}"))
                flat.append(gradient)
    new = [name for name in drawn if name not in kept]
    specs += [OutputSpec("activation", name) for name in new]
    flat += [drawn[name] for name in new]
    for name in inputs:
        gradient = next(remaining)
        if gradient is not None:
            specs.append(OutputSpec("input_gradient", name))
            flat.append(gradient)
    return specs, flat


def _describe(traced: GraphModule, nodes: list[Node], tangents: list[str]) -> None:
    """Carry the input specs over and name the placeholders as before."""
    for index, node in enumerate(facts.placeholders(traced)):
        if index < len(nodes):
            node.meta["psg_fx_input"] = facts.input_spec(nodes[index])
            node.name = node.target = nodes[index].name
        else:
            node.meta["psg_fx_input"] = InputSpec("tangent", tangents[index - len(nodes)])
