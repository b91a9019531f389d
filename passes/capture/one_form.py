"""Captures of one program at several batch sizes, brought to one form: what is written in another way for one sample,
or once for each sample, and means the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call, written_before

from ..independence.arguments import dim_of
from .fills import is_fill, write_fills
from .rolled import roll
from .taken_apart import JOINING, put_together

aten = torch.ops.aten


def in_one_form(graphs: Sequence[GraphModule], sizes: Sequence[int]) -> str:
    """Rewrite captures at these sizes.  Returns the line of a loop over the samples, if there was one."""
    loop = ""
    for gm in graphs:
        put_together(gm)
        without_copies(gm)
    if are_longer(graphs):
        loop, *_ = [roll(gm, size) for gm, size in zip(graphs, sizes, strict=True)]
    for gm in graphs:
        without_copies(gm)
        _with_all_sizes(gm)
        _with_leading_ones(gm)
        _without_words(gm)
    if are_longer(graphs) or _fills_differ(graphs):
        for gm in graphs:
            write_fills(gm)
    if are_longer(graphs):
        for gm in graphs:
            _without_expansions(gm)
        several = next((gm for gm, size in zip(graphs, sizes, strict=True) if size > 1), graphs[0])
        for gm in (gm for gm, size in zip(graphs, sizes, strict=True) if size == 1):
            _with_expansions(gm, several)
    if not are_longer(graphs):
        for column in zip(*(list(g.graph.nodes) for g in graphs), strict=True):
            _with_open_ends(column)
            _once(column, graphs, sizes)
    return loop


def are_longer(graphs: Sequence[GraphModule]) -> bool:
    """Whether some graphs have more nodes than others."""
    return len({len(gm.graph.nodes) for gm in graphs}) > 1


def _with_open_ends(column: Sequence[Node]) -> None:
    """A slice that takes all rows at every size, as the one chunk of a loop over chunks does, has no end."""
    if all(n.target is aten.slice.Tensor and n.meta["val"].shape == n.args[0].meta["val"].shape for n in column):  # type: ignore[union-attr]
        for node in column:
            node.args = (*node.args[:2], 0, sys.maxsize)


def _once(column: Sequence[Node], graphs: Sequence[GraphModule], sizes: Sequence[int]) -> None:
    """One value put together as many times as there are samples, `torch.cat([w] * len(x))`, is repeated."""
    if column[0].target not in JOINING:
        return
    parts: list[Any] = [node.args[0] if node.target is column[0].target else [] for node in column]
    if not all(len(p) == size and len(set(p)) == 1 for p, size in zip(parts, sizes, strict=True)):
        return
    for node, gm, (first, *_), size in zip(column, graphs, parts, sizes, strict=True):
        times = [1] * node.meta["val"].ndim
        dim = dim_of(node, len(times))
        times[dim] = size
        with written_before(node, node.meta):
            one = first if node.target is aten.cat.default else call(gm, aten.unsqueeze.default, first, dim)
            node.replace_all_uses_with(call(gm, aten.repeat.default, one, times))
        gm.graph.erase_node(node)


def _fills_differ(graphs: Sequence[GraphModule]) -> bool:
    """Whether some fill is like another tensor in one graph than in the next: code that keeps a state keeps its sizes,
    and makes it anew for a batch of others.
    """
    places = [{node: place for place, node in enumerate(gm.graph.nodes)} for gm in graphs]
    like = {tuple((p[n], p[n.all_input_nodes[0]]) for n in p if is_fill(n)) for p in places}
    return len(like) > 1


def without_copies(gm: GraphModule) -> None:
    """A copy has the values of what is copied, and nothing is written.  A `reshape` copies where it must, which for one
    sample is elsewhere.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
        if not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _without_expansions(gm: GraphModule) -> None:
    """To the same size: for one sample, code may expand what it has once for all."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.expand.default):
        given: Any = node.args[0]
        if given.meta["val"].shape == node.meta["val"].shape and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(given)
            gm.graph.erase_node(node)


def _with_expansions(gm: GraphModule, several: GraphModule) -> None:
    """To the same size, of one sample, where of several what they have in common is expanded to all of them."""
    nodes, own, made = iter(list(gm.graph.nodes)), dict[Node, Node](), dict[Node, Node]()
    node = next(nodes)
    for other in several.graph.nodes:
        if other.target is aten.expand.default and node.target is not aten.expand.default and other.args[0] in own:
            given = own[other.args[0]]
            with written_before(node, given.meta):
                own[other] = made[other] = call(gm, aten.expand.default, given, list(given.meta["val"].shape))
            continue
        if node.op != other.op:
            return  # these are two programs
        own[other] = node
        for theirs, mine in zip(other.all_input_nodes, node.all_input_nodes, strict=False):
            if theirs in made and mine is made[theirs].args[0]:
                node.replace_input_with(mine, made[theirs])
        node = next(nodes, node)


def _without_words(gm: GraphModule) -> None:
    """Checks of sizes that depend on values are told apart by their words, which name the batch size."""
    for node in gm.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        node.args = (node.args[0], "")


def _with_all_sizes(gm: GraphModule) -> None:
    """A `reshape` that copies has found out what -1 is; an `expand` is given what stays by its size or by -1."""
    for target in (aten.reshape.default, aten.expand.default):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            shape = list(node.meta["val"].shape)
            if all(isinstance(size, int) for size in shape):
                node.args = (node.args[0], shape)


def _with_leading_ones(gm: GraphModule) -> None:
    """What `x[i] = value` writes has lost its leading dims of size 1, and of one sample that of the samples, too."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.index_put.default):
        given: Any = node.args[:3]
        target, indices, value = given
        picks = [pick and pick.meta["val"] for pick in indices]
        if value.target is not aten.reshape.default or any(p is not None and p.dtype in _MASKS for p in picks):
            continue
        stripped, shape = (list(n.meta["val"].shape) for n in (value, value.args[0]))
        lost = len(shape) - len(stripped)
        if lost > 0 and shape == [1] * lost + stripped:
            lost = max(0, len(shape) - aten.index.Tensor(target.meta["val"], picks).ndim)
            with written_before(node, value.meta):
                kept = call(gm, aten.reshape.default, value.args[0], shape[lost:]) if lost else value.args[0]
            node.replace_input_with(value, kept)
            if not value.users:
                gm.graph.erase_node(value)


_MASKS = (torch.bool, torch.uint8)
