"""Ops that put several values together."""

from __future__ import annotations

from collections.abc import Sequence

from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.sample_axis import Misfit

from ..table import Placement, sample_rule
from ..values import Argument, Op, broadcast, samples_of


@sample_rule("cat", "concat", "concatenate", proof="joined")
def cat(op: Op) -> Placement:
    """y[.., :n] = a, y[.., n:] = b, along one dim."""
    values = [v for v in op.values_of("tensors") if v.shape != (0,)]
    return joined(op, values, op.dim("dim", values[0].ndim))


def joined(op: Op, values: Sequence[Argument], dim: int) -> SampleAxis | None:
    """The axis after a concatenation along `dim`; along the sample dim, all parts must be whole batches."""
    carriers = [v for v in values if v.axis is not None]
    if not carriers:
        return None
    if not any(samples_of(v).dim == dim for v in carriers):
        missing = next((v for v in values if v.axis is None), None)
        if missing is not None:
            raise op.refuse(f"%{missing.node.name} carries no samples", "expand it to the batch first")
        return axis_of(op, values)
    if len(carriers) != len(values) or any(samples_of(v).dim != dim for v in carriers):
        raise op.refuse("it appends rows to the samples that do not belong to any", "append along another dim")
    try:
        return sample_axis.join([samples_of(v) for v in carriers])
    except Misfit as misfit:
        apart = "join what each sample has: torch.cat([a.reshape(B, -1), b.reshape(B, -1)], 1) in place of flat tensors"
        raise op.unsupported(str(misfit), apart) from None


def axis_of(op: Op, values: Sequence[Argument]) -> SampleAxis | None:
    """The common axis of values of the same number of dims."""
    found = broadcast(op, values, values[0].ndim).axes
    return found if isinstance(found, SampleAxis) else None


@sample_rule("stack", "_stack", proof="joined")
def stack(op: Op) -> Placement:
    """A new dim that counts the values."""
    values = op.values_of("tensors")
    axis = axis_of(op, values)
    return None if axis is None else sample_axis.through_unsqueeze(axis, values[0].ndim, op.raw("dim", 0))


@sample_rule("meshgrid", proof="joined")
def meshgrid(op: Op) -> Placement:
    """y_k[i_0, i_1, ..] = x_k[i_k]."""
    values = op.values_of("tensors")
    if any(v.axis is not None for v in values):
        raise op.refuse("it makes a grid whose points combine the samples")
    return None


@sample_rule("select_scatter", "slice_scatter", "diagonal_scatter", proof="joined")
def scatter_part(op: Op) -> Placement:
    """A copy of x in which one place, range or diagonal of a dim is src; all rows of a uniform x are anybody's."""
    x, source = op.need("self"), op.need("src")
    dims = [op.dim("dim", x.ndim)] if "dim" in op.args else [op.dim("dim1", x.ndim), op.dim("dim2", x.ndim, 1)]
    if x.axis is None:
        if source.axis is not None:
            raise op.refuse(f"it writes samples into %{x.node.name}, which carries none")
        return None
    if x.axis.dim in dims:
        own = source.axis if op.name == "aten.slice_scatter" and source.layout == x.layout else None
        if own is not None and (own == x.axis or (x.found.uniform and own.dim in dims)):
            return own
        raise op.refuse(f"it writes to a part of dim {x.axis.dim}, the sample dim")
    if source.axis is not None:
        wanted = x.axis if op.name == "aten.slice_scatter" else sample_axis.without_dims(x.axis, dims)
        if source.axis.dim == wanted.dim and x.found.uniform:
            return sample_axis.moved(source.axis, x.axis.dim)
        anywhere = source.found.uniform and source.axis.dim == wanted.dim
        if not anywhere and source.axis != wanted:
            raise op.refuse(f"%{source.node.name} does not hold the samples where %{x.node.name} does")
    return x.axis


@sample_rule("pad_sequence", "_chunk_cat", proof="joined")
def ragged(op: Op) -> Placement:
    """Parts of different lengths."""
    raise op.unsupported("its parts have different lengths")
