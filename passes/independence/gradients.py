"""Backward formulas of ATen: ḡx = Σ ȳ · ∂y/∂x.  What keeps the samples apart forward keeps them apart backward.

The gradient of x holds the samples where x does.  A gradient that is summed over all rows of x (that of a weight) is
not asked for here, because parameters are not differentiated; where an op computes one, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis

from .contractions import contraction
from .reductions import reduced_over
from .table import Placement, sample_rule
from .values import Argument, Op, Result, broadcast, symbolic_sizes
from .views import cut_bound

_WHERE = "its gradient belongs to all samples together"


def _together(op: Op, values: Sequence[Argument | None], ndim: int) -> SampleAxis | None:
    """The axis of values that are combined row by row."""
    found = broadcast(op, [v for v in values if v is not None], ndim).axes
    assert not isinstance(found, tuple)
    return found


def _only(op: Op, axis: Placement, *wanted: bool) -> Placement:
    """The axis for the gradients of data; no gradient of a weight may be computed."""
    mask = op.raw("output_mask")
    if mask is not None and any(asked and not data for asked, data in zip(mask, wanted, strict=True)):
        raise op.unsupported(_WHERE, "freeze the parameter, or make it one of the model's")
    return axis


# ---- one element at a time, or along a dim ---------------------------------------------------------------------------

_ELEMENTWISE = """
    hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward elu_backward
    mish_backward softplus_backward softshrink_backward rrelu_with_noise_backward threshold_backward
    _prelu_kernel_backward native_dropout_backward
"""


@sample_rule(*_ELEMENTWISE.split(), "log_sigmoid_backward", proof="elementwise")
def elementwise_backward(op: Op) -> Placement:
    """ḡx[..] = ȳ[..] f(x[..], ..)."""
    values = [v for v in op.values() if 0 not in v.shape]  # the buffer of log_sigmoid is empty on some devices
    return Result(_together(op, values, len(op.out().shape)))


_LOSSES = """
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
    binary_cross_entropy_backward
"""


@sample_rule(*_LOSSES.split(), proof="elementwise")
def loss_backward(op: Op) -> Placement:
    """ḡx[..] = ȳ[..] f(x[..], y[..]); a mean over all elements counts those of all samples."""
    if op.raw("reduction", 1) != 0:
        raise op.refuse("it is the gradient of a loss reduced over the samples")
    return _together(op, op.values(), len(op.out().shape))


def _along(op: Op, values: Sequence[Argument | None], dim: int) -> Placement:
    axis = _together(op, values, len(op.out().shape))
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
    """Zeros but for a range of a dim; of the sample dim, only whole blocks of all samples."""
    g, out = op.need("grad_output"), op.out()
    dim = op.dim("dim", g.ndim)
    if g.axis is None:
        return _nothing(op, dim)
    if dim != g.axis.dim:
        bounds = [n for n in symbolic_sizes(op.node, op.batch) if n in (op.raw("start"), op.raw("end"))]
        if bounds:
            raise op.refuse(f"where it cuts dim {dim} depends on the batch size")
        return g.axis
    start, factor, inner = cut_bound(op, op.raw("start", 0), dim, out.factor), out.factor, g.axis.inner
    if op.raw("step", 1) != 1 or start % inner or factor % inner:
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
    """ḡx[.., j, ..]: the sum over the windows of `dim` that hold place j."""
    g = op.need("grad_in")
    dim = op.dim("dim", g.ndim - 1)
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


# ---- windows ---------------------------------------------------------------------------------------------------------


def rows_of(count: int, *names: str) -> Callable[[Op], Placement]:
    """A rule maker: the op works on the last `count` dims of the tensors in the arguments `names` (or of all)."""

    def apply(op: Op) -> Placement:
        values = [v for n in names if (v := op.value(n)) is not None] if names else op.values()
        axis = _together(op, values, max(v.ndim for v in values))
        if axis is None:
            return None
        ndim = max(v.ndim for v in values)
        if axis.dim >= ndim - count or any(v.ndim != ndim or v.axis is None for v in values):
            raise op.refuse(f"its windows run over the last {count} dims, and dim {axis.dim} holds the samples")
        return axis

    return apply


for _count, _names in (
    (1, """reflection_pad1d_backward replication_pad1d_backward upsample_nearest1d_backward upsample_linear1d_backward
           _upsample_nearest_exact1d_backward"""),
    (2, """_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward avg_pool2d_backward
           max_pool2d_with_indices_backward fractional_max_pool2d_backward reflection_pad2d_backward
           replication_pad2d_backward upsample_nearest2d_backward _upsample_nearest_exact2d_backward
           upsample_bilinear2d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward
           _upsample_bicubic2d_aa_backward _upsample_lanczos2d_aa_backward"""),
    (3, """_adaptive_avg_pool3d_backward adaptive_max_pool3d_backward avg_pool3d_backward
           max_pool3d_with_indices_backward fractional_max_pool3d_backward reflection_pad3d_backward
           replication_pad3d_backward upsample_nearest3d_backward _upsample_nearest_exact3d_backward
           upsample_trilinear3d_backward"""),
):  # fmt: skip
    sample_rule(*_names.split(), proof="trailing dims", sizes=True)(rows_of(_count))


@sample_rule("convolution_backward", proof="convolution", sizes=True)
def convolution_backward(op: Op) -> Placement:
    """ḡx: the transposed convolution of ȳ.  Samples in dim 0, or (kernels of their own) as groups of channels."""
    g, x, weight = op.need("grad_output"), op.need("input"), op.need("weight")
    sizes = symbolic_sizes(op.node, op.batch)
    if any(n not in (op.raw("groups"), *(op.raw("bias_sizes") or ())) for n in sizes):
        raise op.refuse(f"its argument %{sizes[0].name} depends on the batch size")
    if weight.axis is None and op.raw("groups") not in sizes:
        axis = _together(op, [g, x], x.ndim)
        if axis is not None and (axis.dim != 0 or g.axis is None or x.axis is None):
            raise op.refuse(f"its sum runs over dim {axis.dim}, the sample dim")
        return _masked(op, _only(op, axis, True, False, False), None, None)
    groups = op.number("groups", 1)
    if (
        op.raw("transposed") or g.axis != SampleAxis(1, 1, g.shape[1]) or x.axis != SampleAxis(1, 1, x.shape[1])
        or weight.axis != SampleAxis(0, 1, weight.shape[0]) or weight.shape[1] * groups != x.shape[1]
        or weight.shape[0] % groups or op.raw("groups") not in sizes
    ):  # fmt: skip
        raise op.refuse("its groups are not those of single samples")
    return _masked(op, x.axis, weight.axis, SampleAxis(0, 1, weight.shape[0]))


def _masked(op: Op, *found: Any) -> Placement:
    """One axis for each output that is computed."""
    mask = op.raw("output_mask", [True] * len(found))
    return tuple(a if asked else None for a, asked in zip(found, mask, strict=True))


@sample_rule("grid_sampler_2d_backward", "grid_sampler_3d_backward", proof="windows")
def grid_sampler_backward(op: Op) -> Placement:
    """ḡx[b] and ḡgrid[b]: all hold the samples in dim 0."""
    values = [op.need(n) for n in ("grad_output", "input", "grid")]
    if all(v.axis is None for v in values):
        return None
    if any(v.axis != SampleAxis(0, *_order(values[0])) for v in values):
        raise op.refuse("its images and grids do not all hold the samples in dim 0")
    return _masked(op, values[1].axis, values[2].axis)


def _order(value: Argument) -> tuple[int, int]:
    return (1, 1) if value.axis is None else (value.axis.outer, value.axis.inner)


@sample_rule("affine_grid_generator_backward", proof="windows", sizes=True)
def affine_grid_backward(op: Op) -> Placement:
    """ḡθ[b] = Σ_p ȳ[b, p.., :] p."""
    g = op.need("grad")
    if g.axis is not None and g.axis.dim != 0:
        raise op.refuse(f"its sum runs over dim {g.axis.dim}, the sample dim")
    return g.axis


# ---- norms -----------------------------------------------------------------------------------------------------------


@sample_rule("native_layer_norm_backward", "_fused_rms_norm_backward", proof="norm over trailing dims")
def layer_norm_backward(op: Op) -> Placement:
    """ḡx: each row of the leading dims by itself."""
    names = [n for n in ("grad_out", "input", "mean", "rstd") if n in op.args]
    wide = len(op.raw("normalized_shape"))
    axis = rows_of(wide, *names)(op)
    if any((v := op.value(n)) is not None and v.axis is not None for n in ("weight", "bias")):
        raise op.unsupported("its weight carries samples")
    rest = len(op.raw("output_mask")) - 1
    return _masked(op, _only(op, axis, True, *[False] * rest), *[None] * rest)


@sample_rule("native_group_norm_backward", proof="norm of each row of dim 0", sizes=True)
def group_norm_backward(op: Op) -> Placement:
    """ḡx[b]: mean and rstd are `[N, groups]`."""
    values = [op.need(n) for n in ("grad_out", "input", "mean", "rstd")]
    if any(n in symbolic_sizes(op.node, op.batch) for n in (op.raw("C"), op.raw("HxW"), op.raw("group"))):
        raise op.refuse("how it groups the channels depends on the batch size")
    if (weight := op.value("weight")) is not None and weight.axis is not None:
        raise op.unsupported("its weight carries samples")
    axis = values[1].axis
    if any(v.axis != axis for v in values) or (axis is not None and axis.dim != 0):
        raise op.refuse("its statistics run over the sample dim", "give it [B, channels, ...]")
    return _masked(op, _only(op, axis, True, False, False), None, None)


@sample_rule(
    "native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward",
    proof="norm of each channel",
)  # fmt: skip
def batch_norm_backward(op: Op) -> Placement:
    """ḡx[:, c]: sums over all dims but that of the channels, which must be where the samples lie (instance norm)."""
    g, x = op.value("grad_out") or op.need("grad_output"), op.need("input")
    axis = _together(op, [g, x], x.ndim)
    if axis is None:
        return None
    if axis.dim != 1:
        if op.raw("train", op.raw("update", True)) or op.sampled()[2:]:
            raise op.refuse(f"its sums run over dim {axis.dim}, the sample dim")
        return _masked(op, _only(op, axis, True, False, False), None, None)
    channels = sample_axis.moved(axis, 0)
    if any(v.axis not in (None, channels) for v in op.values() if v.ndim == 1):
        raise op.refuse("its statistics do not hold the samples where its channels do")
    return _masked(op, axis, channels, channels)


# ---- contractions ----------------------------------------------------------------------------------------------------


@sample_rule("_cdist_backward", proof="contraction")
def cdist_backward(op: Op) -> Placement:
    """ḡa[n.., i, :] = Σ_j ȳ[n.., i, j] f(a[n.., i, :], b[n.., j, :], d[n.., i, j])."""
    operands = [op.need(n) for n in ("grad", "x1", "x2", "cdist")]
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
    return reduced_over(op, found[0].axis, ndim, summed or [ndim])


_ATTENTION = """
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward
"""


@sample_rule(*_ATTENTION.split(), proof="attention")
def attention_backward(op: Op) -> Placement:
    """ḡq, ḡk, ḡv[n..]: all hold the samples in the same leading dim."""
    names = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp", "attn_mask", "attn_bias")
    values = {n: v for n in names if (v := op.value(n)) is not None and v.shape not in ((), (0,))}
    axis = values["query"].axis
    for name, value in values.items():
        if name in ("attn_mask", "attn_bias") and (value.axis is None or value.axis == axis):
            continue
        if value.axis != axis:
            raise op.refuse(f"%{value.node.name} does not hold the samples where %{values['query'].node.name} does")
    if axis is None:
        return None
    if axis.dim >= values["query"].ndim - 2:
        raise op.refuse(f"dim {axis.dim}, the sample dim, is the dim attention runs over")
    outs = op.node.meta["val"]
    return tuple(axis if k < 3 else None for k in range(len(outs)))


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
    raise op.unsupported(_WHERE)
