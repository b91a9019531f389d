"""Targets of `ctc_loss` that a mask picks from padded ones, one sample after another, padded again.

    ctc_loss(log_probs, labels[labels >= 0], lengths, (labels >= 0).sum(-1))

Where a sample's targets begin depends on the lengths of those before.  They are its row of the labels, which the mask
says; so the picked ones of each row are moved to its front, in their order, and torch's op is given `[B, S]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.order import itself
from psg_fx.graph.same_op import alike
from psg_fx.graph.splicing import splice
from psg_fx.source import locate
from psg_fx.tensors import picked_first

from ..arguments import bound, op_name
from .picked import asserts

aten = torch.ops.aten


def pad_flat_targets(gm: GraphModule) -> None:
    """Give each `ctc_loss` its targets as `[B, S]`, or refuse it."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.psg_fx.ctc.default):
        targets: Node = node.args[1]
        if targets.meta["val"].ndim == 1:
            labels, mask = _labels(gm, node, targets)
            dtype = targets.meta["val"].dtype
            padded: Node = splice(gm, node, lambda *given, dtype=dtype: _in_front(*given).to(dtype), [labels, mask])
            node.replace_input_with(targets, padded)
            _erase(gm, targets)
            gm.graph.eliminate_dead_code()


def _in_front(labels: Tensor, mask: Tensor) -> Tensor:
    """Of each row the picked labels first, in their order, and zeros behind."""
    picked = torch.where(mask, labels, torch.zeros((), dtype=labels.dtype, device=labels.device))
    return picked.gather(1, picked_first(mask))


def _labels(gm: GraphModule, node: Node, targets: Node) -> tuple[Node, Node]:
    """The padded labels `[B, S]` and the mask that picks them, of which the lengths are the sums."""
    numbers, pick, lengths = alike(gm), itself(targets), itself(node.args[3])
    labels, mask = _picked(pick)
    if mask is None or labels.meta["val"].ndim != 2 or facts.shape(labels.meta["val"]) != facts.shape(mask.meta["val"]):
        raise _refused(node, "where a sample's target begins depends on the others' lengths")
    counted = itself(lengths.args[0]) if op_name(lengths) == "aten.sum" else None
    if counted is None or bound(lengths).get("dim") not in ([1], [-1]) or numbers[counted] != numbers[itself(mask)]:
        raise _refused(node, "that their lengths are the sums of the mask that picks them is not seen in the graph")
    return labels, mask


def _picked(pick: Node) -> tuple[Any, Any]:
    """What rows are picked of, and by which mask."""
    given = bound(pick) if pick.target in (aten.masked_select.default, aten.index.Tensor) else {"self": None}
    masks = given.get("indices") or [given.get("mask")]
    fits = len(masks) == 1 and isinstance(masks[0], Node) and masks[0].meta["val"].dtype is torch.bool
    return given["self"], masks[0] if fits else None


def _erase(gm: GraphModule, targets: Node) -> None:
    """Drop targets that nothing reads, and what export asserts of their number."""
    above = {targets, itself(targets)}
    after = facts.descendants(above) | above
    if all(n in above or asserts(n) or not isinstance(n.meta.get("val"), Tensor) for n in after):
        for node in reversed([n for n in gm.graph.nodes if n in after]):
            gm.graph.erase_node(node)


def _refused(node: Node, why: str) -> NotYetSupported:
    return NotYetSupported(
        "ctc_loss with the targets of all samples in one dim", where=locate(node), why=why,
        fix="pass padded targets, [B, S]",
    )  # fmt: skip
