"""Pass `batch`: where the samples lie in every value, and the proof that no op mixes them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from psg_fx.axes import positive
from psg_fx.passes.independence import prove
from psg_fx.passes.masked import pad_masked_rows

aten = torch.ops.aten
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def batch(gm: GraphModule) -> GraphModule:
    """Set `samples`, `reduced` and `proof` in the fact of every value, or raise `SamplesMixed`.

    A value with samples holds, in block i of its sample axis, what the program of one sample (B = 1) computes for
    sample i.  A *reduced* value is reduced over the samples; only the loss may come from it.
    """
    keep_the_sample_dim(gm)
    pad_masked_rows(gm)
    return prove(gm)


def keep_the_sample_dim(gm: GraphModule) -> None:
    """A squeeze would take the sample dim too when the batch has one sample: let it name the dims it takes."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in _SQUEEZES:
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        sizes = source.meta["val"].shape
        given = node.args[1] if len(node.args) > 1 else range(len(sizes))
        dims = [positive(d, len(sizes)) for d in ([given] if isinstance(given, int) else given)]
        taken = [d for d in dims if isinstance(sizes[d], int) and sizes[d] == 1]
        if node.target is not aten.squeeze.dim or not taken:
            node.target = aten.squeeze.dims
            node.args = (source, taken)
    gm.recompile()
