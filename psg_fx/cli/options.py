"""The options of every command."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable

import torch

from psg_fx import zoo
from psg_fx.cli import commands
from psg_fx.graph.stages import Stage
from psg_fx.planner import rates
from psg_fx.quantities.names import KINDS
from psg_fx.version import __version__

Command = Callable[[argparse.Namespace], tuple[int, str]]

EPILOG = """\
NAME is an example of the zoo ({names})
or MODULE:FACTORY, where FACTORY() returns (model, loss_fn, inputs, targets), optionally a batch_dim as fifth,
or a psg_fx.zoo.Example; with --batch N: FACTORY(batch=N). MODULE is looked for in the current folder first.

QUANTITY is one of {quantities},
with keyword arguments as in Python where it has any; the option may be repeated.

{examples}
Exit codes: 0 fine, 1 refused or wrong, 2 wrong usage."""

EXAMPLES = {
    "explain": [
        "explain mlp",
        "explain gpt --quantity norms --set layers=1",
        "explain my_models:tiny --quantity 'clipped_sum(max_norm=0.5, per=\"parameter\")' --json",
    ],
    "validate": ["validate simplecnn --batch 4", "validate my_models:tiny --quantity gram --quantity norms"],
    "bench": [
        "bench simplecnn --batch 32 --quantity clipped_sum --contenders 'ordinary*,psg*'",
        "bench mlp --peers --quantity norms",
        "bench my_models:tiny --json > result.json",
    ],
    "report": ["report gpt --set layers=1 --out gpt.html"],
    "graph": ["graph mlp", "graph mlp --stages", "graph my_models:tiny --stage joint --quantity 'projection(rank=4)'"],
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="psg-fx",
        description="Compiled per-sample gradients for PyTorch: what a step does, whether it is right, what it costs.",
        epilog=_epilog([lines[0] for lines in EXAMPLES.values()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"psg-fx {__version__}, torch {torch.__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(metavar="COMMAND")
    _explain(_command(subparsers, "explain", commands.explain, "shows how each parameter's gradient is computed"))
    _validate(_command(subparsers, "validate", commands.validate, "holds every answer against a float64 loop"))
    _bench(_command(subparsers, "bench", commands.bench, "times psg_fx beside ordinary steps and other libraries"))
    _report(_command(subparsers, "report", commands.report, "writes a page that shows a step from inside"))
    _graph(_command(subparsers, "graph", commands.graph, "prints the graph of one stage of the compilation"))
    text = "prints what is known of an op, and where it is written"
    ops = subparsers.add_parser("ops", help=text, description=f"{text.capitalize()}.")
    ops.add_argument("name", nargs="?", metavar="OP", help="linear, aten.linear.default, mylib::myop; without: all ops")
    ops.add_argument("--json", action="store_true", help="print JSON")
    ops.set_defaults(run=commands.ops, threads=None)
    text = "measures this machine's rates for the planner, in some seconds, and keeps them for later steps"
    calibrate = subparsers.add_parser("calibrate", help=text, description=f"{text.capitalize()}.")
    calibrate.set_defaults(run=commands.calibrate)
    calibrate.add_argument("--json", action="store_true", help="print JSON; all else goes to standard error")
    _machine(calibrate)
    return parser


def _epilog(examples: list[str]) -> str:
    lines = "".join(f"  psg-fx {line}\n" for line in examples)
    return EPILOG.format(names=", ".join(zoo.names()), quantities=", ".join(KINDS), examples=f"Examples:\n{lines}")


def _command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Command,
    text: str,
) -> argparse.ArgumentParser:
    """A command on a model, with the options that all of these have."""
    sub = subparsers.add_parser(
        name,
        help=text,
        description=f"{text.capitalize()}.",
        epilog=_epilog(EXAMPLES[name]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(run=run)
    sub.add_argument("name", metavar="NAME", help="an example of the zoo, or MODULE:FACTORY")
    sub.add_argument(
        "--quantity", action="append", metavar="QUANTITY", help="default: grads, norms and clipped_sum(max_norm=1.0)"
    )
    sub.add_argument("--backend", help="as in torch.compile; eager runs the graph as it is")
    sub.add_argument("--batch", type=positive, metavar="N", help="batch size; of a factory: its argument batch")
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a size of a zoo example, as in layers=1"
    )
    _machine(sub)
    sub.add_argument("--json", action="store_true", help="print JSON; all else goes to standard error")
    return sub


def _machine(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    sub.add_argument("--threads", type=thread_count, metavar="N", help="threads for one operation on the CPU")


def _explain(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--measure", action="store_true", help="also time each part of the plan, compiled by itself")
    sub.add_argument("--wide", action="store_true", help="a row for each parameter, with formulas, flops and bytes")
    sub.add_argument("--on", metavar="NAME", choices=tuple(rates.NAMED), help="the plan for such a device: %(choices)s")


def _validate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--tolerance", type=above_zero, metavar="X", help="largest relative error (default: by dtype)")


def _bench(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--contenders", type=listed, metavar="LIST", help="globs on contenders, separated by commas: 'ordinary*,psg*'"
    )
    sub.add_argument("--peers", action="store_true", help="also other libraries: pip install '.[bench]' in a checkout")
    sub.add_argument("--seconds", type=above_zero, default=2.0, metavar="S", help="timing per contender (default 2)")
    sub.add_argument("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default 5)")


def _report(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", default="report.html", metavar="FILE", help="where to (default: report.html)")
    sub.add_argument("--measure", action="store_true", help="also time each part of the plan, compiled by itself")


def _graph(sub: argparse.ArgumentParser) -> None:
    stages = [stage.value for stage in Stage]
    sub.add_argument("--stage", choices=stages, default=stages[-1], help=f"default: {stages[-1]}")
    sub.add_argument("--stages", action="store_true", help="list the stages with their numbers of nodes instead")


def positive(text: str) -> int:
    """An argparse type: an integer from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text}")
    return value


def thread_count(text: str) -> int:
    """An argparse type: of threads, which torch makes, however many they are."""
    value, most = positive(text), 64 * (os.cpu_count() or 1)
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most} on this machine, got {text}")
    return value


def above_zero(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def listed(text: str) -> list[str]:
    """An argparse type: words separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("is empty")
    return words
