"""Rows: convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.cases.case import B, Case, Shape


def _windows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Windows folded behind the samples: `[B, W, C, H, H]` -> `[B*W, C, H, H]`."""
    b, n = x.shape[:2]
    out = F.conv2d(x.reshape(b * n, *x.shape[2:]), w, bias, padding=w.shape[-1] // 2)
    return out.view(b, n, *out.shape[1:])


def _windows_major(x: Tensor, w: Tensor) -> Tensor:
    """Windows folded before the samples: `[W, B, C, H]` -> `[W*B, C, H]`."""
    n, b = x.shape[:2]
    out = F.conv1d(x.reshape(n * b, *x.shape[2:]), w)
    return out.view(n, b, *out.shape[1:])


def _conv(name: str, shape: Shape, weight: Shape, bias: bool = True, **options: Any) -> Case:
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(weight)]
    params = {"weight": weight} | ({"bias": (weight[0],)} if bias else {})
    return Case(f"conv{len(weight) - 2}d/{name}", lambda x, **p: function(x, **p, **options), x=shape, params=params)


def _transposed(name: str, shape: Shape, weight: Shape, bias: bool = True, **options: Any) -> Case:
    function = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[len(weight)]
    params = {"weight": weight} | ({"bias": (weight[1] * options.get("groups", 1),)} if bias else {})
    call = f"conv_transpose{len(weight) - 2}d/{name}"
    return Case(call, lambda x, **p: function(x, **p, **options), x=shape, params=params)


CONVOLUTION = [
    _conv("plain", (B, 2, 8), (3, 2, 3)),
    _conv("stride-padding", (B, 2, 9), (3, 2, 4), stride=2, padding=1),
    _conv("same-even", (B, 2, 8), (3, 2, 4), padding="same"),
    _conv("dilation", (B, 2, 9), (3, 2, 3), dilation=2),
    _conv("groups", (B, 4, 8), (6, 2, 3), groups=2),
    _conv("plain", (B, 2, 6, 6), (3, 2, 3, 3)),
    _conv("no-bias", (B, 2, 6, 6), (3, 2, 3, 3), bias=False),
    _conv("uneven-kernel", (B, 2, 6, 7), (3, 2, 2, 3), padding=(0, 1)),
    _conv("stride-leftover", (B, 2, 8, 7), (3, 2, 3, 3), stride=2),
    _conv("stride-padding", (B, 2, 7, 8), (3, 2, 3, 3), stride=(2, 3), padding=(1, 2)),
    _conv("same", (B, 2, 5, 6), (3, 2, 3, 3), padding="same"),
    _conv("same-even", (B, 2, 6, 5), (3, 2, 2, 4), padding="same"),
    _conv("same-dilated", (B, 2, 6, 6), (3, 2, 3, 2), padding="same", dilation=(2, 3)),
    _conv("valid", (B, 2, 5, 5), (3, 2, 3, 3), padding="valid"),
    _conv("dilation", (B, 2, 8, 8), (3, 2, 3, 3), dilation=2, padding=1),
    _conv("groups", (B, 4, 5, 5), (6, 2, 3, 3), groups=2, padding=1),
    _conv("depthwise", (B, 4, 5, 5), (4, 1, 3, 3), groups=4, padding=1),
    _conv("depthwise-twice", (B, 3, 5, 5), (6, 1, 3, 3), groups=3, stride=2),
    _conv("pointwise", (B, 4, 5, 5), (3, 4, 1, 1)),
    _conv("pointwise-stride", (B, 4, 5, 5), (3, 4, 1, 1), stride=2),
    _conv("pointwise-groups", (B, 4, 5, 4), (6, 2, 1, 1), groups=2, stride=(2, 3)),
    _conv("pointwise-padding", (B, 2, 3, 4), (3, 2, 1, 1), padding=1),
    _conv("depthwise-dilated", (B, 3, 6, 7), (6, 1, 3, 2), groups=3, padding=(2, 1), dilation=(2, 1)),
    _conv("one-output-pixel", (B, 2, 3, 3), (4, 2, 3, 3)),
    _conv("patchify", (B, 3, 6, 6), (5, 3, 3, 3), stride=3),
    _conv("large-kernel", (B, 1, 9, 9), (2, 1, 8, 8), padding=2),
    Case("conv2d/folded-windows", _windows, x=(B, 2, 2, 5, 5), params={"w": (3, 2, 3, 3), "bias": (3,)}),
    Case("conv2d/folded-pointwise", _windows, x=(B, 2, 4, 3, 3), params={"w": (3, 4, 1, 1), "bias": (3,)}),
    Case("conv1d/folded-windows-major", _windows_major, x=(2, B, 2, 6), params={"w": (3, 2, 3)}, batch_dim=1,
         out_dim=1),
    Case("conv2d/samples-last", lambda x, w: F.conv2d(x.permute(3, 0, 1, 2), w), x=(2, 5, 5, B),
         params={"w": (3, 2, 3, 3)}, batch_dim=3),
    Case("expand/image",
         lambda x, p: F.conv2d(p.expand(x.shape[0], 2, 5, 5), torch.ones(1, 2, 3, 3).to(x)) * x,
         x=(B, 1, 3, 3), params={"p": (2, 5, 5)}),
    _conv("plain", (B, 2, 4, 4, 4), (3, 2, 2, 3, 2)),
    _conv("mixed", (B, 2, 5, 4, 5), (4, 1, 3, 2, 3), groups=2, stride=2, padding=1),
    _conv("dilation-padding", (B, 2, 4, 5, 3), (2, 2, 2, 3, 2), dilation=(1, 2, 1), padding=(1, 2, 0)),
    _conv("depthwise", (B, 2, 3, 4, 3), (2, 1, 2, 3, 3), groups=2, padding=1),
    _conv("pointwise", (B, 2, 3, 2, 3), (3, 2, 1, 1, 1), stride=(2, 1, 1)),
    _transposed("plain", (B, 3, 5), (3, 2, 3)),
    _transposed("stride", (B, 3, 4), (3, 2, 3), stride=2, padding=1, output_padding=1),
    _transposed("plain", (B, 3, 4, 4), (3, 2, 3, 3)),
    _transposed("no-bias", (B, 3, 4, 4), (3, 2, 2, 2), bias=False, stride=2),
    _transposed("groups", (B, 4, 3, 4), (4, 2, 3, 3), groups=2, stride=2, output_padding=(1, 0), padding=1),
    _transposed("dilation", (B, 2, 4, 4), (2, 3, 3, 2), dilation=(2, 3), stride=(1, 2)),
    _transposed("pointwise", (B, 4, 3, 3), (4, 3, 1, 1), stride=2, groups=2, output_padding=(1, 0)),
    _transposed("pointwise-leftover", (B, 2, 3, 2), (2, 3, 1, 1), stride=(1, 2), dilation=3, output_padding=2),
    _transposed("depthwise", (B, 3, 4, 4), (3, 1, 3, 3), groups=3, padding=1),
    _transposed("plain", (B, 2, 3, 3, 3), (2, 2, 2, 2, 2), stride=2),
]  # fmt: skip
