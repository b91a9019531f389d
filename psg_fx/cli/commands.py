"""What each command does: from the parsed options to an exit code and what is printed."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from psg_fx.api import transform
from psg_fx.benchmarking.benchmark import benchmark
from psg_fx.benchmarking.contenders import field_of
from psg_fx.benchmarking.problem import Problem
from psg_fx.cli.load import load, require_device
from psg_fx.cli.quantities import given, parsed
from psg_fx.cli.usage import UsageError
from psg_fx.errors import BadArgument, CaptureFailed, NotYetSupported
from psg_fx.explain import as_data
from psg_fx.explain import ops as table_of_ops
from psg_fx.explain.readable import readable
from psg_fx.measure.calibrate import calibrate as calibrated
from psg_fx.planner import rates
from psg_fx.planner.cost import Device
from psg_fx.step.with_loss import LossModule

OK, FAILED = 0, 1

Printed = tuple[int, str]
"""The exit code and the text for standard output."""


def explain(args: argparse.Namespace) -> Printed:
    """One step without compiling kernels, then its plan."""
    step = called(args)
    if args.json:
        if args.on:
            raise UsageError("--on prints a table: leave --json out")
        return OK, _json(as_data.explained(step.graphs, args.measure))
    return OK, step.explain(measure=args.measure, device=args.on, wide=args.wide)


def validate(args: argparse.Namespace) -> Printed:
    """The report; fails when an answer is wrong."""
    step, problem, values = made(args, backend="inductor")
    found = step.validate(*problem.arguments, tolerance=args.tolerance, **values)
    return OK if found.ok else FAILED, _json(as_data.validated(found)) if args.json else str(found)


def bench(args: argparse.Namespace) -> Printed:
    """The table of all contenders; fails when psg_fx itself did."""
    asked = parsed(args.quantity)
    try:
        field_of(asked, args.contenders, args.peers)
    except BadArgument as error:
        raise UsageError(f"{error.what}: {error.why}") from error
    _, problem, values = made(args, backend="inductor")
    trial = transform(
        problem.model, problem.loss_fn, quantities=list(asked.values()), batch_dim=problem.batch_dim, backend="eager"
    )
    with contextlib.suppress(NotYetSupported, CaptureFailed):  # of those a row tells, beside other contenders
        trial(*problem.arguments, **values)
    found = benchmark(
        problem.model,
        problem.loss_fn,
        problem.inputs,
        problem.targets,
        quantities=asked,
        contenders=args.contenders,
        peers=args.peers,
        batch_dim=problem.batch_dim,
        backend=args.backend or "inductor",
        min_run_time=args.seconds,
        rounds=args.rounds,
    )
    failed = any(row.failure and row.contender.startswith("psg") for row in found.rows)
    return FAILED if failed else OK, found.to_json() if args.json else str(found)


def report(args: argparse.Namespace) -> Printed:
    """The page of one step, as a file."""
    if not Path(args.out).absolute().parent.is_dir():
        raise UsageError(f"--out {args.out}: {os.strerror(errno.ENOENT)}")
    step = called(args)
    try:
        step.report(args.out, measure=args.measure)
    except OSError as error:
        raise UsageError(f"--out {args.out}: {error.strerror or error}") from error
    if args.json:
        return OK, _json({"path": str(args.out), "bytes": Path(args.out).stat().st_size})
    return OK, f"wrote {args.out}"


def graph(args: argparse.Namespace) -> Printed:
    """A stage's graph, or the list of stages."""
    graphs = called(args).graphs
    if args.stages:
        return OK, _json(as_data.stages(graphs)) if args.json else as_data.stages_table(graphs)
    gm = graphs[args.stage]
    return OK, _json(as_data.graph(args.stage, gm)) if args.json else readable(gm)


def ops(args: argparse.Namespace) -> Printed:
    """What is known of an op, or of all."""
    try:
        if args.json:
            return OK, _json(table_of_ops.as_data(args.name))
        return OK, table_of_ops.known_of(args.name) if args.name else table_of_ops.table()
    except BadArgument as error:
        raise UsageError(f"{error.what}: {error.fix}") from error


def calibrate(args: argparse.Namespace) -> Printed:
    """The measured table and where it is kept."""
    require_device(args.device)
    table = calibrated(args.device)
    path = rates.table_path(table.name)
    if args.json:
        return OK, _json({"path": str(path), "table": json.loads(rates.to_json(table))})
    return OK, f"{_rates(table)}\n\nkept in {path}, for steps that are built from now on"


def _rates(table: Device) -> str:
    """What was measured, beside the table that it takes the place of."""

    def cells(device: Device) -> dict[str, str]:
        named = {f"{kind} {str(dtype)[6:]}": rate for (kind, dtype), rate in device.flops.items()}
        flops = {name: f"{rate / 1e9:.3g} Gflop/s" for name, rate in named.items()}
        return flops | {"memory": f"{device.bandwidth / 1e9:.3g} GB/s", "op": f"{device.launch * 1e6:.3g} µs to begin"}

    shipped = rates.shipped(table.name)
    before = cells(shipped)
    rows = [(name, text, before.get(name, "-")) for name, text in cells(table).items()]
    return tabulate(rows, ("of", table.origin, shipped.origin), tablefmt="simple", disable_numparse=True)


def made(args: argparse.Namespace, *, backend: str) -> tuple[LossModule, Problem, dict[str, Any]]:
    """The step for what was asked, with its batch and the values that it reads at the call."""
    asked = list(parsed(args.quantity).values())
    ex = load(args)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    try:
        step = transform(
            ex.model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, backend=args.backend or backend
        )
    except BadArgument as error:
        raise UsageError(f"{error.what}: {error.why}") from error
    values, notes = given(asked, problem)
    say(notes)
    assert isinstance(step, LossModule)
    return step, problem, values


def called(args: argparse.Namespace) -> LossModule:
    """The step after one call, by default without compiling kernels."""
    step, problem, values = made(args, backend="eager")
    step(*problem.arguments, **values)
    return step


def say(notes: list[str]) -> None:
    """Notes for people, on standard error."""
    for note in notes:
        print(note, file=sys.stderr)


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)
