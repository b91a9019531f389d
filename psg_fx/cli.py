"""The command line: `psg-fx bench|explain|validate NAME` and `psg-fx calibrate`.

NAME is an example of `psg_fx.zoo`, or `MODULE:FACTORY` where the factory takes nothing and returns
`(model, loss_fn, inputs, targets)`, the same with a `batch_dim` as fifth, or a `psg_fx.zoo.Example`.

Exit codes: 0 fine, 1 refused or wrong, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from psg_fx import zoo
from psg_fx.contenders import MAX_NORM, QUANTITIES, field_of
from psg_fx.errors import BadArgument, PsgError

OK, FAILED, USAGE = 0, 1, 2

EPILOG = """\
NAME is an example of the zoo ({names}) or MODULE:FACTORY, where
FACTORY() returns (model, loss_fn, inputs, targets), optionally a batch_dim, or an Example.

  psg-fx validate mlp
  psg-fx explain gpt --quantities norms --set layers=1
  psg-fx bench simplecnn --batch 32 --quantities clipped_sum --contenders 'ordinary*,psg*'
  psg-fx bench my_package.models:tiny --json result.json
"""


class UsageError(Exception):
    """Something on the command line does not mean anything."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        return run(args)
    except UsageError as error:
        print(f"psg-fx: {error}", file=sys.stderr)
        return USAGE
    except PsgError as error:
        print(error, file=sys.stderr)
        return FAILED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    epilog = EPILOG.format(names=", ".join(zoo.names()))
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="psg-fx", description="Compiled per-sample gradients.", epilog=epilog, formatter_class=shape
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=shape)
        sub.set_defaults(run=run)
        sub.add_argument("name", metavar="NAME", help="an example of the zoo, or MODULE:FACTORY")
        sub.add_argument("--batch", type=positive, metavar="N", help="batch size (examples of the zoo only)")
        sub.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="a size of a zoo example, as in layers=1"
        )
        sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 (examples of the zoo only)")
        sub.add_argument("--threads", type=positive, metavar="N", help="threads for one operation on the CPU")
        sub.add_argument(
            "--quantities", type=listed, metavar="LIST", help=f"from {','.join(QUANTITIES)}, separated by commas"
        )
        sub.add_argument("--backend", help="as in torch.compile; eager runs the graph as it is")
        return sub

    bench = command("bench", run_bench, "Times psg_fx beside ordinary training steps, the loop and vmap.")
    bench.add_argument(
        "--contenders", type=listed, metavar="LIST", help="globs on contenders, separated by commas: 'ordinary*,psg*'"
    )
    bench.add_argument("--seconds", type=seconds, default=2.0, metavar="S", help="timing per contender (default 2)")
    bench.add_argument("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default 5)")
    bench.add_argument("--json", metavar="FILE", help="also write the result as JSON; - prints it instead of the table")
    explain = command("explain", run_explain, "Compiles one step and shows how each parameter's gradient is computed.")
    explain.add_argument("--measure", action="store_true", help="also time each part of the plan, compiled by itself")
    validate = command("validate", run_validate, "Holds every answer against a float64 loop over single samples.")
    validate.add_argument("--tolerance", type=seconds, help="largest relative error (default: by dtype)")
    text = "Measures this machine's rates for the planner, in some seconds, and keeps them for later steps."
    calibrate = commands.add_parser("calibrate", help=text, description=text)
    calibrate.set_defaults(run=run_calibrate)
    calibrate.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    calibrate.add_argument("--threads", type=positive, metavar="N", help="threads for one operation on the CPU")
    return parser


def positive(text: str) -> int:
    """An argparse type: an integer from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def seconds(text: str) -> float:
    """An argparse type: a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def listed(text: str) -> list[str]:
    """An argparse type: words separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("is empty")
    return words


def load(args: argparse.Namespace) -> zoo.Example:
    """The example that NAME means."""
    if ":" in args.name:
        if args.batch is not None or args.set or args.device != "cpu":
            raise UsageError("--batch, --set and --device are for examples of the zoo: a factory decides for itself")
        return from_factory(args.name)
    sizes = dict(_size(text) for text in args.set)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {args.device}: this torch sees no CUDA device")
    try:
        return zoo.example(args.name, args.batch, args.device, **sizes)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _size(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise UsageError(f"--set needs KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def from_factory(name: str) -> zoo.Example:
    """The example that `MODULE:FACTORY` returns; the current folder is searched for MODULE first."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import {name!r}: {error}") from error
    if not callable(factory):
        raise UsageError(f"{name!r} is a {type(factory).__name__}, not a function")
    try:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(f"{name!r} must be callable with no arguments: {error}") from error
    made = factory()
    if isinstance(made, zoo.Example):
        return made
    if not (isinstance(made, tuple) and len(made) in (4, 5)):
        raise UsageError(f"{name!r} must return (model, loss_fn, inputs, targets[, batch_dim]) or a zoo.Example")
    model, loss_fn, inputs, targets, *rest = made
    return zoo.Example(name, model, loss_fn, inputs, targets, batch_dim=rest[0] if rest else 0)


def checked(quantities: Sequence[str] | None, contenders: Sequence[str] | None = None) -> Sequence[str]:
    """The quantities asked for, all of them by default; names that do not exist are wrong usage."""
    chosen = QUANTITIES if quantities is None else quantities
    try:
        field_of(chosen, contenders)
    except BadArgument as error:
        raise UsageError(str(error)) from error
    return chosen


def compiled_step(args: argparse.Namespace, ex: zoo.Example, *, backend: str) -> Any:
    """`psg_fx.transform` of the example with the quantities asked for."""
    import psg_fx  # late, so that --help is quick

    asked: dict[str, Callable[[], psg_fx.Quantity]] = {
        "grads": psg_fx.Grads,
        "norms": psg_fx.Norms,
        "clipped_sum": lambda: psg_fx.ClippedSum(max_norm=MAX_NORM),
    }
    return psg_fx.transform(
        ex.model,
        ex.loss_fn,
        quantities=[asked[q]() for q in checked(args.quantities)],
        batch_dim=ex.batch_dim,
        backend=args.backend or backend,
    )


def batch_of(ex: zoo.Example) -> tuple[Any, ...]:
    """What a step is called with."""
    return (ex.inputs,) if ex.targets is None else (ex.inputs, ex.targets)


def run_explain(args: argparse.Namespace) -> int:
    """`psg-fx explain`: one step without compiling kernels, then its plan."""
    checked(args.quantities)
    ex = load(args)
    step = compiled_step(args, ex, backend="eager")
    step(*batch_of(ex))
    print(step.explain(measure=args.measure))
    return OK


def run_calibrate(args: argparse.Namespace) -> int:
    """`psg-fx calibrate`: prints the measured table and where it is kept."""
    from psg_fx import cost  # late, so that --help is quick
    from psg_fx.calibration import calibrate

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {args.device}: this torch sees no CUDA device")
    table = calibrate(args.device)
    print(cost.to_json(table) + f"kept in {cost.table_path(table.name)}")
    return OK


def run_validate(args: argparse.Namespace) -> int:
    """`psg-fx validate`: prints the report; exit code 1 when an answer is wrong."""
    checked(args.quantities)
    ex = load(args)
    step = compiled_step(args, ex, backend="inductor")
    limit = {} if args.tolerance is None else {"tolerance": args.tolerance}
    report = step.validate(*batch_of(ex), **limit)
    print(report)
    return OK if report.ok else FAILED


def run_bench(args: argparse.Namespace) -> int:
    """`psg-fx bench`: prints the table, or JSON; exit code 1 when psg_fx itself failed."""
    from psg_fx.benchmarking import benchmark  # late, so that --help is quick

    quantities = checked(args.quantities, args.contenders)
    ex = load(args)
    report = benchmark(
        ex.model,
        ex.loss_fn,
        ex.inputs,
        ex.targets,
        quantities=quantities,
        contenders=args.contenders,
        batch_dim=ex.batch_dim,
        backend=args.backend or "inductor",
        min_run_time=args.seconds,
        rounds=args.rounds,
    )
    print(report.to_json() if args.json == "-" else report)
    if args.json not in (None, "-"):
        Path(args.json).write_text(report.to_json() + "\n", encoding="utf-8")
    return FAILED if any(r.failure and r.contender.startswith("psg") for r in report.rows) else OK


if __name__ == "__main__":
    sys.exit(main())
