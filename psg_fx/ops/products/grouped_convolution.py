"""`psg_fx::grouped_weight_gradient`, an op around `convolution_backward` with the samples as groups.

Inductor makes constants of a convolution's groups, and these grow with the batch size: every batch size would be
compiled anew. Inside an op that it does not know, the size stays a symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import defined_elsewhere

aten = torch.ops.aten

_LIBRARY = torch.library.Library("psg_fx", "FRAGMENT")
_LIBRARY.define(
    "grouped_weight_gradient(Tensor grad, Tensor x, SymInt groups, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
grouped_weight_gradient: Callable[..., torch.Tensor] = torch.ops.psg_fx.grouped_weight_gradient.default
"""grad[n, g·o, *out_space], x[n, g·c, *space] -> the weight's gradient [g·o, c, *kernel], contiguous."""


def _shape(grad: torch.Tensor, x: torch.Tensor, groups: Any, kernel: Sequence[int]) -> list[Any]:
    return [grad.shape[1], x.shape[1] // groups, *kernel]


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, groups: int, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int],
) -> torch.Tensor:  # fmt: skip
    """The weight's gradient of an ordinary convolution of x[n, g·c, *space] with cotangent grad[n, g·o, *out_space]."""
    template = x.new_empty(_shape(grad, x, groups, kernel))  # only its shape is read
    found: torch.Tensor = aten.convolution_backward(
        grad, x, template, None, stride, padding, dilation, False, [0] * len(kernel), groups, [False, True, False]
    )[1]
    return found


@torch.library.impl(_LIBRARY, "grouped_weight_gradient", "CompositeExplicitAutograd")
def _computed(*arguments: Any) -> torch.Tensor:
    return weight_gradient(*arguments).contiguous()


defined_elsewhere(torch.ops.psg_fx.grouped_weight_gradient.default, _computed)


def _fake(grad: torch.Tensor, x: torch.Tensor, groups: int, kernel: list[int], *rest: list[int]) -> torch.Tensor:
    return x.new_empty(_shape(grad, x, groups, kernel))


torch.library.register_fake("psg_fx::grouped_weight_gradient", _fake, lib=_LIBRARY)


@register_flop_formula(torch.ops.psg_fx.grouped_weight_gradient)
def _flops(grad: Sequence[int], x: Sequence[int], groups: int, kernel: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """2 · output positions · outputs · channels of a group · kernel."""
    return 2 * math.prod(grad) * (x[1] // groups) * math.prod(kernel)
