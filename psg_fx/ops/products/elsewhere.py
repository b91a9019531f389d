"""Which op multiplies matrices of float32 on a CPU, if not the BLAS of torch."""

from __future__ import annotations

from torch._ops import OpOverload

from psg_fx.ops.products import by_onednn, in_parts
from psg_fx.torch_private import onednn
from psg_fx.torch_private.matrix_unit import has_matrix_unit


def elsewhere() -> OpOverload | None:
    """`in_parts` where there is a matrix unit, `by_onednn` where oneDNN was measured to be faster, or none; none also
    where the user lets torch round, which nothing exact is as fast as.

    Both take a[m, k], b[k, n] and a bias[n] or None.  That a unit is faster is not measured: it multiplies 16 times as
    many numbers in a cycle as vectors do, of which `in_parts` needs six.
    """
    if onednn.may_round():
        return None
    found: OpOverload | None = None
    if has_matrix_unit():
        found = in_parts.in_parts
    elif by_onednn.is_faster():
        found = by_onednn.by_onednn
    return found
