"""Convolutions of step one, of float32 on a CPU, by a unit that multiplies bfloat16 (`in_parts.py`).

Rows of an image follow one another with zeros between them, so that a place of the kernel is a distance, and all places
multiply what was packed once: nothing is made of patches.  Images, and gradients of weights, are of two axes or of one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import define_op
from psg_fx.ops.products.grouped_convolution import weight_gradient
from psg_fx.tensors import is_contiguous
from psg_fx.torch_private.compiler import allocated
from psg_fx.torch_private.matrix_unit import has_matrix_unit
from psg_fx.torch_private.native import library, passed, threads

CONVOLUTION, WEIGHT_GRADIENTS = "convolution_in_parts", "weight_gradients_in_parts"
"""Files of that name, and the functions in them."""

aten = torch.ops.aten
Sizes = Sequence[int]


def _compiled(name: str, x: Tensor) -> Callable[..., int] | None:
    found = library(name) if x.device.type == "cpu" and has_matrix_unit() else None
    return None if found is None else getattr(found, name)


def _window(x: Sizes, outputs: int, kernel: Sizes, padding: Sizes, dilation: Sizes, samples: int) -> ctypes.Array[Any]:
    """`Window` of images.h; an image of one axis is one row."""
    rows = [1] * (2 - len(kernel))
    space, kernel, dilation = [*rows, *x[1:]], [*rows, *kernel], [*rows, *dilation]
    padding = [*(0 for _ in rows), *padding]
    return (ctypes.c_int64 * 11)(samples, x[0], *space, outputs, *kernel, *padding, *dilation)


def _convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int], dilation: list[int], transposed: bool
) -> Tensor:  # fmt: skip
    compiled = _compiled(CONVOLUTION, x)
    kernel, shape = w.shape[2:], _convolved(x.shape, w.shape, padding, dilation, transposed)
    places = [d * (k - 1) - p for k, p, d in zip(kernel, padding, dilation, strict=True)] if transposed else padding
    if compiled is not None and min(places) >= 0 and math.prod(shape) > 0:
        images, y = x.contiguous(), _allocated(shape)
        bias = None if bias is None else bias.contiguous()
        window = _window(x.shape[1:], shape[1], kernel, places, dilation, x.shape[0])
        of_output, of_channel, *of_places = w.stride()
        first = w.data_ptr()
        if transposed:  # the places in reverse
            first += w.element_size() * sum((k - 1) * s for k, s in zip(kernel, of_places, strict=True))
            of_output, of_channel, of_places = of_channel, of_output, [-s for s in of_places]
        strides = (ctypes.c_int64 * 4)(of_output, of_channel, *[0] * (2 - len(of_places)), *of_places)
        arguments = passed(images), ctypes.c_void_p(first), passed(bias), passed(y)
        if compiled(*arguments, window, strides, threads()):
            return y
    return _by_torch(x, w, bias, padding, dilation, transposed)


def _by_torch(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int], dilation: list[int], transposed: bool
) -> Tensor:  # fmt: skip
    ones, zeros = [1] * len(padding), [0] * len(padding)
    found: Tensor = aten.convolution(x, w, bias, ones, padding, dilation, transposed, zeros, 1)
    return found


def _convolved(x: Sizes, w: Sizes, padding: Sizes, dilation: Sizes, transposed: bool) -> tuple[Any, ...]:
    reach = [d * (k - 1) - 2 * p for k, p, d in zip(w[2:], padding, dilation, strict=True)]
    space = [size + r if transposed else size - r for size, r in zip(x[2:], reach, strict=True)]
    return (x[0], w[1 if transposed else 0], *space)


def _allocated(shape: tuple[int, ...]) -> Tensor:
    return allocated(shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), torch.float32)


convolution_in_parts = define_op(
    f"{CONVOLUTION}(Tensor x, Tensor w, Tensor? bias, int[] padding, int[] dilation, bool transposed) -> Tensor",
    _convolution, lambda x, w, bias, *window: x.new_empty(_convolved(x.shape, w.shape, *window)), _by_torch,
    CONVOLUTION, is_contiguous,
)  # fmt: skip
"""x[n, c, *space], w[o, c, *kernel] -> [n, o, *out_space], contiguous; transposed: x's gradient, given that of the
convolution with w[c, o, *kernel]."""


def _weight_gradients(
    grad: Tensor, x: Tensor, groups: int, kernel: list[int], padding: list[int], dilation: list[int]
) -> Tensor:  # fmt: skip
    compiled = _compiled(WEIGHT_GRADIENTS, x)
    n, outputs, channels = x.shape[0], grad.shape[1] // max(groups, 1), x.shape[1] // max(groups, 1)
    if compiled is not None and 1 in (n, groups) and grad.numel() > 0:
        cotangents, images = grad.contiguous(), x.contiguous()
        found = _allocated((groups * outputs, channels, *kernel))
        window = _window([channels, *x.shape[2:]], outputs, kernel, padding, dilation, n * groups)
        summed = ctypes.c_int(groups == 1 and n > 1)
        if compiled(passed(cotangents), passed(images), passed(found), window, summed, threads()):
            return found
    return _weight_gradients_by_torch(grad, x, groups, kernel, padding, dilation)


def _weight_gradients_by_torch(
    grad: Tensor, x: Tensor, groups: int, kernel: list[int], padding: list[int], dilation: list[int]
) -> Tensor:  # fmt: skip
    return weight_gradient(grad, x, groups, kernel, [1] * len(kernel), padding, dilation)


weight_gradients_in_parts = define_op(
    f"{WEIGHT_GRADIENTS}(Tensor grad, Tensor x, SymInt groups, int[] kernel, int[] padding, int[] dilation) -> Tensor",
    _weight_gradients,
    lambda grad, x, groups, kernel, *window: x.new_empty([grad.shape[1], x.shape[1] // groups, *kernel]),
    _weight_gradients_by_torch, WEIGHT_GRADIENTS, is_contiguous,
)  # fmt: skip
"""grad[n, g·o, *out_space], x[n, g·c, *space] -> the weight's gradient [g·o, c, *kernel]; n or g is 1."""


@register_flop_formula(torch.ops.psg_fx.convolution_in_parts)
def _flops(x: Sizes, w: Sizes, bias: Any, padding: Sizes, dilation: Sizes, transposed: bool, **shapes: Any) -> int:
    """2 · positions · weights: each weight meets each position of the output, or, transposed, of the input."""
    space = x[2:] if transposed else _convolved(x, w, padding, dilation, False)[2:]
    return 2 * x[0] * math.prod(space) * math.prod(w)


@register_flop_formula(torch.ops.psg_fx.weight_gradients_in_parts)
def _flops_of_gradients(grad: Sizes, x: Sizes, groups: int, kernel: Sizes, *rest: Any, **shapes: Any) -> int:
    """2 · output positions · outputs · channels of a group · kernel."""
    return 2 * math.prod(grad) * (x[1] // groups) * math.prod(kernel)
