"""The order of the passes, written once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from psg_fx.algebra.members import Grouping
from psg_fx.garbage import without_collection
from psg_fx.graph.history import History, PassRecord, log
from psg_fx.graph.nodes import value_of
from psg_fx.graph.slices import Slices
from psg_fx.graph.stages import Stage, verify
from psg_fx.planner.budget import Budget
from psg_fx.planner.cost import Device
from psg_fx.program.ambient import ambient_key, isolated, without_defaults
from psg_fx.program.arguments.call import Call
from psg_fx.program.program import Program
from psg_fx.program.reads.observe import observed_later
from psg_fx.quantities.base import Quantity
from psg_fx.torch_private.fakes import forget_real_tensors
from psg_fx.torch_private.tracer import traced_quickly

from .alone.alone import Alone
from .beside import beside
from .capture.capture import capture
from .capture.functions.packed import packed_as_padded
from .compile.recurrences import begin_own_loops
from .differentiate import differentiate
from .independence.batch import batch
from .lower.lower import lower
from .networks import merge, networks
from .picks import picks
from .plan import plan
from .runner import graph_pass, run
from .separate import separate
from .sites import find_sites
from .statistics import statistics
from .stored import Entry, entry_of
from .tidy import tidy
from .totals.totals import totals
from .unreduce.unreduce import unreduce
from .widen import widen

BATCH = graph_pass("batch", before=Stage.CAPTURED, after=Stage.BATCHED)(batch)
UNREDUCE = graph_pass("unreduce", before=Stage.BATCHED, after=Stage.UNREDUCED)(unreduce)


@dataclass(frozen=True)
class Asked:
    """All that passes are told beside a captured graph.

    dtype: of bounds and weights.  size: of the batch.  input_gradients: which inputs have gradients, too.  grouping:
    what is asked is asked of groups of samples.  rows: of each axis of rows, how many there are, and how many the
    largest sample has, where rows are brought in order.
    """

    quantities: tuple[Quantity, ...]
    dtype: torch.dtype
    device: Device
    size: int
    input_gradients: tuple[bool, ...] = ()
    budget: Budget | None = None
    grouping: Grouping | None = None
    rows: tuple[tuple[int, int | None], ...] = ()


@without_collection()
@traced_quickly()
def run_pipeline(
    program: Program, call: Call, tracked: dict[str, str], asked: Asked, history: History,
    slices: Slices | None = None, stored: bool = False,
) -> GraphModule:  # fmt: skip
    """From a model and a loss to a lowered graph; every stage on the way is kept in `history`.

    slices: this process has slices of the model.  stored: what passes after capture make may be found on disk, and is
    kept there.
    """
    gm = record_capture(program, call, tracked, history)
    begin_own_loops(gm, asked.device)
    began = time.perf_counter()
    entry = entry_of(gm, (asked, ambient_key(asked.device.name))) if stored and slices is None else None
    lowered = None if entry is None else _read(entry, gm, asked, history, began)
    if lowered is None:
        alone = Alone(program, call, packed_as_padded)
        with observed_later(program.observed):
            lowered = _made(gm, asked, history, alone, slices)
        if entry is not None and not alone.asked:
            entry.write(lowered)
    forget_real_tensors(value_of(next(iter(gm.graph.nodes))))
    name, seconds = type(program.model).__name__, sum(step.seconds for step in history.passes)
    log.info("%s: captured, planned and lowered in %.1f s, %d nodes", name, seconds, len(lowered.graph.nodes))
    return lowered


def _read(entry: Entry, gm: GraphModule, asked: Asked, history: History, began: float) -> GraphModule | None:
    """The lowered graph from disk; passes run where somebody asks to see what they did."""
    found = entry.read(gm)
    if found is None:
        return None
    captured = history.graphs.kept(Stage.CAPTURED.value)

    def passes(history: History) -> None:
        history.graphs.keep(Stage.CAPTURED.value, again := captured.restored())
        with isolated(), without_defaults():
            _passes(again, asked, history)

    history.left_out = passes
    seconds, sizes = time.perf_counter() - began, (len(gm.graph.nodes), len(found.graph.nodes))
    history.record(PassRecord("read", Stage.CAPTURED, Stage.TIDIED, seconds, *sizes))
    return found


def _made(gm: GraphModule, asked: Asked, history: History, alone: Alone, slices: Slices | None) -> GraphModule:
    """The lowered graph by all passes after capture."""
    if slices is not None:
        gm = _spread(gm, slices, history)
    with without_defaults():
        gm = _passes(gm, asked, history, alone)
        return gm if slices is None else _written_with_others(gm, history)


def _passes(gm: GraphModule, asked: Asked, history: History, alone: Alone | None = None) -> GraphModule:
    device, size = asked.device, asked.size
    gm = run(BATCH, gm, history, alone=alone)
    gm = run(UNREDUCE, gm, history)
    gm = run(find_sites, gm, history)
    gm = run(differentiate, gm, history, input_gradients=asked.input_gradients)
    gm = run(networks, gm, history)
    gm = run(merge, gm, history)
    asks = tuple(dict.fromkeys(ask for quantity in asked.quantities for ask in quantity.asks()))
    gm = run(
        plan, gm, history, asks=asks, device=device, size=size, budget=asked.budget, grouping=asked.grouping,
        rows=asked.rows,
    )  # fmt: skip
    gm = run(lower, gm, history, quantities=asked.quantities, dtype=asked.dtype)
    gm = run(tidy, gm, history)
    gm = run(picks, gm, history)
    gm = run(statistics, gm, history)
    gm = run(totals, gm, history, device=device, size=size)
    gm = run(widen, gm, history, device=device.name)
    gm = run(beside, gm, history, device=device, size=size)
    return run(separate, gm, history)


def _spread(gm: GraphModule, slices: Slices, history: History) -> GraphModule:
    """Only where it is asked for, since the ops between processes are registered with it."""
    from .spread import spread

    return run(spread, gm, history, slices=slices)


def _written_with_others(gm: GraphModule, history: History) -> GraphModule:
    from .collectives import collectives

    return run(collectives, gm, history)


def record_capture(program: Program, call: Call, tracked: dict[str, str], history: History) -> GraphModule:
    """Capture, verified and recorded like any other pass."""
    start = time.perf_counter()
    with history.passing("capture"):
        gm = capture(program, call, tracked)
        verify(gm, Stage.CAPTURED)
        history.verified = (gm, Stage.CAPTURED)
    seconds = time.perf_counter() - start
    kept = history.graphs.keep(Stage.CAPTURED.value, gm)
    history.record(PassRecord("capture", Stage.CAPTURED, Stage.CAPTURED, seconds, 0, len(gm.graph.nodes), kept))
    return gm
