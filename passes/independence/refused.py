"""How an op is refused: it mixes samples, or nothing shows that it does not."""

from __future__ import annotations

from torch.fx import Node

from psg_fx.errors import NotYetSupported, PsgError, SamplesMixed
from psg_fx.graph.sample_axis import Misfit, Ragged
from psg_fx.source import locate

from .arguments import op_name

NUMBERS = "it computes with the numbers of the samples (arange over the batch), which one sample alone lacks"
NUMBERS_FIX = "use arange(B) only to pick each sample's row: x[torch.arange(B), ids]"
FIX = "write it so that every sample is computed from its own rows alone"
REWRITE = "rewrite this line with other ops, or write a rule for this op (docs/add-an-op.md)"
GATHER = "gather what each row needs (of experts: their weights[ids], then bmm), or compute all and multiply by a mask"


def mixed(node: Node, why: str, fix: str = FIX, detail: str = "") -> SamplesMixed:
    """`SamplesMixed` at a node."""
    what = f"{op_name(node)} mixes samples, so per-sample gradients do not exist"
    return SamplesMixed(what, where=locate(node, detail), why=why, fix=fix)


def not_shown(node: Node, why: str, fix: str = REWRITE, detail: str = "") -> NotYetSupported:
    """The refusal of an op of which nothing shows what it does with samples."""
    what = f"{op_name(node)} cannot be shown to keep samples apart"
    return NotYetSupported(what, where=locate(node, detail), why=why, fix=fix)


def no_place(node: Node, misfit: Misfit, detail: str = "") -> PsgError:
    """The refusal of a shape in which the samples have no place: not yet, where it depends on the data."""
    if not isinstance(misfit, Ragged):
        return mixed(node, str(misfit), FIX, detail)
    return not_shown(node, f"{misfit}, so no sample's rows have a place", GATHER, detail)
