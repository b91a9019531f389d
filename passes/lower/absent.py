"""Samples that are left out of a sum although their gradient is NaN or inf, without a look at their norms.

A factor of 0 does not keep them out, since 0·NaN is NaN.  With zeros in their places, in all that is multiplied for the
sum, it does: most of these zeros are written by kernels that are there anyway, and an activation that a product reads
is copied.  The host need not know, so a CUDA device is not waited for, whose time would be that of many copies.  On a
CPU the norms are at hand, and a second run in the rare case that it is needed is cheaper (`psg_fx/step/finite.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from psg_fx.algebra.network import Members, Routed
from psg_fx.errors import NotYetSupported
from psg_fx.planner.plan import Plan
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import weights_of_clipped

DEVICES = frozenset({"cuda"})
"""Those on which a look at the norms is a synchronisation."""


def left_out(quantities: Sequence[Quantity], plan: Plan) -> frozenset[str]:
    """The weights whose zeros leave samples out in the graph.  Those of clipped sums may do so by a second run, and do
    on a CPU and where samples are groups or rows, or are sent to experts.

    Raises NotYetSupported where others would have to.
    """
    clipped = weights_of_clipped(quantities)
    others = frozenset(name for quantity in quantities for name in quantity.leaves_out) - clipped
    wanted = others | (clipped if plan.device.name in DEVICES else frozenset())
    parts = [part for parameter in plan.parameters for part in parameter.parts if part.ask.reads in wanted]
    forms = [node.arg.form for part in parts for node in part.tree.nodes.values()]
    if plan.grouping is None and not plan.rows and not any(isinstance(form, (Members, Routed)) for form in forms):
        return wanted
    if others:
        raise NotYetSupported(
            f"zeros of the weights {min(others)!r} leave samples out (leaves_out), and are not known to",
            where="transform(quantities=...)",
            why="samples are groups or rows here, or are sent to experts, and others lie beside them in what is summed",
            fix="take ClippedSum(), which drops them by a second run; or leave such samples out of the batch",
        )  # fmt: skip
    return frozenset()
