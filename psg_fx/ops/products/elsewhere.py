"""Which op multiplies matrices of float32 on a CPU, if not the BLAS of torch."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from psg_fx.ops.products import by_onednn, in_parts
from psg_fx.torch_private import onednn

WAYS = {in_parts.in_parts: in_parts.is_worth_it, by_onednn.by_onednn: by_onednn.is_worth_it}
"""Ops that take a[m, k], b[k, n] and a bias[n] or None, and whether this machine gains by them."""


def elsewhere(is_wanted: Callable[[OpOverload], bool]) -> OpOverload | None:
    """The first of them that has something to do, and is worth it here; none also where the user lets torch round,
    which nothing exact is as fast as.
    """
    if onednn.may_round():
        return None
    return next((op for op, is_worth_it in WAYS.items() if is_wanted(op) and is_worth_it()), None)
