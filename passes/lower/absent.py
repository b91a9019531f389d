"""Samples that are left out of a sum although their gradient is NaN or inf, without a look at their norms.

A factor of 0 does not keep them out, since 0·NaN is NaN.  With zeros in their places, in all that is multiplied for the
sum, it does: most of these zeros are written by kernels that are there anyway, and an activation that a product reads
is copied.  The host need not know, so a CUDA device is not waited for, whose time would be that of many copies.  On a
CPU the norms are at hand, and a second run in the rare case that it is needed is cheaper (`psg_fx/step/finite.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from psg_fx.algebra.network import Members, Routed
from psg_fx.planner.plan import Plan
from psg_fx.quantities.base import Quantity

DEVICES = frozenset({"cuda"})
"""Those on which a look at the norms is a synchronisation."""


def left_out(quantities: Sequence[Quantity], plan: Plan) -> frozenset[str]:
    """The weights whose zeros leave samples out; none where samples are groups or rows, or are sent to experts."""
    wanted = frozenset(name for quantity in quantities for name in quantity.leaves_out)
    if plan.device.name not in DEVICES or plan.grouping is not None or plan.rows:
        return frozenset()
    parts = [part for parameter in plan.parameters for part in parameter.parts if part.ask.reads in wanted]
    forms = [node.arg.form for part in parts for node in part.tree.nodes.values()]
    return frozenset() if any(isinstance(form, (Members, Routed)) for form in forms) else wanted
