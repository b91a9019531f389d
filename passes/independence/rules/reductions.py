"""Reductions: y[kept] = f over the reduced dims.  Over the sample dim, it is *reduced*: for the loss only."""

from __future__ import annotations

import math

from torch.fx import Node

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis

from ..table import Placement, sample_rule
from ..values import REDUCED, Argument, Op, broadcast

_MANY = """
    sum mean nansum nanmean amax amin aminmax _aminmax all any prod var std var_mean std_mean logsumexp
    special_logsumexp norm linalg_vector_norm linalg_norm count_nonzero argmax argmin max min median nanmedian mode
    kthvalue quantile nanquantile linalg__powsum frobenius_norm
"""


@sample_rule(*_MANY.split(), proof="reduction")
def reduction(op: Op) -> Placement:
    """Over `dim` (all dims where it is absent); two tensors (max.other) are elementwise and never come here."""
    x, q = op.value("self") or op.need("input"), op.value("q")
    if q is not None and q.axis is not None:
        raise op.unsupported("which quantiles it takes depends on the samples")
    if x.axis is None:
        return None
    if op.value("other") is not None:
        raise op.unsupported("its second argument is a tensor")
    default = -1 if op.name.endswith(("kthvalue", "mode")) else None
    given = op.dims("dim", x.ndim)
    if given is None and default is not None:
        given = [x.ndim - 1]
    found = reduced_over(op, x.axis, given)
    if found is REDUCED and op.name.endswith(_SPREADS):
        _require_a_spread(op, x, given)
    if isinstance(found, SampleAxis) and q is not None and q.ndim:
        return sample_axis.moved(found, found.dim + 1)  # several quantiles lie in a new first dim
    return found


_SPREADS = (".var", ".std", ".var_mean", ".std_mean")


def _require_a_spread(op: Op, x: Argument, dims: list[int] | None) -> None:
    """A variance over the samples alone is 0/0 for one sample, and so would be every loss."""
    elements = math.prod(x.shape[d] for d in (range(x.ndim) if dims is None else dims))
    correction = op.raw("correction", 1) if op.raw("unbiased", True) else 0
    if isinstance(correction, Node):
        raise op.unsupported("its correction depends on the batch size")
    if elements <= (1 if correction is None else correction):
        raise op.refuse("it is a statistic over the samples, which a batch of one does not have (0/0)")


def reduced_over(op: Op, axis: SampleAxis, dims: list[int] | None) -> Placement:
    """The axis after a reduction over `dims`; REDUCED where the samples are among them."""
    if dims is None:
        return REDUCED
    return sample_axis.through_reduction(axis, dims, bool(op.raw("keepdim", False))) or REDUCED


@sample_rule("linalg_matrix_norm", "nuclear_norm", proof="reduction")
def matrix_norm(op: Op) -> Placement:
    """Over two dims, the last two by default."""
    x = op.value("self") or op.need("input")
    if x.axis is None:
        return None
    dims = op.dims("dim", x.ndim) or [x.ndim - 2, x.ndim - 1]
    if x.axis.dim in dims:
        raise op.refuse("its matrices run over the sample dim")
    return reduced_over(op, x.axis, dims)


@sample_rule("dot", "vdot", proof="reduction")
def dot(op: Op) -> Placement:
    """Σ_i a[i] b[i]: a reduction if both hold the same samples in i."""
    left, right = op.values()
    if left.axis is None and right.axis is None:
        return None
    if left.axis is None or right.axis is None or left.axis != right.axis:
        raise op.refuse("its sum runs over the sample dim of one factor only")
    return REDUCED


@sample_rule("cosine_similarity", "pairwise_distance", "linalg_vecdot", "dist", proof="reduction")
def pair_reduction(op: Op) -> Placement:
    """Two values combined element by element, then reduced over one dim."""
    values = op.values()
    ndim = max(v.ndim for v in values)
    found = broadcast(op, values, ndim)
    if not isinstance(found.axes, SampleAxis):
        return None
    if op.name == "aten.dist":
        return REDUCED
    dim = ndim - 1 if op.name == "aten.pairwise_distance" else op.dim("dim", ndim, -1)
    return reduced_over(op, found.axes, [dim])


@sample_rule("trace", "histc", "bincount", "cov", "corrcoef", "unique_consecutive", "_unique2", "unique_dim",
      "nonzero", "nonzero_numpy", "nonzero_static", "where.default", "masked_select", "argwhere", "pdist",
      "_pdist_forward", proof="reduction")  # fmt: skip
def pooled(op: Op) -> Placement:
    """One answer from the rows of all samples."""
    if op.name.split(".")[-1] in ("masked_select", "nonzero", "nonzero_numpy", "where", "argwhere"):
        raise op.unsupported("how many rows it returns depends on the samples, so they have no fixed place",
                             "pick by the mask itself, x[mask], or compute all: torch.where(mask, a, b)")  # fmt: skip
    raise op.refuse("it computes one answer from the rows of all samples")


_ELEMENTWISE_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss
"""
_OTHER_LOSSES = """
    nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward cross_entropy_loss cosine_embedding_loss
    triplet_margin_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward ctc_loss _ctc_loss
"""


@sample_rule(*_ELEMENTWISE_LOSSES.split(), proof="elementwise")
def elementwise_loss(op: Op) -> Placement:
    """Without a reduction, each element is a loss of its own."""
    return broadcast(op, op.values(), len(op.out().shape)) if op.raw("reduction", 1) == 0 else whole_loss(op)


@sample_rule(*_OTHER_LOSSES.split(), proof="loss")
def whole_loss(op: Op) -> Placement:
    """Losses captured as one op; the others are taken apart before (`losses.py`)."""
    raise op.unsupported(
        "the loss is captured as one op, whose reduction cannot be taken apart",
        "write the loss with simpler ops, or ask for its decomposition",
    )
