"""Ops as they are written where the code of a model takes gradients, so that these can be differentiated again.

Torch differentiates few of its backward ops, and of statistics that a normalisation keeps for its backward none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from psg_fx.op_table import decompositions
from psg_fx.torch_private.ops import backward_decompositions, python_decomposition

aten = torch.ops.aten
_KEEP_STATISTICS = (
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm",
    "log_sigmoid_forward",
)  # fmt: skip
_INDEXES = "pad[123]d|embedding"
"""Backward ops that torch differentiates, and writes as picks out of the rows of all samples."""
_SEVERAL = {
    "var_mean": 2, "std_mean": 2, "aminmax": 2, "frexp": 1, "linalg_qr": 2, "linalg_eig": 2, "_linalg_eigh": 2,
    "_linalg_svd": 3, "_linalg_slogdet": 2,
}  # fmt: skip
"""How many results of an op have gradients; of others with several it is the first alone."""


@functools.cache
def in_plain_ops() -> Mapping[Any, Callable[..., Any]]:
    """How backward ops, and ops that keep statistics for theirs, are written."""
    found = {op: function for op, function in backward_decompositions().items() if not re.search(_INDEXES, op.name())}
    for packet in (getattr(aten, name, None) for name in _KEEP_STATISTICS):
        for op in [getattr(packet, overload) for overload in packet.overloads()] if packet else []:
            if (function := python_decomposition(op)) is not None:
                found[op] = function
    copy = aten.copy.default
    return {**found, copy: decompositions()[copy], aten.convolution_backward.default: _convolution_backward}


def _determinant(a: Tensor) -> Tensor:
    """sign · exp(log |det|): what torch traces of the derivative of `det` is undefined at equal singular values."""
    sign, log = torch.linalg.slogdet(a)
    found: Tensor = sign * log.exp()
    return found


FORMULAS = {aten.linalg_det.default: _determinant, aten.det.default: _determinant}
"""What runs under autograd in the place of ops."""


def is_differentiable(op: Any, result: int) -> bool:
    """Whether a result of an op with several has a gradient."""
    one = len(op._schema.returns) == 1  # a list, of parts
    return one or result < _SEVERAL.get(op._opname, 1)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradient of the input: the convolution with the same weight the other way (Dumoulin, Visin 2016)."""
    if list(wanted) != [True, False, False]:
        return NotImplemented
    missing = [0] * len(stride)  # rows of the input that no window has reached
    if not transposed:
        for d, (s, p, far) in enumerate(zip(stride, padding, dilation, strict=True)):
            reached = s * (grad.shape[2 + d] - 1) + far * (weight.shape[2 + d] - 1) + 1
            missing[d] = x.shape[2 + d] + 2 * p - reached
    back = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, missing, groups)
    return back, None, None
