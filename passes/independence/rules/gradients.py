"""Backward formulas of ATen, ḡx = Σ ȳ · ∂y/∂x: what keeps the samples apart forward keeps them apart backward.

The gradient of x holds the samples where x does.  Those of layers are in `layer_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis

from ..arguments import symbolic_sizes
from ..table import Placement, sample_rule
from ..values import Argument, Op, Result, broadcast
from .contractions import contraction
from .reductions import reduced_over
from .views import cut_bound, every

OF_ALL = "its gradient belongs to all samples together"


def row_by_row(op: Op, values: Sequence[Argument], ndim: int) -> SampleAxis | None:
    """The axis of values that are combined row by row."""
    found = broadcast(op, values, ndim).axes
    assert not isinstance(found, tuple)
    return found


# ---- one element at a time, or along a dim ---------------------------------------------------------------------------

_ELEMENTWISE = """
    hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward elu_backward
    mish_backward softplus_backward softshrink_backward rrelu_with_noise_backward threshold_backward
    _prelu_kernel_backward native_dropout_backward _standard_gamma_grad _dirichlet_grad
"""


@sample_rule(*_ELEMENTWISE.split(), "log_sigmoid_backward", proof="elementwise")
def elementwise_backward(op: Op) -> Placement:
    """ḡx[..] = ȳ[..] f(x[..], ..)."""
    values = [v for v in op.values() if 0 not in v.shape]  # the buffer of log_sigmoid is empty on some devices
    return Result(row_by_row(op, values, len(op.out().shape)))


_LOSSES = """
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
    binary_cross_entropy_backward
"""


@sample_rule(*_LOSSES.split(), proof="elementwise")
def loss_backward(op: Op) -> Placement:
    """ḡx[..] = ȳ[..] f(x[..], y[..]); a mean over all elements counts those of all samples."""
    if op.raw("reduction", 1) != 0:
        raise op.refuse("it is the gradient of a loss reduced over the samples")
    return row_by_row(op, op.values(), len(op.out().shape))


def _along(op: Op, values: Sequence[Argument], dim: int) -> Placement:
    axis = row_by_row(op, values, len(op.out().shape))
    if axis is not None and axis.dim == dim:
        raise op.refuse(f"it runs along dim {dim}, the sample dim")
    return axis


@sample_rule("_softmax_backward_data", "_log_softmax_backward_data", "_masked_softmax_backward", "glu_backward",
      proof="along another dim")  # fmt: skip
def softmax_backward(op: Op) -> Placement:
    """ḡx[.., :] = J(y[.., :]) ȳ[.., :] along `dim`."""
    return _along(op, op.values(), op.dim("dim", len(op.out().shape), -1))


# ---- views -----------------------------------------------------------------------------------------------------------


@sample_rule("select_backward", proof="view", sizes=True)
def select_backward(op: Op) -> Placement:
    """Zeros but for one index of a dim."""
    g, out = op.need("grad_output"), op.out()
    dim = op.dim("dim", len(out.shape))
    if g.axis is None:
        return _nothing(op, dim)
    return sample_axis.through_unsqueeze(g.axis, g.ndim, dim)


@sample_rule("slice_backward", proof="view", sizes=True)
def slice_backward(op: Op) -> Placement:
    """Zeros but for a range of a dim; of the sample dim, only whole blocks, or the same of each sample's rows."""
    g, out = op.need("grad_output"), op.out()
    dim = op.dim("dim", g.ndim)
    if g.axis is None:
        return _nothing(op, dim)
    if dim != g.axis.dim:
        bounds = [n for n in symbolic_sizes(op.node, op.batch) if n in (op.raw("start"), op.raw("end"))]
        if bounds:
            raise op.refuse(f"where it cuts dim {dim} depends on the batch size")
        return g.axis
    if (step := op.raw("step", 1)) != 1 and every(op, step, g.axis.inner * step):
        return replace(g.axis, inner=g.axis.inner * step)
    start, factor, inner = cut_bound(op, op.raw("start", 0), dim, out.factor), out.factor, g.axis.inner
    if step != 1 or start % inner or factor % inner:
        raise op.refuse(f"it fills a part of dim {dim}, the sample dim, so some samples are left out")
    return SampleAxis(dim, factor // inner, inner)


@sample_rule("diagonal_backward", proof="view", sizes=True)
def diagonal_backward(op: Op) -> Placement:
    """Zeros but for a diagonal."""
    g, ndim = op.need("grad_output"), len(op.out().shape)
    dims = sorted({op.dim("dim1", ndim), op.dim("dim2", ndim, 1)})
    if g.axis is None:
        return _nothing(op, *dims)
    if g.axis.dim == g.ndim - 1:
        raise op.refuse("its diagonal runs through the sample dim")
    return sample_axis.moved(g.axis, [d for d in range(ndim) if d not in dims][g.axis.dim])


@sample_rule("unfold_backward", proof="view", sizes=True)
def unfold_backward(op: Op) -> Placement:
    """ḡx[.., j, ..]: the sum over the windows of `dim` that hold place j; of the one window that `istft` has for all
    samples, the same for each.
    """
    g, out = op.need("grad_in"), op.out()
    dim = op.dim("dim", g.ndim - 1)
    if g.axis is None and out.dim is not None and out.dim != dim and g.shape[out.dim] == 1:
        return Result(SampleAxis(out.dim, 1, out.factor), uniform=True)
    if g.axis is None:
        return _nothing(op, dim)
    if g.axis.dim in (dim, g.ndim - 1):
        raise op.refuse("its windows run over the sample dim")
    return g.axis


def _nothing(op: Op, *dims: int) -> Placement:
    """What is written carries no samples, so neither does the result."""
    if op.out().dim is not None:
        raise op.refuse(f"it writes what all samples share to a part of dim {op.out().dim}, the sample dim")
    return None


# ---- contractions ----------------------------------------------------------------------------------------------------


@sample_rule("_cdist_backward", proof="contraction")
def cdist_backward(op: Op) -> Placement:
    """ḡa[n.., i, :] = Σ_j ȳ[n.., i, j] f(a[n.., i, :], b[n.., j, :], d[n.., i, j])."""
    operands = op.values()  # ȳ, a, b, d: from torch 2.14 on the first has another name
    lead = [[f"n{d}" for d in range(len(op.out().shape) - v.ndim, len(op.out().shape) - 2)] for v in operands]
    last = (["i", "j"], ["i", "k"], ["j", "k"], ["i", "j"])
    labels = [[*a, *b] for a, b in zip(lead, last, strict=True)]
    if op.out().dim is None and op.sampled():
        raise op.refuse("its sum runs over the samples")
    return contraction(op, operands, labels, [f"n{d}" for d in range(len(op.out().shape) - 2)] + ["i", "k"])


@sample_rule("_trilinear", proof="contraction")
def trilinear(op: Op) -> Placement:
    """Σ over `sumdim` of the product of three values, each with dims of size 1 put in at `expandK`."""
    found: list[Argument] = []
    ndim = op.need("i1").ndim + len(op.raw("expand1", []))
    for name, dims in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        value = op.need(name)
        if value.axis is None:
            continue
        old = [d for d in range(ndim) if d not in [sample_axis.positive(e, ndim) for e in op.raw(dims, [])]]
        found.append(Argument(value.node, value.layout, Result(sample_axis.moved(value.axis, old[value.axis.dim]))))
    if not found:
        return None
    if any(v.axis != found[0].axis for v in found):
        raise op.refuse("its factors hold the samples in different dims, so every sample meets every other")
    assert found[0].axis is not None
    summed = [sample_axis.positive(d, ndim) for d in op.raw("sumdim", [])]
    return reduced_over(op, found[0].axis, summed or [ndim])


# ---- of what is refused forward --------------------------------------------------------------------------------------

_REFUSED = """
    embedding_dense_backward embedding_backward _embedding_bag_backward _embedding_bag_dense_backward
    _embedding_bag_per_sample_weights_backward _pdist_backward _segment_reduce_backward masked_scatter_backward
    nll_loss_backward nll_loss2d_backward multi_margin_loss_backward multilabel_margin_loss_backward
    _ctc_loss_backward
"""


@sample_rule(*_REFUSED.split(), proof="reduction")
def pooled_backward(op: Op) -> Placement:
    """The rows of all samples meet in one table, or the forward op is refused as well."""
    raise op.unsupported(OF_ALL)
