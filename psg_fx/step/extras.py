"""The further inputs of a graph at one call: what quantities give for it, and what it reads of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psg_fx.algebra.members import COUNT, IDS
from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Quantity, Shapes
from psg_fx.quantities.clipped_sum import COUNTED
from psg_fx.quantities.own import no_extra, of_call
from psg_fx.step.binding import Binding
from psg_fx.step.constants import Constants
from psg_fx.step.groups import Groups


def further_inputs(
    quantities: Sequence[Quantity], shapes: Shapes, given: Mapping[str, Any], binding: Binding, constants: Constants,
    device: torch.device, samples: int, groups: Groups | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Each by its name.  shapes: of the parameters.  given: the keyword arguments of the call.  samples: B."""
    found: dict[str, torch.Tensor] = {}
    dtypes, count = binding.given, samples if groups is None else groups.count
    for quantity in quantities:
        for name, value in of_call(quantity, "values", shapes, given).items():
            if name not in dtypes:
                raise no_extra(quantity, name)
            found[name] = constants.tensor(name, value, dtypes[name], device)
            _require_shape(name, found[name], binding.shapes[name], count, groups is not None)
    if COUNTED in dtypes:
        found[COUNTED] = constants.ones(COUNTED, count, dtypes[COUNTED], device)
    if groups is None:
        return found
    for name in found.keys() & {name for name, shape in binding.shapes.items() if shape[:1] == (None,)}:
        found[name] = groups.given(found[name])
    found[COUNT.name] = constants.tensor(COUNT.name, max(count, 1), dtypes[COUNT.name], device)
    return found | groups.inputs(device, IDS.name in dtypes, constants)


def _require_shape(
    name: str, value: torch.Tensor, declared: Sequence[int | None], count: int, grouped: bool
) -> None:  # fmt: skip
    """Refuse a value of another shape than its quantity says.  declared: None stands for `count`."""
    if tuple(value.shape) == tuple(count if size is None else size for size in declared):
        return
    each, rows = ("groups", "num_groups") if grouped else ("samples", "B")
    shape = "[" + ", ".join(rows if size is None else str(size) for size in declared) + "]"
    raise BadArgument(
        f"{name} have shape {tuple(value.shape)}", where=f"step(inputs, targets, {name}=...)",
        why=f"there is one for each of the {count} {each}" if None in declared else f"the graph reads {shape}",
        fix=f"pass a {shape} tensor" if declared else "pass a number",
    )  # fmt: skip
