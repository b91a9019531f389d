"""`psg_fx.benchmark`: what a step of psg_fx costs beside an ordinary training step, the loop, vmap and other libraries.

Every contender is built and called once (its first call holds the compilation), its answer is judged (`judge.py`), its
peak memory is taken, and then all of them are timed in interleaved rounds. A contender that fails keeps its row, with
the reason.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.benchmarking.contenders import field_of
from psg_fx.benchmarking.judge import Judge
from psg_fx.benchmarking.problem import ORDINARY, Asked, Computation, Contender, Problem, by_label
from psg_fx.benchmarking.report import BenchmarkReport, BenchmarkRow
from psg_fx.errors import BadArgument, first_line
from psg_fx.machine import environment
from psg_fx.measure.clock import give_back, spread, synchronize, time_rounds
from psg_fx.measure.device_work import device_work
from psg_fx.program.changes.effects import nothing_left
from psg_fx.progress import Progress
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.names import USUAL
from psg_fx.reference.batch import is_packed
from psg_fx.reference.by_vmap import quiet_vmap
from psg_fx.reference.definitions import Answer
from psg_fx.reference.loop import Loss, draws_random_numbers
from psg_fx.reference.state import unchanged
from psg_fx.tensors import short_name
from psg_fx.torch_private.caches import empty_for_a_while

SHOWN = 12
"""Kernels, and pauses between kernels, that a row names."""


@dataclass(frozen=True)
class Turn:
    """How processes share a machine: contenders are prepared side by side, with kernels that others have compiled, as
    long as they are begun until then (seconds of `time.time`); `alone` is entered while times are taken.
    """

    until: float
    alone: Callable[[], AbstractContextManager[object]]


def benchmark(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    quantities: Asked = tuple(USUAL),
    contenders: Sequence[str] | None = None,
    peers: bool = False,
    batch_dim: Any = 0,
    backend: str = "inductor",
    min_run_time: float = 2.0,
    rounds: int = 5,
    tolerance: float = 1e-2,
    progress: bool = True,
    turn: Turn | None = None,
) -> BenchmarkReport:
    """Measure the contenders on one batch, and return a table of times, memory and errors.

    `quantities`: names of the usual three, or any of `psg_fx.Quantity`, each measured by itself. `contenders`: globs on
    names or `name/quantity` (`["ordinary*", "psg*"]`); by default all but other libraries, which `peers` adds, and
    those who first materialise gradients to make another quantity of them. `min_run_time`: seconds of timing per
    contender, over all `rounds`. A per-sample answer further than `tolerance` (relative to each tensor's largest entry)
    from that of vmap or the loop is a failure. `turn`: where several processes prepare their contenders side by
    side. Forgets what `torch.compile` has compiled in this process so far.
    """
    if rounds < 1 or not min_run_time > 0:
        raise BadArgument(
            f"rounds={rounds!r}, min_run_time={min_run_time!r}", where="benchmark(rounds=..., min_run_time=...)",
            why="times are medians over rounds of some seconds", fix="one round or more, of more than 0 seconds",
        )  # fmt: skip
    if not callable(loss_fn):
        raise BadArgument(
            f"loss_fn is {loss_fn!r}", where="benchmark(model, loss_fn, inputs, targets)",
            why="the ordinary step, which all others are timed beside, is the gradient of a loss",
            fix="pass the loss: benchmark(model, F.cross_entropy, x, y)",
        )  # fmt: skip
    torch.compiler.reset()
    problem = Problem(model, loss_fn, inputs, targets, batch_dim, backend)
    asked = by_label(quantities)
    chosen = field_of(asked, contenders, peers)
    note = Progress(progress).say
    with nothing_left((model, loss_fn)), unchanged(model, loss_fn):  # after thousands of calls
        return _measured(problem, asked, chosen, note, rounds, min_run_time, tolerance, turn)


def _measured(
    problem: Problem, asked: Mapping[str, Quantity], chosen: Sequence[Contender], note: Callable[[str], None],
    rounds: int, min_run_time: float, tolerance: float, turn: Turn | None,
) -> BenchmarkReport:  # fmt: skip
    notes: list[str] = []
    judge: Judge | None = None
    if draws_random_numbers(*problem.call, problem.batch_dim):
        notes.append("answers were not compared: the model draws random numbers (call model.eval())")
    elif any(c.quantity != ORDINARY for c in chosen):
        note("reference gradients")
        judge = Judge(problem, asked)
        notes.append(f"error: largest difference from {judge.name}, relative to the tensor's largest entry")
    note("starting the compiler")
    start_compiler(problem)
    rows = {c.label: BenchmarkRow(c.name, c.quantity) for c in chosen}
    steps: dict[str, Computation] = {}
    for number, c in enumerate(chosen, 1):
        if turn and time.time() > turn.until:
            rows[c.label].failure = "not begun in time"
            continue
        note(f"first call of {c.label} ({number} of {len(chosen)})")
        step = _prepare(c, problem, rows[c.label], judge, tolerance, cold=turn is None)
        if step is not None:
            steps[c.label] = step
    if judge and judge.asked_again:
        notes.append("or from the loop over samples in float64, where that is less: rounding passes kinks")
    judge = None
    gc.collect()
    with quiet_vmap(), turn.alone() if turn else contextlib.nullcontext():
        _timed(steps, rows, rounds, min_run_time, note, on_cuda=problem.device.type == "cuda")
    note("")
    return _beside_ordinary(BenchmarkReport(list(rows.values()), _sizes(problem), environment(problem.device), notes))


def _timed(
    steps: Mapping[str, Computation], rows: Mapping[str, BenchmarkRow], rounds: int, min_run_time: float,
    note: Callable[[str], None], on_cuda: bool,
) -> None:  # fmt: skip
    """Time the steps in turns, and write into their rows what came of it."""
    failed: dict[str, Exception] = {}
    times = time_rounds(steps, rounds=rounds, min_run_time=min_run_time, note=note, failed=failed)
    if on_cuda:
        record_work(steps, rows, failed)
    for label, seconds in times.items():
        if label in failed:
            rows[label].failure = failure(failed[label])
            continue
        rows[label].median_s, rows[label].iqr_s = spread(seconds)
        rows[label].blocks = len(seconds)


def _beside_ordinary(report: BenchmarkReport) -> BenchmarkReport:
    """With each median relative to that of the fastest ordinary step."""
    if (base := report.fastest_ordinary()) and base.median_s:
        for row in report.rows:
            row.ratio = None if row.median_s is None else row.median_s / base.median_s
    return report


def record_work(
    steps: Mapping[str, Computation], rows: Mapping[str, BenchmarkRow], failed: Mapping[str, Exception]
) -> None:
    """What the device does in each step, into its row."""
    for label, step in steps.items():
        if label not in failed:
            work = device_work(step)
            rows[label].device_s, rows[label].launches = work.seconds, work.launches
            rows[label].kernels, rows[label].pauses = work.kernels[:SHOWN], work.pauses[:SHOWN]


def start_compiler(problem: Problem) -> None:
    """Compiles something trivial, so that no contender's first call pays for starting the compiler."""
    if problem.backend == "eager":
        return
    probe = torch.ones(8, 8, device=problem.device, requires_grad=True)
    torch.compile(lambda x: (x @ x).sin().sum(), backend=problem.backend)(probe).backward()
    synchronize(problem.device)


def _prepare(
    contender: Contender,
    problem: Problem,
    row: BenchmarkRow,
    judge: Judge | None,
    tolerance: float,
    cold: bool,
) -> Computation | None:
    """Builds and checks a contender and takes its memory; the step to be timed, or None with the reason in its row."""
    # The exception is kept inside the block, since a cache that is left by an exception stays on disk.
    with empty_for_a_while() if cold else contextlib.nullcontext(), quiet_vmap():
        try:
            step, answer, row.first_call_s = first_call(contender, problem)
            if judge is not None and (error := judge.error(contender.quantity, answer)) is not None:
                row.error = error
                tolerance += contender.rounding
                if not row.error <= tolerance:
                    row.failure = f"wrong answer: relative error {row.error:.1e} > {tolerance:g}"
                    return None
            del answer
            row.peak_bytes = contender.memory(step, problem.device)
        except Exception as failed:  # whatever it is, it is this contender's result
            row.failure = failure(failed)
            return None
        finally:
            give_back(problem.device)
    return step


def first_call(contender: Contender, problem: Problem) -> tuple[Computation, Answer, float]:
    """The contender's step, its first answer, and the seconds of both."""
    start = time.perf_counter()
    step = contender.build(problem)
    answer = step()
    synchronize(problem.device)
    return step, answer, time.perf_counter() - start


def failure(error: Exception) -> str:
    """An exception in one line."""
    said = first_line(error)[:90]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _sizes(problem: Problem) -> dict[str, Any]:
    values = [leaf.data if is_packed(leaf) else leaf for leaf in problem.flat[0]]
    shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
    dtypes = {short_name(p.dtype) for p in problem.wanted.values()}
    return {
        "model": type(problem.model).__name__,
        "batch": problem.size,
        "parameters": sum(p.numel() for p in problem.wanted.values()),
        "dtype": "/".join(sorted(dtypes)),
        "shapes": " ".join("×".join(map(str, shape)) for shape in shapes),
        "training": problem.model.training,
        "backend": problem.backend,
    }
