"""Run random programs for a while, and print what fails as scripts: `make fuzz SECONDS=600 SEED=1`."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

from fuzz.check import Outcome, check
from fuzz.corpus import write
from fuzz.generate import program
from fuzz.program import Program
from fuzz.shrink import shrunk
from fuzz.source import script
from fuzz.trial import trial


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--count", type=int, default=10**9, help="number of programs")
    parser.add_argument("--length", type=int, default=6, help="instructions of the longest program")
    parser.add_argument(
        "--proof", action="store_true", help="only the proof that samples stay apart: many more programs"
    )
    parser.add_argument("--inductor", type=float, default=0.0, help="part of the programs that inductor compiles")
    parser.add_argument("--write", type=Path, help="folder for what fails: a script and a row for the corpus each")
    return parser.parse_args()


def main() -> None:
    """Generate, check, shrink, print; what was refused is counted by reason."""
    options = arguments()
    torch.set_num_threads(1)
    end, outcomes, reasons = time.monotonic() + options.seconds, Counter[str](), Counter[str]()
    failures: dict[str, str] = {}
    for number in range(options.first, options.first + options.count):
        if time.monotonic() > end:
            break
        made = program(options.seed, number, options.length)
        found = one(made, number, options)
        must = found.kind == "refused" and any(i.op.startswith("mixing") for i in (*made.body, made.loss))
        outcomes["refused, as it must be" if must else found.kind] += 1
        if found.kind in ("refused", "discarded") and not must:
            reasons[f"{found.kind}: {found.reason}"] += 1
        if found.failed and found.reason not in failures:
            failures[found.reason] = made.name
            report(made, found, number, options)
        if sum(outcomes.values()) % 50 == 0:
            print(sum(outcomes.values()), "programs:", dict(outcomes), flush=True)
    summary(outcomes, reasons, failures)
    raise SystemExit(1 if failures else 0)


def summary(outcomes: Counter[str], reasons: Counter[str], failures: dict[str, str]) -> None:
    """How many programs there were, and what was refused; a reason that comes often is worth an answer."""
    print(f"\n{sum(outcomes.values())} programs:", dict(outcomes))
    for reason, times in reasons.most_common(40):
        print(f"{times:6} {reason}")
    for reason, name in failures.items():
        print("FAILED", name, reason)


def one(made: Program, number: int, options: argparse.Namespace) -> Outcome:
    """The outcome of a program."""
    if options.proof:
        return trial(made)
    every = round(1 / options.inductor) if options.inductor else 0
    return check(made, "inductor" if every and number % every == 0 else "eager")


def report(made: Program, found: Outcome, number: int, options: argparse.Namespace) -> None:
    """The smallest program found that fails alike, as a script."""
    print(f"\n{made.name}: {found.kind}: {found.reason}\n{made.to_json()}\n{found.text}", flush=True)
    small = shrunk(made, lambda p: (o := one(p, number, options)).kind == found.kind and o.reason == found.reason)
    last = one(small, number, options)
    small = small.changed(note=f"{last.kind}: {last.reason}")
    print(
        f"\n==== {made.name}: {last.kind}: {last.text or last.reason}\n{script(small)}\n{small.to_json()}", flush=True
    )
    if options.write:
        write(options.write, small, f"{last.kind}: {last.reason}")
        (options.write / f"{made.name}.py").write_text(script(small))


if __name__ == "__main__":
    main()
