"""Ops in which other processes take part: all of them compute the same samples, each a slice of every one."""

from __future__ import annotations

from ..table import Placement, sample_rule
from ..values import Op, Result


@sample_rule("psg_fx::enter", "psg_fx::sum_across", proof="elementwise")
def in_place(op: Op) -> Result:
    """y = Σ_r x_r: element by element, in every process at the same place."""
    found = op.need("x").found
    return Result(found.axes, found.uniform)


@sample_rule("psg_fx::gather", "psg_fx::own_slice", "psg_fx::sum_slice", proof="joined")
def along(op: Op) -> Placement:
    """y = [x_0 .. x_n] along a dim, or a slice of it."""
    x = op.need("x")
    if x.axis is not None and x.axis.dim == op.dim("dim", x.ndim):
        raise op.unsupported("it joins slices along the dim that holds the samples", "slice along another dim")
    return Result(x.axis, x.found.uniform)


@sample_rule("psg_fx::index", proof="of no sample", shapes_only=True)
def index(op: Op) -> Placement:
    """The number of the process."""
    return None
