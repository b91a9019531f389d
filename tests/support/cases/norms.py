"""Rows: normalisations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import B, Case


def _folded_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    b, t, d = x.shape
    return F.layer_norm(x.reshape(b * t, d), (d,), weight, bias).view(b, t, d)


def _folded_group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    b, n = x.shape[:2]
    return F.group_norm(x.reshape(b * n, *x.shape[2:]), 2, weight, bias).view(x.shape)


def _with_statistics(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        norm: nn.Module = kind(4, **options)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        return norm

    return make


_CHANNELS = {"weight": (4,), "bias": (4,)}

NORM = [
    Case("layer_norm/2d", lambda x, **p: F.layer_norm(x, (4,), **p), params=_CHANNELS, covers=("layer_norm",)),
    Case("layer_norm/seq", lambda x, **p: F.layer_norm(x, (4,), **p), x=(B, 5, 4), params=_CHANNELS),
    Case("layer_norm/no-bias", lambda x, weight: F.layer_norm(x, (4,), weight), x=(B, 5, 4), params={"weight": (4,)}),
    Case("layer_norm/several-dims", lambda x, **p: F.layer_norm(x, (3, 4), **p), x=(B, 5, 3, 4),
         params={"weight": (3, 4), "bias": (3, 4)}),
    Case("layer_norm/dim-of-one", lambda x, **p: F.layer_norm(x, (1, 4), **p), x=(B, 5, 1, 4),
         params={"weight": (1, 4), "bias": (1, 4)}),
    Case("layer_norm/folded", _folded_norm, x=(B, 5, 4), params=_CHANNELS),
    Case("layer_norm/time-major", lambda x, **p: F.layer_norm(x, (4,), **p), x=(5, B, 4), params=_CHANNELS, batch_dim=1,
         out_dim=1),
    Case("rms_norm/seq", lambda x, weight: F.rms_norm(x, (4,), weight, 1e-6), x=(B, 5, 4), params={"weight": (4,)},
         covers=("rms_norm",)),
    Case("rms_norm/default-eps", lambda x, weight: F.rms_norm(x, (3, 4), weight), x=(B, 3, 4),
         params={"weight": (3, 4)}),
    Case("group_norm/2d", lambda x, **p: F.group_norm(x, 2, **p), x=(B, 4, 5, 5), params=_CHANNELS,
         covers=("group_norm",)),
    Case("group_norm/no-space", lambda x, **p: F.group_norm(x, 2, **p), params=_CHANNELS),
    Case("group_norm/weight-only", lambda x, weight: F.group_norm(x, 4, weight), x=(B, 4, 5), params={"weight": (4,)}),
    Case("group_norm/folded", _folded_group_norm, x=(B, 2, 4, 3, 3), params=_CHANNELS),
    Case("instance_norm/2d", lambda x, **p: F.instance_norm(x, **p), x=(B, 4, 5, 5), params=_CHANNELS,
         covers=("instance_norm",), vmap=False),
    Case("instance_norm/1d", lambda x, **p: F.instance_norm(x, **p), x=(B, 4, 5), params=_CHANNELS, vmap=False),
    Case("batch_norm/eval-of-instances", x=(B, 4, 5), train=False,
         module=_with_statistics(nn.InstanceNorm1d, affine=True, track_running_stats=True)),
    Case("batch_norm/eval-2d", x=(B, 4), module=_with_statistics(nn.BatchNorm1d), train=False,
         covers=("batch_norm_eval",)),
    Case("batch_norm/eval-1d", x=(B, 4, 5), module=_with_statistics(nn.BatchNorm1d), train=False),
    Case("batch_norm/eval-images", x=(B, 4, 3, 3), module=_with_statistics(nn.BatchNorm2d), train=False),
    Case("batch_norm/eval-volumes", x=(B, 4, 2, 2, 2), module=_with_statistics(nn.BatchNorm3d), train=False),
]  # fmt: skip
