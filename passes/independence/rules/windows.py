"""Ops on images and sequences `[N, C, spatial..]`, norms and embeddings: the samples lie in a leading dim."""

from __future__ import annotations

from collections.abc import Callable

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis

from ..arguments import symbolic_sizes
from ..refused import NUMBERS, NUMBERS_FIX
from ..table import Placement, sample_rule
from ..values import Argument, Op, Result, broadcast, tensors
from .along import trailing
from .indexing import require_own_rows


def _main(op: Op) -> Argument:
    return op.value("input") or op.need("self")


def leading(spatial: Callable[[Op, Argument], int], what: str) -> Callable[[Op], Placement]:
    """A rule maker: x is `[N, C, spatial..]` and the op keeps the rows of N apart; parameters carry no samples."""

    def apply(op: Op) -> Placement:
        x = _main(op)
        for other in op.sampled():
            if other.node is not x.node:
                raise op.unsupported(f"its argument %{other.node.name} carries samples")
        if x.axis is None:
            return None
        if x.ndim != spatial(op, x) + 2 or x.axis.dim != 0:
            raise op.refuse(
                f"{what} dim {x.axis.dim} of %{x.node.name}, the sample dim",
                "give it [B, channels, spatial...] with the samples in dim 0",
            )
        return x.axis

    return apply


def _kernel(op: Op, _: Argument) -> int:
    return op.need("weight").ndim - 2


_CONVOLUTIONS = """
    _convolution _convolution_mode thnn_conv2d _slow_conv2d_forward slow_conv3d conv_depthwise3d _conv_depthwise2d
    mkldnn_convolution cudnn_convolution cudnn_convolution_transpose miopen_convolution slow_conv_dilated2d
    slow_conv_transpose2d
"""
_by_rows = leading(_kernel, "its sum runs over")
sample_rule(*_CONVOLUTIONS.split(), proof="convolution")(_by_rows)


_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


@sample_rule("conv1d", "conv2d", "conv3d", *_TRANSPOSED, "convolution", proof="convolution", sizes=True)
def convolution(op: Op) -> Placement:
    """The samples are rows of x, or groups of its channels: x `[N, B·C, ..]`, kernels `[B·O, C/g, ..]`, B·g groups;
    transposed: kernels `[B·C, O/g, ..]`.
    """
    x, weight, bias = _main(op), op.need("weight"), op.value("bias")
    transposed = bool(op.raw("transposed", op.name.removeprefix("aten.") in _TRANSPOSED))
    sizes = symbolic_sizes(op.node, op.batch)
    if sizes != [op.raw("groups")]:
        if sizes:
            raise op.refuse(f"its argument %{sizes[0].name} depends on the batch size")
        return _by_rows(op) if weight.axis is None or transposed else _own_kernels(op, x, weight, bias)
    channels, made = grouped_channels(op, weight, transposed)
    if bias is not None and bias.axis != SampleAxis(0, 1, made):
        raise op.refuse("its bias does not hold the samples where its kernels do")
    if x.axis != SampleAxis(1, 1, channels) or x.shape[1] != channels:
        raise op.refuse("its groups are not those of single samples")
    return SampleAxis(1, 1, made)


def grouped_channels(op: Op, weight: Argument, transposed: bool) -> tuple[int, int]:
    """How many channels a sample's kernels read and make, where each sample has groups and kernels of its own."""
    groups, rows = op.number("groups", 1), weight.shape[0]
    if weight.axis != SampleAxis(0, 1, rows) or rows % groups:
        raise op.refuse("its groups are not those of single samples")
    others = weight.shape[1] * groups
    return (rows, others) if transposed else (others, rows)


def _own_kernels(op: Op, x: Argument, weight: Argument, bias: Argument | None) -> Placement:
    """Kernels `[B·O, C, ..]` of the samples on images that all share, `[N, C, ..]`: `[N, B·O, ..]`."""
    own = weight.axis
    if x.axis is not None:
        raise op.unsupported(
            f"its kernels %{weight.node.name} carry samples, and so does %{x.node.name}",
            "give each sample a group of its own: x [1, B·C, ..], kernels [B·O, C, ..], groups=B",
        )
    if own is None or own.dim != 0 or op.number("groups", 1) != 1 or x.ndim != weight.ndim:
        raise op.refuse("its sum runs over the samples of its kernels", "kernels [B·O, C, ..] for images [N, C, ..]")
    if bias is not None and bias.axis != own:
        raise op.refuse("its bias does not hold the samples where its kernels do")
    return SampleAxis(1, own.outer, own.inner)


_rows = leading(lambda op, x: x.ndim - 2, "it mixes")
sample_rule("group_norm", "channel_shuffle", "native_channel_shuffle", proof="norm of each row of dim 0")(_rows)


@sample_rule("native_group_norm", proof="norm of each row of dim 0", sizes=True)
def native_group_norm(op: Op) -> Placement:
    """As `group_norm`; its size N is that of dim 0."""
    named = [op.raw(name) for name in ("C", "HxW", "group")]
    if any(n in named for n in symbolic_sizes(op.node, op.batch)):
        raise op.refuse("how it groups the channels depends on the batch size")
    return _rows(op)


sample_rule("col2im", proof="windows")(leading(lambda op, x: 1, "it mixes"))
sample_rule("im2col", proof="windows")(leading(lambda op, x: 2, "its windows run over"))

for _count, _names in (
    (1, """avg_pool1d max_pool1d max_pool1d_with_indices adaptive_avg_pool1d adaptive_max_pool1d reflection_pad1d
           replication_pad1d upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"""),
    (2, """avg_pool2d max_pool2d max_pool2d_with_indices adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d
           reflection_pad2d replication_pad2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
           upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"""),
    (3, """avg_pool3d max_pool3d max_pool3d_with_indices adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d
           reflection_pad3d replication_pad3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d
           pixel_shuffle pixel_unshuffle"""),
):  # fmt: skip
    sample_rule(*_names.split(), proof="trailing dims")(trailing(_count, "its windows run over"))


def _normalized(op: Op) -> int:
    return len(op.raw("normalized_shape"))


sample_rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", proof="norm over trailing dims")(
    trailing(_normalized, "its statistics run over")
)

_BATCH_NORMS = """
    batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index _native_batch_norm_legit
    _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_with_update_functional
    _native_batch_norm_legit_no_training _batch_norm_no_update
"""


@sample_rule(*_BATCH_NORMS.split(), proof="running statistics")
def batch_norm(op: Op) -> Placement:
    """y[b, c, ..] = (x - running_mean[c]) / σ[c] · γ[c] + β[c]; in training its statistics are those of the batch.

    Instance norm is that of `[1, B·C, ..]`: each channel belongs to one sample, and so do its statistics.
    """
    x = _main(op)
    if x.axis is None:
        return None
    channels = sample_axis.moved(x.axis, 0)
    if x.axis.dim == 1 and _by_channel(op, channels):
        values = tensors(op.node.meta["val"])
        found = tuple(x.axis if v.ndim == x.ndim else channels if v.shape != (0,) else None for v in values)
        return found if isinstance(op.node.meta["val"], (tuple, list)) else x.axis
    training = not op.name.endswith(("no_training", "no_update")) and (
        op.raw("training", op.raw("train", True)) or op.raw("running_mean") is None
    )
    if training or op.name.endswith("with_update"):
        over = [str(d) for d in range(x.ndim) if d != 1]
        raise op.refuse(
            f"its mean runs over dim{'s' * (len(over) > 1)} {', '.join(over)}; "
            f"dim {x.axis.dim} holds the samples of %{x.node.name}",
            "use GroupNorm, or model.eval() so that running statistics are used"
            if op.raw("running_mean") is not None
            else "use GroupNorm, or track_running_stats=True and model.eval(), so that there are running statistics",
        )
    if x.axis.dim == 1:
        raise op.refuse("its statistics belong to dim 1, the sample dim")
    if any(v.axis is not None for v in op.values() if v.node is not x.node):
        raise op.unsupported("its statistics carry samples")
    values = op.node.meta["val"]
    return (x.axis, *(None for _ in values[1:])) if isinstance(values, (tuple, list)) else x.axis


def _by_channel(op: Op, channels: SampleAxis) -> bool:
    """Whether all that it knows of a channel belongs to the sample of the channel; it has no running statistics."""
    if op.name.endswith(("functional", "with_update")) or op.raw("running_mean") is not None:
        return False
    return all(v.axis == channels for v in op.values() if v.ndim == 1)


@sample_rule("instance_norm", proof="norm of each row of dims 0 and 1")
def instance_norm(op: Op) -> Placement:
    """y[b, c, ..] = (x - mean[b, c]) / σ[b, c]; with running statistics in training, those take part of all samples."""
    x = _main(op)
    if x.axis is None:
        return None
    if op.raw("use_input_stats") and op.raw("running_mean") is not None:
        raise op.refuse(
            "it averages its running statistics over the samples",
            "use track_running_stats=False, or model.eval()",
        )
    if x.axis.dim != 0 or len(op.sampled()) > 1:
        raise op.refuse(f"its statistics run over dim {x.axis.dim}, the sample dim")
    return x.axis


@sample_rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", proof="windows")
def grid_sampler(op: Op) -> Placement:
    """y[b, c, p..] = x[b, c, grid[b, p..]]: both hold the samples in dim 0."""
    return _same_rows(op, [op.need("input"), op.need("grid")])


@sample_rule("affine_grid_generator", proof="windows", sizes=True)
def affine_grid(op: Op) -> Placement:
    """y[b, p.., :] = θ[b] p."""
    return _same_rows(op, [op.need("theta")])


@sample_rule("max_unpool2d", "max_unpool3d", proof="windows")
def max_unpool(op: Op) -> Placement:
    """y[b, c, indices[b, c, p]] = x[b, c, p]."""
    return _same_rows(op, [op.need("self"), op.need("indices")])


@sample_rule("fractional_max_pool2d", "fractional_max_pool3d", proof="windows")
def fractional_max_pool(op: Op) -> Placement:
    """Windows drawn per sample."""
    return _same_rows(op, [op.need("self"), op.need("random_samples")])


def _same_rows(op: Op, values: list[Argument]) -> Placement:
    for value in values:
        if value.axis is None:
            raise op.unsupported(f"its argument %{value.node.name} carries no samples", "expand it to the batch first")
        if value.axis.dim != 0 or value.axis != values[0].axis:
            raise op.refuse(f"%{value.node.name} does not hold the samples in dim 0 as %{values[0].node.name} does")
    return values[0].axis


@sample_rule("embedding", proof="embedding", index=True)
def embedding(op: Op) -> Placement:
    """y[.., :] = W[ids[..], :]."""
    weight, ids = op.need("weight"), op.need("indices")
    if weight.axis is not None and weight.axis.dim == 0 and ids.found.index and op.raw("padding_idx", -1) == -1:
        require_own_rows(op, weight, ids)
        return Result(ids.axis, index=weight.found.index)
    if weight.found.index or ids.found.index:
        raise op.refuse(NUMBERS, NUMBERS_FIX)
    if weight.axis is not None:
        raise op.refuse("it looks up rows in a table that holds the samples")
    return ids.axis


@sample_rule("embedding_renorm", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only", proof="embedding")
def embedding_bag(op: Op) -> Placement:
    """Bags of different lengths."""
    raise op.unsupported(
        "its bags are ragged",
        "say that ids hold rows: batch_dim=((psg_fx.Rows.from_offsets(1), 0), 0); or use nn.Embedding and a masked sum",
    )


@sample_rule("lstm", "gru", "rnn_tanh", "rnn_relu", proof="recurrence")
def recurrence(op: Op) -> Placement:
    """A whole recurrent network in one op."""
    raise op.unsupported("a packed or fused recurrent network has no rule", "pass padded tensors, not packed sequences")


@sample_rule("conv_tbc", proof="convolution")
def conv_tbc(op: Op) -> Placement:
    """y[t, b, o] = Σ x[t + k, b, i] W[k, i, o]."""
    x = op.need("self")
    if x.axis is not None and x.axis.dim != 1:
        raise op.refuse("its windows run over the sample dim")
    return broadcast(op, [x], 3).axes
