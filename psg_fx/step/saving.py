"""`step.export`: the step as a file for other processes, which need not have psg_fx."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psg_fx.errors import BadArgument
from psg_fx.graph import facts
from psg_fx.program.ambient import isolated
from psg_fx.program.call import Call
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import COUNTED, ClippedSum
from psg_fx.saved.refusals import is_passed, refuse
from psg_fx.saved.spec import describe
from psg_fx.saved.write import write
from psg_fx.step import own_code
from psg_fx.step.binding import plain_mode
from psg_fx.step.compiled import CompiledStep


def export(
    path: str | os.PathLike[str], model: nn.Module, loss_fn: Any, build: Any, call: Call,
    quantities: Sequence[Quantity], extras: Any,
) -> Path:  # fmt: skip
    """Write the step that `build` makes.  extras: the step's further inputs, from the dtypes of those it has."""
    target = Path(path)
    if target.suffix != ".pt2" or not target.parent.is_dir():
        raise BadArgument(
            f"path={str(path)!r} is no place for a package", where="step.export(path, inputs, targets)",
            why="torch knows packages by the ending .pt2" if target.suffix != ".pt2" else "its folder does not exist",
            fix="step.export('step.pt2', inputs, targets)",
        )  # fmt: skip
    if call.batch_size() == 0:
        raise BadArgument(
            "the batch has no samples", where="step.export(path, inputs, targets)",
            why="the file is tried out on them before it is kept", fix="pass one sample or more",
        )  # fmt: skip
    with isolated():
        step: CompiledStep = own_code.built(build, model, loss_fn, call)[0]
    gm = step.gm
    refuse(gm, call, step.part)
    given = extras(step.binding.given)
    nodes = facts.placeholders(gm)
    inputs = [(facts.input_spec(node), node) for node in nodes]
    with plain_mode():
        arguments = step.binding.arguments(call, given)
    drop = any(isinstance(q, ClippedSum) and q.nonfinite == "drop" for q in quantities)
    spec = describe(
        [(spec, node) for spec, node in inputs if is_passed(spec)], list(facts.returned(gm)), call,
        facts.graph_facts(gm).batch, _defaults(given, quantities), drop,
    )  # fmt: skip
    return write(target, gm, spec, arguments)


def _defaults(given: Mapping[str, torch.Tensor], quantities: Sequence[Quantity]) -> dict[str, Any]:
    """Of what the step has by itself: the bounds of a clipped sum, and that each sample counts once."""
    read = {name for quantity in quantities for name in quantity.reads}
    own = {name: value for name, value in given.items() if name.partition(".")[0] not in ("direction", *read)}
    return {name: 1 if name == COUNTED else value.tolist() for name, value in own.items()}
