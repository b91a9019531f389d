"""differentiate: one joint graph of the forward pass and the cotangents at the sites.

The sited graph is interpreted with taps under autograd, inside `make_fx` on the capture's own fake tensors, so the
batch size stays the one symbol.  Parameters do not require gradients here: no ordinary weight gradient is computed.
Layers that are alike are interpreted once (`segments.py`, `chain.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from psg_fx.algebra.site import PREFIXES, SITES
from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import OutputSpec, SampleAxis, fact
from psg_fx.graph.nodes import is_detach
from psg_fx.graph.stages import Stage
from psg_fx.op_table import known
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.program.decisions.branches import no_plain_batch_size
from psg_fx.program.reads.observe import observing_backward
from psg_fx.source import locate

from ..runner import graph_pass
from .chain import Chain
from .described import described
from .kept import require_kept
from .proof import carried, is_foreign, prove_cotangents
from .written import Written

aten = torch.ops.aten


@graph_pass("differentiate", before=Stage.SITED, after=Stage.JOINT)
def differentiate(gm: GraphModule, input_gradients: tuple[bool, ...] = ()) -> GraphModule:
    """After: outputs are those of before, then every activation a site reads and the cotangents of its outputs, then
    what was drawn on the way of a parameter to its use.

    With a loss the cotangents are those of the sum of the per-sample losses; without one the graph takes the
    cotangents of the model's outputs as further inputs ("tangent").
    """
    info = facts.graph_facts(gm)
    roots = [(s, n) for s, n in facts.returned(gm) if n is not None and s.kind in ("loss", "output") and _is_float(n)]
    with_loss = any(spec.kind == "loss" for spec in info.outputs)
    if not with_loss:
        _require_sample_outputs(gm)
    inputs = [n for n in facts.placeholders(gm) if facts.input_spec(n).kind in ("input", "target")]
    wanted = [node for node, asked in zip(inputs, input_gradients, strict=False) if asked]
    ends = [node for _, node in roots]
    seeds, tangents = [_like(node, with_loss) for node in ends], [] if with_loss else [spec.name for spec, _ in roots]
    theirs = any(custom_call(n.target) or is_foreign(n) for n in gm.graph.nodes)
    own = observing_backward() if theirs else contextlib.nullcontext()
    with preserve_node_meta(), no_plain_batch_size(), own:
        written = Chain(gm, wanted).joint(ends, seeds, tangents)
    _require_symbol(gm)
    layout, found = _layout(gm, written, wanted)
    layout = layout if with_loss else _marked(gm, layout, wanted)
    joint = written.gm
    joint.graph.output((*(n and written.made[n] for n in facts.outputs(gm)), *found))
    joint.graph.eliminate_dead_code()
    joint.meta[facts.KEY] = dataclasses.replace(info, outputs=tuple(layout), runs_code=theirs)
    require_kept(joint)
    prove_cotangents(gm, joint, carried(written.values))
    SITES.put(joint, described(gm, layout))
    return joint


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
    parameters = _parameters(gm)
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
        axis = fact(node).samples
        several = fact(node).uniform and isinstance(axis, SampleAxis) and axis.outer * axis.inner > 1
        if several and not facts.ancestors([node]).isdisjoint(parameters):
            raise NotYetSupported(
                f"of the output {spec.name!r} of the model nothing says which rows are whose", where=locate(node),
                why=f"it is the same for all samples, in {axis}, and the loss may meet its rows in another order",
                fix="return it with a dim of its own for the samples, [B, ..]; or pass loss_fn",
            )  # fmt: skip


def _parameters(gm: GraphModule) -> set[Node]:
    return {n for n in facts.placeholders(gm) if facts.input_spec(n).kind == "parameter"}


def _is_float(node: Node) -> bool:
    found: bool = node.meta["val"].is_floating_point()
    return found


def _like(node: Node, ones: bool) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"].detach()
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.ones_like(value) if ones else torch.empty_like(value)


def _marked(gm: GraphModule, layout: list[OutputSpec], wanted: Sequence[Node]) -> list[OutputSpec]:
    """The outputs to which no gradient comes back are said to be detached."""
    reached = _parameters(gm) | set(wanted)
    for node in gm.graph.nodes:
        stops = node.op == "output" or is_detach(node)
        stops = stops or known(node.target).undifferentiated
        if not stops and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    values = [*facts.outputs(gm), *[None] * len(layout)]
    return [
        dataclasses.replace(spec, field=facts.DETACHED) if spec.kind == "output" and node not in reached else spec
        for spec, node in zip(layout, values, strict=False)
    ]


def _layout(gm: GraphModule, written: Written, inputs: Sequence[Node]) -> tuple[list[OutputSpec], list[Node]]:
    """Name the extra outputs: activations, and what prefixes have drawn, by the node that makes them; cotangents
    `site.k`.
    """
    found: dict[OutputSpec, Node] = {}
    for site in gm.graph.nodes:
        if fact(site).site:
            read = [n for n in site.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
            found.update({OutputSpec("activation", n.name): written.made[n] for n in read})
            for k, _ in enumerate(facts.tensors(site.meta["val"])):
                if (site, k) in written.cotangents:
                    found[OutputSpec("cotangent", f"{site.name}.{k}")] = written.cotangents[site, k]
    drawn = {name for prefix in PREFIXES.of(gm).values() for name in prefix.drawn}
    for node in gm.graph.nodes:
        if node.name in drawn:
            found.setdefault(OutputSpec("activation", node.name), written.made[node])
    for node in inputs:
        if (node, 0) in written.cotangents:
            found[OutputSpec("input_gradient", node.name)] = written.cotangents[node, 0]
    return [*facts.graph_facts(gm).outputs, *found], [*found.values()]
