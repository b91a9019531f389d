"""Ops that compute each element from the elements at the same place: y[..] = f(a[..], b[..], ...), broadcast."""

from __future__ import annotations

from torch.fx import Node

from psg_fx.graph.same_op import draws

from ..refused import NUMBERS, NUMBERS_FIX
from ..table import sample_rule
from ..values import NUMBERING, Argument, Op, Result, broadcast

_UNTAGGED = """
    __and__ __or__ __xor__ _conj _conj_copy conj _neg_view _neg_view_copy _masked_scale _prelu_kernel absolute
    alias alias_copy arccos arccosh arcsin arcsinh arctan arctan2 arctanh clone complex contiguous detach detach_copy
    divide fix floor_divide greater greater_equal hardswish imag isclose isreal less less_equal lift lift_fresh
    lift_fresh_copy log_sigmoid log_sigmoid_forward multiply negative not_equal polar positive real resolve_conj
    resolve_neg rsub special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1
    special_gammainc special_gammaincc special_gammaln special_i0 special_log1p special_logit special_ndtr
    special_polygamma special_psi special_round special_sinc special_xlogy subtract to _to_copy
    poisson binomial _standard_gamma rrelu_with_noise rrelu_with_noise_functional _add_relu where native_dropout dropout
    alpha_dropout bernoulli masked_fill cauchy geometric log_normal fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_tensor_affine _autocast_to_full_precision _autocast_to_reduced_precision
"""
_KEEPS_INDEX = "alias clone contiguous detach lift_fresh lift_fresh_copy to _to_copy"


def elementwise(op: Op) -> Result:
    """All inputs aligned from the right; random draws are made per element, so no order can be shifted later."""
    values = op.values()
    found = broadcast(op, values, len(op.out().shape))
    if draws(op.node):
        return Result(found.axes)
    kept = op.name.removeprefix("aten.") in _KEEPS_INDEX.split()
    index = max((v.found.index for v in values), default=0) if kept else 0
    if index and op.node.meta["val"].dtype not in NUMBERING:
        raise op.refuse(NUMBERS, NUMBERS_FIX)
    return Result(found.axes, found.uniform, index=index)


sample_rule("<pointwise>", proof="elementwise")(elementwise)
sample_rule(*(n for n in _UNTAGGED.split() if n not in _KEEPS_INDEX.split()), proof="elementwise")(elementwise)
sample_rule(*_KEEPS_INDEX.split(), proof="elementwise", index=True)(elementwise)


@sample_rule("mul.Tensor", "mul.Scalar", "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", proof="elementwise",
      index=True)  # fmt: skip
def numbered_rows(op: Op) -> Result:
    """Elementwise; i·T + c from the numbers i of the samples, where c is a value of each sample."""
    if not any(v.found.index for v in op.values()):
        return elementwise(op)
    left, right = (op.raw(name) for name in ("self", "other"))
    first, second = (op.see(v) if isinstance(v, Node) else None for v in (left, right))
    found = broadcast(op, op.values(), len(op.out().shape))
    numbers, other = (first, right) if first is not None and first.found.index else (second, left)
    assert numbers is not None
    if op.name == "aten.mul":
        if isinstance(other, int) and other > 0:
            return Result(found.axes, index=numbers.found.index * other)
    elif _is_offset(op, first, second):
        return Result(found.axes, index=numbers.found.index)
    raise op.refuse(NUMBERS, NUMBERS_FIX)


def _is_offset(op: Op, first: Argument | None, second: Argument | None) -> bool:
    """Whether integers that are no numbers of samples are added to those that are, or taken from them."""
    both = first is not None and second is not None and bool(first.found.index and second.found.index)
    swapped = op.name == "aten.sub" and (first is None or not first.found.index)
    whole = not op.node.meta["val"].is_floating_point()
    return whole and not both and not swapped and op.raw("alpha", 1) == 1


@sample_rule("copy", "fill", "broadcast_tensors", "lerp", "max.other", "min.other", proof="elementwise")
def copied(op: Op) -> Result:
    """The inputs are broadcast against one another."""
    return broadcast(op, op.values(), len(op.out().shape))


@sample_rule("bucketize", proof="elementwise")
def bucketize(op: Op) -> Result:
    """y[..] = the bucket of x[..] between given boundaries."""
    boundaries = op.need("boundaries")
    if boundaries.axis is not None:
        raise op.refuse("its boundaries are made of all samples", "use boundaries that do not depend on the samples")
    found = op.value("self")
    return found.found if found else Result()


@sample_rule("one_hot", proof="elementwise")
def one_hot(op: Op) -> Result:
    """y[.., c] = [x[..] = c]; the number of classes must be given, or it is the maximum over all samples."""
    if op.raw("num_classes", -1) == -1:
        raise op.refuse("without num_classes it takes the largest label of all samples", "give num_classes")
    return Result(op.need("self").axis)


@sample_rule("prelu", proof="elementwise")
def prelu(op: Op) -> Result:
    """y[b, c, ..] = max(0, x) + a[c] min(0, x)."""
    x, weight = op.need("self"), op.need("weight")
    if weight.axis is not None:
        raise op.unsupported("its slope carries samples")
    if x.axis is not None and x.axis.dim == 1 and weight.shape not in ((), (1,)):
        raise op.refuse("its slopes belong to dim 1, the sample dim")
    return Result(x.axis)


@sample_rule("feature_dropout", "feature_alpha_dropout", proof="elementwise")
def feature_dropout(op: Op) -> Result:
    """One draw per row of dims 0 and 1."""
    x = op.need("input")
    if x.axis is not None and x.axis.dim > 1:
        raise op.refuse("it draws once for each index of dims 0 and 1, so all samples share a draw")
    return Result(x.axis)


@sample_rule("_weight_norm", "_weight_norm_interface", "norm_except_dim", proof="per sample dim")
def weight_norm(op: Op) -> Result:
    """Parameters only."""
    raise op.unsupported("its weight carries samples")
