"""Ops that only rename places: views, permutations, expands, slices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from psg_fx.graph import facts, sample_axis
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.sample_axis import Misfit
from psg_fx.op_table import known

from ..arguments import symbolic_sizes
from ..table import Placement, sample_rule
from ..values import Argument, Op, Result, samples_of

aten = torch.ops.aten
_FOLD = "fold the sample dim outermost or innermost consistently: permute it next to the dims it is folded with first"
_ONE = "use the samples' rows all together; one sample's row must not reach the others"


def same_kind(value: Argument, axis: SampleAxis | None) -> Result:
    """The axis moves; what else is known stays."""
    return Result(axis, value.found.uniform, value.found.index)


@sample_rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_reshape_copy", "view_copy", "flatten", "unflatten",
      "reshape_as", "view_as", "ravel", proof="view", sizes=True, index=True)  # fmt: skip
def view(op: Op) -> Result:
    """Row-major order is kept: [P, B, R] flat, before and after."""
    x = op.need("self")
    if "dtype" in op.args and op.args["dtype"] is not None:
        return same_kind(x, _not_last(op, x))
    if x.axis is None:
        if op.out().dim is not None:
            raise op.unsupported("a size of its result follows the batch, and its values hold no samples")
        return Result()
    try:
        axis = sample_axis.through_view(x.axis, x.shape, op.out())
    except Misfit as misfit:
        raise op.refuse(str(misfit), _FOLD) from None
    # A dim folded with others holds different values inside, so its order matters from here on.
    same_dim = math.prod(op.out().shape[: axis.dim]) == math.prod(x.shape[: x.axis.dim]) and axis.inner == x.axis.inner
    return Result(axis, x.found.uniform and same_dim and axis.outer == x.axis.outer, x.found.index)


def _not_last(op: Op, x: Argument) -> SampleAxis | None:
    if x.axis is not None and x.axis.dim == x.ndim - 1:
        raise op.refuse("it splits or joins the elements of the last dim, the sample dim")
    return x.axis


@sample_rule("view_as_real", "view_as_real_copy", proof="view")
def view_as_real(op: Op) -> Result:
    """A new last dim of size 2."""
    return Result(op.need("self").axis)


@sample_rule("view_as_complex", "view_as_complex_copy", proof="view")
def view_as_complex(op: Op) -> Result:
    """The last dim of size 2 goes."""
    return Result(_not_last(op, op.need("self")))


@sample_rule("permute", "permute_copy", proof="view", index=True)
def permute(op: Op) -> Result:
    """Output dim k is input dim dims[k]."""
    x = op.need("self")
    return same_kind(x, sample_axis.through_permute(samples_of(x), op.raw("dims"))) if x.axis else Result()


@sample_rule("transpose", "transpose_copy", "swapaxes", "swapdims", proof="view", index=True)
def transpose(op: Op) -> Result:
    """Two dims swap."""
    x = op.need("self")
    first, second = (op.raw(n, op.raw(m, 0)) for n, m in (("dim0", "axis0"), ("dim1", "axis1")))
    return same_kind(x, sample_axis.through_transpose(samples_of(x), x.ndim, first, second)) if x.axis else Result()


@sample_rule("t", "t_copy", "numpy_T", "mT", "mH", "adjoint", "matrix_H", proof="view", index=True)
def matrix_transpose(op: Op) -> Result:
    """The last two dims swap (numpy_T: all dims turn round)."""
    x = op.need("self")
    if x.axis is None or x.ndim < 2:
        return x.found
    if op.name == "aten.numpy_T":
        return same_kind(x, sample_axis.moved(x.axis, x.ndim - 1 - x.axis.dim))
    return same_kind(x, sample_axis.through_transpose(x.axis, x.ndim, -2, -1))


@sample_rule("movedim", "moveaxis", proof="view", index=True)
def movedim(op: Op) -> Result:
    """Dims move from source to destination."""
    x = op.need("self")
    source, target = ([d] if isinstance(d, int) else d for d in (op.raw("source", 0), op.raw("destination", 0)))
    return same_kind(x, sample_axis.through_movedim(samples_of(x), x.ndim, source, target)) if x.axis else Result()


@sample_rule("unsqueeze", "unsqueeze_copy", proof="view", index=True)
def unsqueeze(op: Op) -> Result:
    """A new dim of size 1."""
    x = op.need("self")
    return same_kind(x, sample_axis.through_unsqueeze(samples_of(x), x.ndim, op.raw("dim"))) if x.axis else Result()


@sample_rule("squeeze", "squeeze_copy", proof="view", index=True)
def squeeze(op: Op) -> Result:
    """Dims of size 1 go; the sample dim has size B and stays."""
    x = op.need("self")
    if x.axis is None:
        return Result()
    given = [] if op.args.get("dim") == [] else op.dims("dim", x.ndim)
    gone = [d for d in (range(x.ndim) if given is None else given) if x.shape[d] == 1 and d != x.axis.dim]
    return same_kind(x, sample_axis.without_dims(x.axis, gone))


@sample_rule("expand", "expand_copy", "expand_as", "broadcast_to", proof="view", sizes=True, index=True)
def expand(op: Op) -> Result:
    """Dims of size 1 are repeated; a dim that becomes B holds the same for every sample."""
    x, out = op.need("self"), op.out()
    if x.axis is not None:
        return same_kind(x, sample_axis.through_broadcast(x.axis, x.ndim, len(out.shape)))
    return Result() if out.dim is None else Result(SampleAxis(out.dim, 1, out.factor), uniform=True)


@sample_rule("repeat", "tile", proof="view", sizes=True, index=True)
def repeat(op: Op) -> Result:
    """Tiles: y[.., k * n + j, ..] = x[.., j, ..]; copies of a dim lie outside of it."""
    x, out = op.need("self"), op.out()
    if x.axis is None:
        if out.dim is None:
            return Result()
        place = out.dim - len(out.shape) + x.ndim
        return Result(SampleAxis(out.dim, 1, out.factor), uniform=place < 0 or x.shape[place] == 1)
    axis = sample_axis.through_broadcast(x.axis, x.ndim, len(out.shape))
    if out.dim != axis.dim:
        raise op.refuse("it repeats another dim B times")
    return same_kind(x, sample_axis.fold(axis, out.factor // (axis.outer * axis.inner), outside=True))


@sample_rule("repeat_interleave.self_int", proof="view", sizes=True, index=True)
def repeat_interleave(op: Op) -> Result:
    """y[.., j * r + k, ..] = x[.., j, ..]; copies of a dim lie inside of it."""
    x, out = op.need("self"), op.out()
    if op.args.get("dim") is None and x.ndim > 1:
        raise op.unsupported("without dim it flattens its input", "give dim")
    if x.axis is None:
        return Result() if out.dim is None else Result(SampleAxis(out.dim, out.factor, 1))
    times = out.factor // (x.axis.outer * x.axis.inner)
    return same_kind(x, sample_axis.fold(x.axis, times, outside=False))


@sample_rule("select", "select_copy", proof="view")
def select(op: Op) -> Result:
    """One index of a dim."""
    x = op.need("self")
    dim = op.dim("dim", x.ndim)
    if x.axis is not None and x.axis.dim == dim:
        if op.raw("index") in (0, -1) and _is_anybodys(x):
            return Result(uniform=True)
        raise op.refuse(f"it takes index {op.raw('index')} of dim {dim}, so one sample's value is used for all", _ONE)
    return same_kind(x, sample_axis.without_dims(samples_of(x), [dim])) if x.axis else Result()


@sample_rule("slice", "slice_copy", "narrow", "narrow_copy", proof="view", sizes=True, index=True)
def part(op: Op) -> Result:
    """A range of a dim; of the sample dim, only whole blocks of all samples, or the same of each sample's rows."""
    x, out = op.need("self"), op.out()
    dim = op.dim("dim", x.ndim)
    if x.axis is None:
        if out.dim is not None:
            raise op.refuse(
                f"it takes the first B entries of dim {dim} of %{x.node.name}, which all samples share, so sample i "
                "gets entry i",
                "take the same entries for all samples, or make it an input with samples",
            )
        return Result()
    if dim != x.axis.dim:
        if symbolic_sizes(op.node, op.batch):
            raise op.refuse(f"where it cuts dim {dim} depends on the batch size")
        return same_kind(x, x.axis)
    if (op.raw("start", 0), op.raw("end")) == (0, 1) and _is_anybodys(x):
        return Result(uniform=True)
    if (step := op.raw("step", 1)) != 1:
        if not every(op, step, x.axis.inner):
            raise op.refuse(f"it takes one row in {step} of dim {dim}, the sample dim", _ONE)
        return same_kind(x, replace(x.axis, inner=x.axis.inner // step))
    start, stop = _range(op, x, dim)
    if stop <= start:
        raise op.refuse(f"it takes no row of dim {dim}, the sample dim", _ONE)
    try:
        return same_kind(x, sample_axis.cut(x.axis, start, stop))
    except Misfit:
        raise op.refuse(f"it takes a part of dim {dim}, the sample dim, so some samples are left out", _ONE) from None


def _is_anybodys(x: Argument) -> bool:
    """Whether one row is what every sample holds.  Not where it may have a gradient: those of all samples would meet in
    it.
    """
    return x.found.uniform and samples_of(x) == SampleAxis(samples_of(x).dim) and not _may_have_gradient(x.node)


def _may_have_gradient(node: Node) -> bool:
    """Whether a value is made of anything but buffers, constants and numbers, in a way that has derivatives."""
    above = facts.ancestors([node], _passes_gradients)
    ends = (facts.input_spec(n) for n in above if n.op == "placeholder" and _passes_gradients(n))
    return any(spec.kind not in ("buffer", "constant") for spec in ends)


def _passes_gradients(node: Node) -> bool:
    value, rule = node.meta.get("val"), known(node.target).samples if node.op == "call_function" else None
    is_cut = node.target is aten.detach.default or (rule is not None and rule.shapes_only)
    return not is_cut and any(map(facts.is_differentiable, facts.tensors(value)))


def every(op: Op, step: int, inner: int) -> bool:
    """Whether one row in `step` of the whole sample dim takes the same of each sample's `inner` rows."""
    start, end = op.raw("start", 0) or 0, op.raw("end")
    if not isinstance(start, int):
        return False
    return inner % step == 0 and 0 <= start < step and (end is None or (isinstance(end, int) and end >= 2**31 - 1))


def _range(op: Op, x: Argument, dim: int) -> tuple[int, int]:
    """The range as multiples of B; a bound without B is only allowed at 0 and at the end."""
    first = cut_bound(op, op.raw("start", 0), dim, x.layout.factor)
    if "length" in op.args:
        return first, first + cut_bound(op, op.raw("length"), dim, x.layout.factor)
    return first, min(cut_bound(op, op.raw("end", 2**62), dim, x.layout.factor), x.layout.factor)


def cut_bound(op: Op, given: Any, dim: int, end: int) -> int:
    """A bound of a range of the sample dim as a multiple of B; `end` is that of the dim."""
    if isinstance(given, int):
        if given == 0:
            return 0
        if given >= 2**31 - 1:
            return end
        raise op.refuse(
            f"it counts {given} rows in dim {dim}, the sample dim, so samples are treated differently", _ONE
        )
    if op.see(given) is not None:
        raise op.unsupported(f"where it cuts dim {dim}, the sample dim, is read out of a tensor")
    try:
        bound = sample_axis.multiple(facts.expr(given.meta["val"]), op.batch)
    except Misfit as misfit:
        raise op.refuse(str(misfit), _ONE) from None
    return bound if bound >= 0 else max(end + bound, 0)


@sample_rule(
    "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "tensor_split",
    "split_copy", "split_with_sizes_copy", proof="view", sizes=True,
)  # fmt: skip
def split(op: Op) -> Placement:
    """Consecutive parts of a dim; of the sample dim, only whole blocks of all samples."""
    x = op.need("self")
    if x.axis is None or op.dim("dim", x.ndim) != x.axis.dim:
        return same_kind(x, x.axis)
    found: list[SampleAxis | None] = []
    start = 0
    try:
        for out in op.outputs():
            if out.dim is None:
                raise op.refuse("its parts hold different samples", _ONE)
            found.append(sample_axis.cut(x.axis, start, start + out.factor))
            start += out.factor
    except Misfit:
        raise op.refuse("its parts hold different samples", _ONE) from None
    return tuple(found)


@sample_rule("unbind", "unbind_copy", proof="view")
def unbind(op: Op) -> Placement:
    """All indices of a dim, one by one."""
    x = op.need("self")
    dim = op.dim("dim", x.ndim)
    if x.axis is None:
        return None
    if x.axis.dim == dim:
        raise op.refuse(f"it takes dim {dim}, the sample dim, apart sample by sample", _ONE)
    return same_kind(x, sample_axis.without_dims(x.axis, [dim]))


@sample_rule("diagonal", "diagonal_copy", proof="view")
def diagonal(op: Op) -> Result:
    """y[.., i] = x[.., i, i]."""
    x = op.need("self")
    dims = [op.dim("dim1", x.ndim), op.dim("dim2", x.ndim, 1)]
    if x.axis is None:
        return Result()
    if x.axis.dim in dims:
        raise op.refuse("its diagonal runs through the sample dim")
    return Result(sample_axis.without_dims(x.axis, dims))


@sample_rule("unfold", "unfold_copy", proof="view")
def unfold(op: Op) -> Result:
    """Windows of one dim; a new last dim holds the places inside the window."""
    x = op.need("self")
    if x.axis is not None and x.axis.dim == op.dim("dimension", x.ndim):
        raise op.refuse("its windows run over the sample dim")
    return Result(x.axis)


@sample_rule("as_strided", "as_strided_copy", "as_strided_scatter", "set", "resize", proof="view", sizes=True)
def as_strided(op: Op) -> Result:
    """Reads memory by strides: nothing is known about the rows."""
    raise op.unsupported("it reads memory by strides, which do not say whose rows they are",
                         "use view, permute, slice or unfold")  # fmt: skip
