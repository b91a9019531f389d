"""`step.export`: the step as a file for other processes, which need not have psg_fx."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.frames import with_room_for_frames
from psg_fx.graph import facts
from psg_fx.interrupts import deferred
from psg_fx.program.ambient import isolated
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.conditions import CONDITIONS
from psg_fx.program.values import Same
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import COUNTED, weights_of_clipped
from psg_fx.quantities.own import is_own
from psg_fx.saved.refusals import refuse
from psg_fx.saved.spec import describe, is_passed
from psg_fx.saved.write import write
from psg_fx.step import own_code
from psg_fx.step.binding import plain_mode


@with_room_for_frames
def export(
    path: str | os.PathLike[str], model: nn.Module, loss_fn: Any, build: Any, call: Call,
    values: Sequence[tuple[Quantity, Mapping[str, Any]]], extras: Any,
) -> Path:  # fmt: skip
    """Write the step that `build` makes.

    values: what every quantity makes of its settings and of the call's keywords.  extras: gives the step's further
    inputs, from its binding.
    """
    target = Path(path if hasattr(path, "__fspath__") else str(path))
    read = _read_at_the_call(values)
    if target.suffix != ".pt2" or target.is_dir() or not target.parent.is_dir():
        raise BadArgument(
            f"path={str(path)!r} is no place for a package", where="step.export(path, inputs, targets)",
            why="torch knows packages by the ending .pt2" if target.suffix != ".pt2" else
            "a folder lies there" if target.is_dir() else "its folder does not exist",
            fix="step.export('step.pt2', inputs, targets)",
        )  # fmt: skip
    if call.batch_size() == 0:
        raise BadArgument(
            "the batch has no samples", where="step.export(path, inputs, targets)",
            why="the file is tried out on them before it is kept", fix="pass one sample or more",
        )  # fmt: skip
    with deferred(), isolated():
        step, program = own_code.built(build, model, loss_fn, call)
    gm, looked = step.gm, program.observed.values
    decided = {name: b.detach().flatten().tolist() for name, b in model.named_buffers() if Same(b) in looked}
    refuse(gm, call, step.is_cut, sorted(step.binding.read_inside.values()))
    given = extras(step.binding)
    nodes = facts.placeholders(gm)
    inputs = [(facts.input_spec(node), node) for node in nodes]
    with plain_mode():
        arguments = step.binding.arguments(call, given)
    drop = bool(weights_of_clipped(q for q, _ in values)) and not step.leaves_out
    own = {name: value for name, value in given.items() if name not in read}
    defaults = {name: 1 if name == COUNTED else value.tolist() for name, value in own.items()}
    spec = describe(
        [(spec, node) for spec, node in inputs if is_passed(spec)], list(facts.returned(gm)), call,
        facts.graph_facts(gm), defaults, drop, CONDITIONS.of(gm) if call.axes else (),
        decided,
    )  # fmt: skip
    return write(target, gm, spec, arguments)


def _read_at_the_call(values: Sequence[tuple[Quantity, Mapping[str, Any]]]) -> set[str]:
    """The further inputs that every call of the file gives by itself.  All others have the values of now."""
    found: set[str] = set()
    for quantity, named in values:
        given = {name for name in named if name in quantity.reads or name.startswith("direction.")}
        if quantity.reads and given != set(named) and is_own(quantity):
            raise NotYetSupported(
                f"{type(quantity).__name__} computes {', '.join(sorted(set(named) - given))} outside of the graph",
                where="step.export(path, inputs, targets)",
                why=f"from {', '.join(quantity.reads)}, perhaps, and the code that does is not in the file",
                fix="give the graph's further inputs the names of the call's keywords (reads), unchanged",
            )  # fmt: skip
        found |= given
    return found
