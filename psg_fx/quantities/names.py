"""Quantities by name, for the command line and for benchmarks."""

from __future__ import annotations

from dataclasses import MISSING, fields

from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.quantities.products import Dots, Gram, Projection, SecondMoment
from psg_fx.quantities.sums import Grads, MeanGrad, Norms, WeightedSum

MAX_NORM = 1.0
"""Clipping threshold where none is given."""


KINDS: dict[str, type[Quantity]] = {
    kind.field: kind for kind in (Grads, Norms, ClippedSum, WeightedSum, MeanGrad, Dots, Gram, SecondMoment, Projection)
}
"""Every quantity by the field of the output that it fills."""


USUAL: dict[str, Quantity] = {"grads": Grads(), "norms": Norms(), "clipped_sum": ClippedSum(max_norm=MAX_NORM)}
"""What a benchmark measures when nothing else is asked."""


def spelled(quantity: Quantity) -> str:
    """`clipped_sum(max_norm=0.5)`: the quantity with the arguments that are not their defaults."""
    given = [f for f in fields(quantity) if f.default is MISSING or getattr(quantity, f.name) != f.default]
    arguments = ", ".join(f"{f.name}={getattr(quantity, f.name)!r}" for f in given)
    return f"{quantity.field}({arguments})" if arguments else quantity.field
