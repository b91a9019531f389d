"""Groups of samples over many batches: what is linear in the gradient of a group is added up.

g_u = Σ_k Σ_{i in u and batch k} g_i, so a row of u that is linear in g_u is the sum of its rows of the batches.
"""

from __future__ import annotations

from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Joins, Quantity
from psg_fx.step.parts import if_linear, is_linear
from psg_fx.step.with_loss import LossModule
from psg_fx.tensors import as_int

_WHERE = "over(loader, step, groups=...)"


def joins_of(step: LossModule, num_groups: int | None, groups: object, others: dict[str, object]) -> Joins:
    """How the fields of groups follow from those of batches.  others: arguments that do not go with groups."""
    if groups is None:
        raise BadArgument(
            "num_groups is given without groups", where=_WHERE, why="it counts the groups of the samples",
            fix="pass groups=: a key or a position of the batch, or a function of it, that gives [B] ints",
        )  # fmt: skip
    if (as_int(num_groups) or 0) < 1:
        raise BadArgument(
            f"num_groups={num_groups!r} is not a number of groups", where=_WHERE,
            why="rows of groups are added up over batches, and no batch knows all groups",
            fix="pass num_groups=: groups are numbered from 0 to num_groups - 1",
        )  # fmt: skip
    for name in (name for name, value in others.items() if value is not None):
        raise BadArgument(
            f"{name}= does not go with groups=", where=_WHERE,
            why="it is for rows of samples, which are done with their batch; those of groups are done with the last",
            fix=f"leave {name}= out, or sum the grads of a store by groups afterwards",
        )  # fmt: skip
    joins = dict(step.settings.joins_of_processes)
    for quantity in step.settings.quantities:
        if not is_linear(quantity):
            raise _not_linear(quantity)
        if not quantity.over_samples:
            joins |= dict.fromkeys(quantity.joins(), "sum")
    return joins


def _not_linear(quantity: Quantity) -> BadArgument:
    fields = " and ".join(quantity.joins_of_processes())
    return BadArgument(
        f"{fields} of groups do not follow from those of batches", where=_WHERE,
        why="the samples of a group may lie in several batches, and only what is linear in its gradient adds up",
        fix="ask for Grads() and take it of the sums; or have all samples of a group in one batch and write the loop: "
        "step(x, y, groups=ids)" + if_linear(quantity),
    )  # fmt: skip
