"""Ops that give finite numbers, with finite derivatives, for finite numbers (short of overflow)."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.ranges import range_of
from psg_fx.graph.same_op import draws
from psg_fx.op_table import enter, known
from psg_fx.torch_private.modes import no_modes

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


_SOFTMAX = (aten.softmax.int, aten._softmax.default)
"""Not its logarithm, which is -inf there."""


def _is_causal(node: Node) -> bool:
    """Whether -inf stands where a mask says so that the code makes of nothing it is given, and a softmax reads it, of
    which each row is left a number.
    """
    if node.target is not aten.masked_fill.Scalar or any(user.target not in _SOFTMAX for user in node.users):
        return False
    mask = _made_of_nothing(node.args[1])
    ndim = node.meta["val"].ndim
    return mask is not None and not any(_fills_a_row(mask, ndim, user.args[1]) for user in node.users)


def _fills_a_row(mask: Tensor, ndim: int, dim: Any) -> bool:
    """Whether a mask of a value of so many dims is true all along the dim somewhere."""
    dim = dim % ndim - (ndim - mask.ndim) if ndim else 0
    rows = mask if dim < 0 or not mask.ndim else mask.all(dim)
    return bool(rows.any())


def _made_of_nothing(node: Any) -> Tensor | None:
    """What the code makes of nothing it is given, and does not draw; None for other values."""
    above = facts.ancestors([node]) if isinstance(node, Node) else set()
    if not above or any(n.op == "placeholder" or draws(n) for n in above):
        return None
    made: dict[Node, Any] = {}
    try:
        with no_modes():
            for each in (n for n in node.graph.nodes if n in above):
                if each.op == "get_attr":
                    made[each] = getattr(node.graph.owning_module, each.target)
                else:
                    args, kwargs = torch.fx.map_arg((each.args, each.kwargs), made.__getitem__)
                    made[each] = each.target(*args, **kwargs)
        found = made[node]
        return found if type(found) is Tensor else None
    except Exception:  # a mask that cannot be made here
        return None


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
