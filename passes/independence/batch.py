"""Pass `batch`: where the samples lie in every value, and the proof that no op mixes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.squeezes import may_take_samples, name_squeezed_dims
from psg_fx.graph.strides import free_of_strides
from psg_fx.source import locate
from psg_fx.torch_private.symbols import depends_on_values

from .logged import logged
from .prove import prove
from .rewriting.at_places import look_up_at_picked_places
from .rewriting.concatenated import take_rows_apart
from .rewriting.filled import write_one_after_the_other
from .rewriting.flat_targets import pad_flat_targets
from .rewriting.grids import look_up_by_sample
from .rewriting.listed import pick_by_masks
from .rewriting.masked import pad_masked_rows
from .rewriting.nested import pick_once
from .rewriting.picked import ONE_ROW
from .rewriting.placed import place_by_sample
from .rewriting.reordered import undo_orders
from .rewriting.selected import put_selected_back
from .rewriting.whole_rows import pick_whole_rows

aten = torch.ops.aten


def batch(gm: GraphModule, alone: Callable[[GraphModule, list[Node]], str] | None = None) -> GraphModule:
    """Set `samples`, `reduced` and `proof` in the fact of every value, or raise `SamplesMixed`.

    A value with samples holds, in block i of its sample axis, what the program of one sample (B = 1) computes for
    sample i.  A *reduced* value is reduced over the samples; only the loss may come from it.

    alone: compares the graph with the code for a batch of one, where ops of the graph keep the sample dim and the code
    drops it, where the code writes into what may be a copy, or trims a padding; returns a note, or refuses.
    """
    taken = keep_the_sample_dim(gm)
    write_one_after_the_other(gm)
    place_by_sample(gm)
    undo_orders(gm)
    pad_flat_targets(gm)
    look_up_by_sample(gm)
    pick_by_masks(gm)
    pick_whole_rows(gm)
    look_up_at_picked_places(gm)
    pick_once(gm)
    put_selected_back(gm)
    whole = take_rows_apart(gm)
    if not _picks_of_rows(gm):
        pad_masked_rows(gm)
    free_of_strides(gm)
    prove(gm, whole)
    dropping = [node for node, dims in taken.items() if not node._erased and _is_sample_dim(node, dims)]
    if kept := [node for node in logged(gm) if may_take_samples(node, facts.graph_facts(gm).batch)]:
        facts.update_graph(gm, not_alone=locate(min(kept)))
    info = facts.graph_facts(gm)
    doubted = dropping or info.squeezed or info.written_copy or info.trims
    if alone is not None and doubted and (note := alone(gm, dropping)):
        facts.update_graph(gm, notes=(*info.notes, note))
    return gm


def _picks_of_rows(gm: GraphModule) -> bool:
    """Whether a mask picks among rows of samples, such as edges: of those each sample has any number, so there is none
    that all could be padded to.
    """
    counts = set(facts.graph_facts(gm).rows)
    if not counts:
        return False
    picks = [n for n in gm.graph.nodes if n.target in (aten.index.Tensor, aten.masked_select.default)]
    masks = [m for n in picks for m in n.all_input_nodes[1:] if m.meta["val"].dtype is torch.bool]
    return any(counts.intersection(facts.shape(m.meta["val"])) for m in masks)


def _is_sample_dim(node: Node, dims: Sequence[int]) -> bool:
    """Whether a batch of one has size 1 in one of the dims, because they are the samples'."""
    source = node.args[0]
    assert isinstance(source, Node)
    axis = facts.fact(source).samples
    return isinstance(axis, facts.SampleAxis) and axis.outer * axis.inner == 1 and axis.dim in dims


def keep_the_sample_dim(gm: GraphModule) -> dict[Node, list[int]]:
    """A squeeze would take the sample dim too when the batch has one sample: let it name the dims it takes.

    The squeezes, each with the dims that it may take.
    """
    found = name_squeezed_dims(gm)
    for node, dims in found.items():
        sizes = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        node.meta[ONE_ROW] = any(depends_on_values(sizes[d]) for d in dims)
    return found
