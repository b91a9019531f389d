"""Convolutions, forward and transposed, in one, two and three dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F

from psg_fx.algebra.arrange import network, samples_first, unfold_samples
from psg_fx.algebra.network import Leaf, Network, Patches
from psg_fx.algebra.rule import rule
from psg_fx.algebra.site import Site, Value
from psg_fx.tensors import reshape

aten = torch.ops.aten


@rule(
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    params={"weight": 1, "bias": 2},
)  # fmt: skip
def conv(site: Site) -> dict[str, Network | None]:
    """y[b,o,t] = Σ_i patches(x)[b,t,g,i] W[o,i] + bias[o]; i = (channel in group, kernel offset), o = (g, o').

    weight: patches(x)[b,t,g,i] ȳ[b,t,g,o] -> [b,g,o,i]    (Rochette et al. 2019, arXiv:1912.06015)
    bias:   ȳ[b,o,t] -> [b,o]
    """
    x, weight, ybar = site.input(0), site.input(1), site.cotangent
    nd = weight.ndim - 2
    kernel = tuple(int(k) for k in weight.shape[2:])
    stride, dilation = (_ints(site.arg(i, name, 1), nd) for i, name in ((3, "stride"), (5, "dilation")))
    padding = site.arg(4, "padding", 0)
    groups = int(site.arg(6, "groups", 1))
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    else:
        total = [2 * p for p in _ints(padding, nd)]
    if not _lies_by_samples(x, nd):
        return {}
    patches = patches_leaf(x, ybar, kernel, stride, tuple(total), dilation, groups)
    return {
        "weight": Network((patches, plane_leaf(ybar, groups, "o")), ("b", "g", "o", "i")),
        "bias": network("b o t* -> b o", ybar),
    }


@rule(
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
    params={"weight": 1, "bias": 2},
)  # fmt: skip
def conv_transpose(site: Site) -> dict[str, Network | None]:
    """The transpose of a convolution from y to x: W[i,o',k], the patches are those of ȳ.

    weight: x[b,t,g,i] patches(ȳ)[b,t,g,o] -> [b,g,i,o]; o = (channel in group, kernel offset)
    bias:   ȳ[b,o,t] -> [b,o]
    """
    x, weight, ybar = site.input(0), site.input(1), site.cotangent
    nd = weight.ndim - 2
    kernel = tuple(int(k) for k in weight.shape[2:])
    stride, dilation = (_ints(site.arg(i, name, 1), nd) for i, name in ((3, "stride"), (7, "dilation")))
    padding = tuple(2 * p for p in _ints(site.arg(4, "padding", 0), nd))
    groups = int(site.arg(6, "groups", 1))
    if not _lies_by_samples(x, nd):
        return {}
    patches = patches_leaf(ybar, x, kernel, stride, padding, dilation, groups)
    rows = patches.renamed({"i": "o"})
    return {
        "weight": Network((plane_leaf(x, groups, "i"), rows), ("b", "g", "i", "o")),
        "bias": network("b o t* -> b o", ybar),
    }


def _lies_by_samples(x: Value, nd: int) -> bool:
    """Whether x is `[N, C, *space]` with the samples (and perhaps folds) in N."""
    return x.ndim == nd + 2 and x.samples is not None and x.samples.dim == 0


def _ints(value: Any, nd: int) -> tuple[int, ...]:
    values = tuple(int(v) for v in value) if isinstance(value, Sequence) else (int(value),)
    return values * nd if len(values) == 1 else values


def patches_leaf(
    x: Value, y: Value, kernel: tuple[int, ...], stride: tuple[int, ...], total: tuple[int, ...],
    dilation: tuple[int, ...], groups: int,
) -> Leaf:  # fmt: skip
    """patches(x)[b,t,g,i], met by `y`'s output plane.  `total` is the padding of both sides together; an odd one
    ("same" with an even kernel) is padded explicitly, one more on the right, as torch does.

    With a kernel of one pixel and no padding, the patches are the pixels themselves.
    """
    axis = x.samples
    assert axis is not None
    if set(kernel) == {1} and not any(total):
        met = (slice(0, (int(n) - 1) * step + 1, step) for n, step in zip(y.shape[2:], stride, strict=True))
        return plane_leaf(x, groups, "i", tuple(met))
    even = all(p % 2 == 0 for p in total)
    sides = [side for p in reversed(total) for side in (p // 2, p - p // 2)]
    space = tuple(int(s) for s in x.shape[2:])
    padded = space if even else tuple(s + p for s, p in zip(space, total, strict=True))
    form = Patches(
        kernel=kernel, stride=stride, padding=tuple(p // 2 for p in total) if even else (0,) * len(kernel),
        dilation=dilation, groups=groups, space=padded, out_space=tuple(int(s) for s in y.shape[2:]),
    )  # fmt: skip
    folds = axis.outer * axis.inner
    samples = x.shape[0] / folds
    channels = int(x.shape[1])

    def build(tensor: torch.Tensor) -> torch.Tensor:
        tensor = samples_first(tensor, axis)
        return tensor if even else F.pad(tensor, sides)

    sizes = (samples, folds * math.prod(form.out_space), groups, channels // groups * math.prod(kernel))
    recipe = f"planes {axis} {sides if not even else ''}"
    label, axes = f"patches({x.symbol})", ("b", "t", "g", "i")
    return Leaf(label, (x.source,), recipe, axes, tuple(map(sympy.sympify, sizes)), form, x.dtype, build)


def plane_leaf(y: Value, groups: int, channel: str, places: tuple[slice, ...] = ()) -> Leaf:
    """`[N, (g c), *space]` as y[b,g,c,t] with t = (fold, *space), of each spatial axis only `places` if given."""
    axis = y.samples
    assert axis is not None
    folds = axis.outer * axis.inner
    channels = int(y.shape[1])
    space = [range(int(size)) for size in y.shape[2:]]
    kept = [size[place] for size, place in zip(space, places, strict=True)] if places else space
    index: tuple[Any, ...] = (..., *places)

    def build(tensor: torch.Tensor) -> torch.Tensor:
        if kept != space:
            tensor = tensor[index]
        if folds == 1:
            return reshape(tensor, (tensor.shape[0], groups, channels // groups, math.prod(tensor.shape[2:])))
        tensor = unfold_samples(tensor, axis).movedim(1, 0)  # [b, outer, inner, c, *space]
        n = tensor.shape[0]
        tensor = tensor.reshape(n, folds, groups, channels // groups, -1)
        return tensor.permute(0, 2, 3, 1, 4).reshape(n, groups, channels // groups, -1)

    sizes = (y.shape[0] / folds, groups, channels // groups, folds * math.prod(map(len, kept)))
    label = y.symbol
    return Leaf(
        label, (y.source,), f"plane {axis} {groups} {kept}", ("b", "g", channel, "t"), tuple(map(sympy.sympify, sizes)),
        dtype=y.dtype, build=build,
    )  # fmt: skip
