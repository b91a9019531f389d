"""Fake quantisation, written out: its own ops are not known on fake values.

    steps = round(x / s) + z,    y = (clamp(steps, low, high) - z) s,    ∂y/∂x = 1 where nothing is cut off, else 0

The straight-through derivative of Bengio et al. 2013 (arXiv:1308.3432). As torch's kernels have it, the scale and its
inverse are of single precision, whatever x is.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from psg_fx.op_table import at_capture


@at_capture(torch.fake_quantize_per_tensor_affine)
def fake_quantize_tensor(
    input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    """One scale for all elements, a number or a tensor of one element."""
    if isinstance(scale, Tensor):
        single: float | Tensor = scale.float()
        inverse: float | Tensor = scale.float().reciprocal()
    else:
        single, inverse = _single(scale), _single(1.0 / _single(scale))
    steps = torch.round(_wide(input) * inverse) + zero_point
    return _passed(
        input, steps, (steps.clamp(quant_min, quant_max) - zero_point).float() * single, quant_min, quant_max
    )


@at_capture(torch.fake_quantize_per_channel_affine)
def fake_quantize_channels(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """A scale for each place of one dim."""
    sizes = [-1 if d == axis % input.ndim else 1 for d in range(input.ndim)]
    single, zero = scale.float().view(sizes), zero_point.view(sizes)
    steps = torch.round(_wide(input) * single.reciprocal()) + zero
    return _passed(input, steps, (steps.clamp(quant_min, quant_max) - zero) * single, quant_min, quant_max)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _passed(x: Tensor, steps: Tensor, value: Tensor, low: int, high: int) -> Tensor:
    """The value, with the derivative of x where nothing is cut off."""
    kept = torch.where((steps >= low) & (steps <= high), x, 0.0)
    return value.to(x.dtype).detach() + (kept - kept.detach())


def _single(value: float) -> float:
    """The number in single precision."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found
