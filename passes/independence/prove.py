"""The proof of a whole program: every op keeps the samples apart, and so does what leaves the model and the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.program.changes.written import WRITTEN

from .arguments import numbers_of_samples
from .ragged.alone import show_structure
from .ragged.links import Link
from .ragged.pointers import show_pointers
from .refused import NUMBERS, mixed
from .unruled import refuse_effects
from .walk import Prover, prove_part

aten = torch.ops.aten


def prove(gm: GraphModule, refusals: Mapping[Node, PsgError] | None = None) -> list[Link]:
    """Set `samples`, `reduced` and `proof` of every node, or refuse with the op that mixes samples.

    What it cannot show is returned: the ops that join rows, which must be rows of one sample.

    refusals: what to say of nodes, if they are refused: the reason may lie behind them.
    """
    for node in gm.graph.nodes:  # those that no samples reach too: the step would run them at every call
        if node.op == "call_function":
            refuse_effects(node)
    prover = Prover(gm, refusals=refusals)
    prover.walk()
    _check_model(prover)
    statistics = tuple(_check_outputs(prover))
    _check_numbers(prover)
    _check_arms(prover)
    info = facts.graph_facts(gm)
    notes = [*prover.notes, *(f"{name} keeps a statistic of the whole batch" for name in statistics)]
    facts.update_graph(gm, notes=tuple(dict.fromkeys((*info.notes, *notes))), statistics=statistics)
    if prover.rows is None:
        return []
    links, parts = prover.rows.links, prover.rows.parts
    ordered = show_structure(parts, prover.known, links, prover.logged)
    return [*links, *ordered, *show_pointers(parts, prover.known, links, prover.logged, prove_part)]


def _check_model(prover: Prover) -> None:
    """In the model, a reduction over the samples may only lead to losses, which are numbers, side by side or not."""
    kept = _kept(prover.gm)
    for node, found in prover.known.items():
        value = node.meta.get("val")
        if not found.reduced or not isinstance(value, torch.Tensor) or not value.ndim or not _in_model(node):
            continue
        if not any(t.ndim for t in facts.tensors(prover.origin[node].meta["val"])):
            continue  # made of numbers
        for user in node.users:
            if (user.op == "output" and node not in kept) or (user.op != "output" and not _in_model(user)):
                raise mixed(
                    prover.origin[node],
                    "a reduction over samples in the model itself: its result leaves the model with shape "
                    f"{tuple(value.shape)}, one for all samples",
                    "reduce over the other dims only, or move the reduction into the loss",
                    "in the model",
                )


def _kept(gm: GraphModule) -> set[Node]:
    """What a step only leaves in Python attributes, as an ordinary forward does."""
    pairs = [(n, spec.kind == "written") for spec, n in facts.returned(gm) if n is not None]
    return {n for n, _ in pairs} - {n for n, written in pairs if not written}


def _check_outputs(prover: Prover) -> list[str]:
    """Outputs carry samples or know nothing of them; buffers must not know them.  Returns what holds a statistic."""
    statistics = []
    returned = facts.returned(prover.gm)
    written = WRITTEN.of(prover.gm) if any(spec.kind == "written" for spec, _ in returned) else ()
    labels = iter([entry.label for entry in written for _ in range(entry.tensors)])
    for spec, entry in returned:
        label = next(labels) if spec.kind == "written" else f"the buffer {spec.name.removeprefix('model.')}"
        if not isinstance(entry, Node) or spec.kind in facts.ABOUT_ROWS:
            continue
        found = prover.known[entry]
        if spec.kind in ("buffer", "written") and (found.reduced or entry in prover.statistics):
            statistics.append(label)
        if spec.kind == "written":
            continue
        if found.index or found.structure:
            raise mixed(entry, NUMBERS, "return values of the sample")
        if spec.kind == "output" and found.reduced:
            raise mixed(prover.origin[entry], f"the output {spec.name!r} of the model is reduced over the samples",
                        "return one row for each sample; if it is the model's own loss: transform(model, "
                        "loss_fn=lambda out: out.loss)")  # fmt: skip
        if spec.kind == "buffer" and (found.axes is not None or prover.knows_batch(entry)):
            raise mixed(entry, f"the buffer {spec.name!r} takes the values of the samples of this batch",
                        "model.eval(), or keep a value whose shape does not depend on the batch")  # fmt: skip
    return statistics


def _check_numbers(prover: Prover) -> None:
    """Without a loss, outputs must not depend on how many samples there are; losses have the number of one."""
    returned = facts.returned(prover.gm)
    if any(spec.kind == "loss" for spec, _ in returned):
        return
    above = facts.ancestors(n for spec, n in returned if spec.kind == "output" and isinstance(n, Node))
    for node in prover.gm.graph.nodes:
        if node in above and node.op == "call_function" and numbers_of_samples(node, prover.batch):
            raise mixed(
                node, "the number of samples is among its values: the output of one sample alone is another one",
                "divide in the loss: transform(model, loss_fn)",
            )  # fmt: skip


def _check_arms(prover: Prover) -> None:
    """Where a mask picks nothing, that of each sample alone does neither: it knows nothing of other samples."""
    masks = {mask for spec, n in facts.returned(prover.gm) if spec.field == facts.ARM and n for mask in _masks(n)}
    for node in facts.ancestors(masks):
        found = prover.known[node]
        numbers = node.op == "call_function" and numbers_of_samples(node, prover.batch)
        if found.reduced or numbers or (node in masks and (found.index or found.structure)):
            raise mixed(
                prover.origin.get(node, node), "the code branches on it, and it is not a value of each sample alone",
                "decide by values of single samples, or outside of the model",
            )  # fmt: skip


def _masks(check: Node) -> Iterator[Node]:
    """Those of which a check says whether they pick anything: all of them, or of a check in another arm."""
    if check.target is aten.logical_and.default:
        for node in check.all_input_nodes:
            yield from _masks(node)
    else:
        yield check.all_input_nodes[0] if check.target is aten.any.default else check


def _in_model(node: Node) -> bool:
    """Whether the node was made inside the model (rather than the loss)."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    return any(name == "model" or name.startswith("model.") for name in names)
