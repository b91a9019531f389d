"""Backward formulas of layers: windows, norms, attention.

The gradient of x holds the samples where x does.  A gradient that is summed over all rows of x (that of a weight) is
not asked for here, because parameters are not differentiated; where an op computes one, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis

from ..arguments import symbolic_sizes
from ..table import Placement, sample_rule
from ..values import Op
from .gradients import OF_ALL, row_by_row
from .windows import grouped_channels


def _only(op: Op, axis: Placement, *wanted: bool) -> Placement:
    """The axis for the gradients of data; no gradient of a weight may be computed."""
    mask = op.raw("output_mask")
    if mask is not None and any(asked and not data for asked, data in zip(mask, wanted, strict=True)):
        raise op.unsupported(OF_ALL, "freeze the parameter, or make it one of the model's")
    return axis


# ---- windows ---------------------------------------------------------------------------------------------------------


def rows_of(count: int, *names: str) -> Callable[[Op], Placement]:
    """A rule maker: the op works on the last `count` dims of the tensors in the arguments `names` (or of all)."""

    def apply(op: Op) -> Placement:
        values = [v for n in names if (v := op.value(n)) is not None] if names else op.values()
        axis = row_by_row(op, values, max(v.ndim for v in values))
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
        axis = row_by_row(op, [g, x], x.ndim)
        if axis is not None and (axis.dim != 0 or g.axis is None or x.axis is None):
            raise op.refuse(f"its sum runs over dim {axis.dim}, the sample dim")
        return _masked(op, _only(op, axis, True, False, False), None, None)
    channels = grouped_channels(op, weight, bool(op.raw("transposed")))
    found = [v.axis if v.shape[1] == n else None for v, n in zip((x, g), channels, strict=True)]
    if found != [SampleAxis(1, 1, n) for n in channels] or op.raw("groups") not in sizes:
        raise op.refuse("its groups are not those of single samples")
    return _masked(op, x.axis, weight.axis, SampleAxis(0, 1, channels[1]))


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
    first = values[0].axis or SampleAxis(0)
    if any(v.axis != SampleAxis(0, first.outer, first.inner) for v in values):
        raise op.refuse("its images and grids do not all hold the samples in dim 0")
    image, _ = op.raw("output_mask", [True, True])
    return values[1].axis if image else None, values[2].axis  # torch computes the second in any case


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
    axis = row_by_row(op, [g, x], x.ndim)
    if axis is None:
        return None
    if axis.dim != 1:
        if op.raw("train", op.raw("update", True)) or op.sampled()[2:]:
            raise op.refuse(f"its sums run over dim {axis.dim}, the sample dim")
        return _masked(op, _only(op, axis, True, False, False), None, None)
    channels = sample_axis.moved(axis, 0)
    if any(v.axis not in (None, channels) for v in op.values() if v.ndim == 1):
        raise op.refuse("its statistics do not hold the samples where its channels do")
    of_input = axis if len(op.out().shape) == x.ndim else None  # which torch may give unasked
    return (of_input, *(channels if asked else None for asked in op.raw("output_mask", [True] * 3)[1:]))


# ---- attention -------------------------------------------------------------------------------------------------------

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
    axis = next((v.axis for v in values.values() if v.axis and not v.found.uniform), values["query"].axis)
    for name, value in values.items():
        if name in ("attn_mask", "attn_bias") and value.axis is None:
            continue
        if not value.fits(axis):
            raise op.refuse(f"%{value.node.name} does not hold the samples where %{values['query'].node.name} does")
    if axis is None:
        return None
    if axis.dim >= values["query"].ndim - 2:
        raise op.refuse(f"dim {axis.dim}, the sample dim, is the dim attention runs over")
    outs = op.node.meta["val"]
    return tuple(axis if k < 3 else None for k in range(len(outs)))
