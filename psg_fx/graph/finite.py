"""Ops that give finite numbers, with finite derivatives, for finite numbers (short of overflow)."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.ranges import range_of
from psg_fx.op_table import enter, known

aten = torch.ops.aten

enter(
    "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution", "embedding",
    "add", "sub", "rsub", "mul", "neg", "abs", "square", "sin", "cos", "clamp", "sum", "mean", "where", "masked_fill",
    "relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "softplus", "elu", "mish", "hardtanh", "hardswish",
    "softmax", "log_softmax", "logsigmoid", "log_sigmoid", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "dropout", "scaled_dot_product_attention", "broadcast_tensors", "cat", "stack", "_to_copy", "clone",
    "reshape", "repeat", "index", "gather", "index_put", "index_add", "full_like", "zeros_like", "ones_like", "zeros",
    "ones", "full", "arange", "one_hot", "argmax", "argmin", "topk", "eq", "ne", "gt", "ge", "lt", "le",
    "bitwise_not", "bitwise_and", "logical_not", "logical_and", "sym_size", "einsum", "index_select",
    "select_scatter", "slice_scatter", "triu", "tril", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "repeat_interleave", "cumsum", "erf", "exp", "expm1", "sinh", "cosh", "atan", "asinh", "glu", "pad",
    "constant_pad_nd", "logsumexp", "logaddexp", "amax", "amin", "max", "min", "maximum", "minimum", "kthvalue",
    "median", "sort", "roll", "flip", "scatter", "scatter_add", "im2col", "unfold", "avg_pool1d", "avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "max_pool1d", "max_pool2d", "relu6", "selu", "celu", "hardsigmoid",
    "prelu", "hardshrink", "softshrink", "sign", "floor", "ceil", "round", "trunc", "outer", "dot", "mv",
    "diag_embed", "clamp_min", "clamp_max", "threshold", "exp2", "erfc", "sinc", "frac", "lerp", "addcmul", "positive",
    "deg2rad", "rad2deg", "sgn", "logical_or", "logical_xor", "tanh_backward",
    "sigmoid_backward", "threshold_backward", "gelu_backward", "silu_backward", "hardtanh_backward",
    "leaky_relu_backward", "softplus_backward", "elu_backward", "mish_backward", "hardswish_backward",
    "hardsigmoid_backward", "log_sigmoid_backward", "bitwise_or", "bitwise_xor", "isnan", "isinf", "isfinite",
    "nan_to_num", "lstm", "gru", "rnn_tanh", "rnn_relu", finite=True,
)  # fmt: skip


def stays_finite(node: Node) -> bool:
    """Whether an op gives finite numbers of finite ones, and has finite derivatives there."""
    others = node.op != "call_function" or node.target is operator.getitem or is_view(node)
    return others or (known(node.target).finite and _has_finite_numbers(node)) or _stays_for_numbers(node)


def _has_finite_numbers(node: Node) -> bool:
    numbers = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, float)]
    return all(map(math.isfinite, numbers)) or (set(numbers) == {-math.inf} and _is_causal(node))


_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)


def _is_causal(node: Node) -> bool:
    """Whether -inf stands where a mask says so that the code makes of nothing it is given, and a softmax reads it."""
    if node.target is not aten.masked_fill.Scalar or not isinstance(node.args[1], Node):
        return False
    given = any(n.op == "placeholder" for n in facts.ancestors([node.args[1]]))
    return not given and all(user.target in _SOFTMAX for user in node.users)


_APART_FROM_ZERO = ("log", "log2", "log10", "rsqrt", "sqrt", "reciprocal")


def _stays_for_numbers(node: Node) -> bool:
    """Whether it is a power that has a derivative at zero, a quotient by a number, or a logarithm (or root) of what is
    more than one that is positive.
    """
    if getattr(node.target, "_opname", "") in _APART_FROM_ZERO:
        return range_of(node.args[0])[0] > 0
    number = node.args[1] if len(node.args) > 1 else None
    if not isinstance(number, (int, float)):
        return False
    if node.target is aten.pow.Tensor_Scalar:
        return number >= 1 and float(number).is_integer()
    return node.target in (aten.div.Tensor, aten.div.Scalar) and number != 0
