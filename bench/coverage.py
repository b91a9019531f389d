"""Who answers which program, and rightly: psg_fx, vmap, Opacus and call_for_per_sample_grads on the suites of tests/.

    python bench/coverage.py [--suite opacus,traps] [--limit N] [--what NAME] [--add]

Every answer is held against a float64 loop over single samples. Writes `bench/results/coverage-<what>.json` and `.md`;
`--add` keeps the suites of an earlier run under that name. A suite runs in a process of its own, which is started
again behind a program that ends it. All suites take hours.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from _results import RESULTS, about, options
from tabulate import tabulate

from psg_fx.errors import PsgError

SUITES = {
    "opacus": "external.opacus_cases",
    "traps": "external.traps",
    "module_db": "external.module_db",
    "sequences": "external.sequences",
    "transformers": "external.transformers_zoo",
    "vision": "external.vision_zoo",
    "mixing": "external.mixing",
}
"""Modules with a function `programs()`; one that does not exist is left out."""

TITLES = {
    "opacus": "Opacus' own gradient tests",
    "traps": "single ops, parameters used in unusual ways",
    "module_db": "PyTorch's module tests",
    "sequences": "recurrent layers and attention",
    "transformers": "transformers",
    "vision": "vision models",
    "mixing": "samples mix in the model",
    "mixing losses": "samples mix in the loss",
}
MIXING = ("mixing", "mixing losses")
CONTENDERS = {
    "psg_fx, with loss": "with_loss",
    "psg_fx, drop-in": "psg_drop_in",
    "vmap(grad)": "vmap",
    "Opacus hooks": "opacus_hooks",
    "Opacus functorch": "opacus_functorch",
    "call_for_per_sample_grads": "expanded_weights",
}
OURS = [name for name in CONTENDERS if name.startswith("psg_fx")]
UNASKED = (
    "A library that does not see the loss is not asked, and not counted, where the loss of the batch is neither the "
    "sum nor the mean of those of its samples, or reads parameters itself."
)
TOLERANCE = 1e-6
"""Of the relative error: a library may cast to float32 inside. psg_fx is tested with 1e-8."""

REFUSED = ("mixes", "refused", "crashed", "slow")
WRONG = ("wrong", "missing")


@dataclass(frozen=True)
class Answer:
    """kind: "exact"; "mixes", "refused", "crashed" (an error that psg_fx does not mean), "slow"; "wrong", "missing";
    "unasked" (in no count).
    """

    suite: str
    family: str
    program: str
    contender: str
    kind: str
    error: float | None = None
    reason: str = ""


def main() -> int:
    args = arguments()
    if args.one:
        run_suite(args.one, args.skip, args.limit, args.seconds)
        return 0
    names = list(SUITES) if args.suite is None else args.suite.split(",")
    if unknown := [n for n in names if n not in SUITES]:
        sys.exit(f"unknown suite {unknown[0]!r}; there are: {', '.join(SUITES)}")
    what = args.what or (args.suite or "all").replace(",", "-")
    path = RESULTS / f"coverage-{what}.json"
    RESULTS.mkdir(exist_ok=True)
    kept = json.loads(path.read_text(encoding="utf-8"))["answers"] if args.add and path.exists() else []
    answers = [Answer(**a) for a in kept if a["suite"] not in names]
    for name in names:
        try:
            for answer in supervised(name, args):
                answers.append(answer)
        finally:
            save(path, answers, f"at most {args.limit} of each suite, spread over it" if args.limit else "all")
    print(f"\n{tables(answers, 'simple')}\n\nwrote {path} and .md")
    return 0


def arguments() -> argparse.Namespace:
    parser = options(__doc__, tag=False)
    parser.add_argument("--suite", help=f"separated by commas, from {', '.join(SUITES)}")
    parser.add_argument("--limit", type=int, help="at most so many programs of each suite, spread over it")
    parser.add_argument("--what", help="names the result files (default: the suites)")
    parser.add_argument("--add", action="store_true", help="keep the other suites in these files")
    parser.add_argument("--seconds", type=int, default=60, help="for one contender on one program (default 60)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the process that starts the others ------------------------------------------------------------------------------


def supervised(suite: str, args: argparse.Namespace) -> Iterator[Answer]:
    """The answers of all contenders on a suite; where a process ends or hangs, the next one begins behind it."""
    count = 0
    while True:
        begun: dict[str, str] | None = None
        for line in lines_of(suite, count, args):
            if "kind" in line:
                yield Answer(**line)
                count, begun = count + 1, None
                print(f"{line['kind']:8} {line['contender']:26} {line['program']}", flush=True)
            else:
                begun = line
        if begun is None:
            return
        yield Answer(**begun, kind="crashed", reason="the process ended, or did not end in time")
        count += 1


def lines_of(suite: str, skip: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a process says of a suite from answer `skip` on; it is stopped when it is silent for too long."""
    command = [sys.executable, __file__, "--one", suite, "--skip", str(skip), "--seconds", str(args.seconds)]
    command += ["--limit", str(args.limit)] if args.limit else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        rest = b""
        while select.select([process.stdout], [], [], 5 * args.seconds + 60)[0]:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            *whole, rest = (rest + part).split(b"\n")
            yield from (json.loads(line) for line in whole)
        process.kill()


# --- the process of one suite ----------------------------------------------------------------------------------------


def run_suite(suite: str, skip: int, limit: int | None, seconds: int) -> None:
    """Prints a line of JSON before and after each contender's turn; the first `skip` turns are left out."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print goes to stderr
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        every = importlib.import_module(SUITES[suite]).programs()
    except ModuleNotFoundError as error:
        print(f"{suite}: left out, {error}", file=sys.stderr)
        return
    programs = every if limit is None else every[:: max(1, math.ceil(len(every) / limit))]
    turns = [(p, c) for p in programs for c in CONTENDERS]
    for program, contender in turns[skip:]:
        family = MIXING[0] if program.mixes and program.family not in MIXING else program.family or suite
        who = {"suite": suite, "family": family, "program": program.name, "contender": contender}
        print(json.dumps(who), file=out)
        print(json.dumps(asdict(judged(who, program, seconds))), file=out)


@lru_cache(maxsize=1)
def truth(asked: Any) -> dict[str, torch.Tensor] | None:
    """The loop over single samples; a batch that no dim splits says itself what its samples are.  None if they mix."""
    from external import program
    from support import oracle

    if asked.mixes:
        return None
    problem = asked.problem()
    if not hasattr(problem, "samples"):
        return program.truth(problem)
    wanted = oracle.tracked(problem.model, None)
    rows = [
        torch.autograd.grad(problem.loss(program.call(problem.model, one)), list(wanted.values()))
        for one in problem.samples
    ]
    return {name: torch.stack(column) for name, column in zip(wanted, zip(*rows, strict=True), strict=True)}


def judged(who: dict[str, str], program: Any, seconds: int) -> Answer:
    """One contender's answer to a fresh copy of a program, held against the truth `name -> [B, *shape]`."""
    from external import peers
    from external.program import with_loss

    contenders: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {"with_loss": with_loss, **vars(peers)}
    try:
        with time_limit(seconds):
            got = contenders[CONTENDERS[who["contender"]]](program.problem())
    except TooSlow:
        return Answer(**who, kind="slow", reason=f"no answer in {seconds} s")
    except peers.CannotBeAsked as error:
        return Answer(**who, kind="unasked", reason=str(error))
    except PsgError as error:
        return Answer(**who, kind="mixes" if type(error).__name__ == "SamplesMixed" else "refused", reason=str(error))
    except Exception as error:
        kind = "crashed" if who["contender"] in OURS else "refused"
        return Answer(**who, kind=kind, reason=f"{type(error).__name__}: {error}"[:160])
    try:
        want = truth(program)
    except Exception as error:  # a batch that no dim splits, and that does not say what its samples are
        return Answer(**who, kind="unasked", reason=f"no single samples: {error}"[:160])
    return Answer(**who, **compared(got, want))


def compared(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """kind, error and reason of an answer. A gradient that is zero for all samples may be left out."""
    from support import oracle

    if want is None:
        return {"kind": "wrong", "reason": "answers although samples mix"}
    if absent := [n for n, w in want.items() if n not in got and w.any()]:
        return {"kind": "missing", "reason": f"no gradient for {', '.join(absent)}"}
    shown = [
        f"{n} {list(got[n].shape)}, not {list(w.shape)}"
        for n, w in want.items()
        if n in got and got[n].shape != w.shape
    ]
    if shown:
        return {"kind": "wrong", "reason": f"shape of {', '.join(shown)}"}
    filled = {n: got.get(n, torch.zeros_like(w)) for n, w in want.items()}
    error = oracle.worst_error(filled, want)
    return {"kind": "exact" if error < TOLERANCE else "wrong", "error": error}


class TooSlow(BaseException):
    """Not an `Exception`, so that no library catches it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises `TooSlow` in what runs inside."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- results ---------------------------------------------------------------------------------------------------------


def save(path: Path, answers: list[Answer], programs: str) -> None:
    """All answers as JSON, the tables as Markdown; programs: which of the suites were asked."""
    machine = today() | {"programs": programs}
    lines = ",\n".join(json.dumps(asdict(a)) for a in answers)  # one answer a line
    path.write_text(f'{{"environment": {json.dumps(machine)},\n"answers": [\n{lines}\n]}}\n', encoding="utf-8")
    head = ["# Who answers, and rightly", *(f"- {key}: {value}" for key, value in machine.items())]
    text = "\n".join([head[0], "", "Made by `bench/coverage.py`.", "", *head[1:], "", tables(answers, "github"), ""])
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def today() -> dict[str, Any]:
    """Versions, hardware, date."""
    found = about() | {"date": date.today().isoformat()}
    for package in ("opacus", "hypothesis", "transformers", "timm", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def tables(answers: list[Answer], style: str) -> str:
    """Counts, then every wrong answer, then why psg_fx refuses."""
    apart, mixed = ([a for a in answers if (a.family in MIXING) is mixes] for mixes in (False, True))
    parts = []
    if apart:
        parts += [f"exact / refused / wrong\n\n{UNASKED}", counts(apart, ("exact",), REFUSED, WRONG, style=style)]
    if mixed:
        parts += ["refused / answered without a word", counts(mixed, REFUSED, WRONG, style=style)]
    wrong = [(a.contender, a.program, shown_error(a)) for a in apart if a.kind in WRONG]
    if wrong:
        parts += ["Wrong answers", table(wrong, ("who", "program", "relative error"), style)]
    if refused := reasons([a for a in apart if a.contender in OURS and a.kind in REFUSED]):
        parts += ["Refusals of psg_fx", table(refused, ("who", "reason", "programs"), style)]
    return "\n\n".join(parts)


def counts(answers: list[Answer], *groups: tuple[str, ...], style: str) -> str:
    """Rows are families, columns contenders; each cell has the number of answers in each group of kinds."""
    body = []
    for family in dict.fromkeys(a.family for a in answers):
        cells = []
        for contender in CONTENDERS:
            found = Counter(a.kind for a in answers if (a.family, a.contender) == (family, contender))
            cells.append(" / ".join(str(sum(found[kind] for kind in group)) for group in groups))
        programs = len({a.program for a in answers if a.family == family})
        body.append([TITLES.get(family, family), programs, *cells])
    return table(body, ("suite", "programs", *CONTENDERS), style)


def shown_error(answer: Answer) -> str:
    return answer.reason if answer.error is None else f"{answer.error:.1e}"


def reasons(answers: list[Answer]) -> list[tuple[str, str, str]]:
    """Programs by contender and the first line of the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for a in answers:
        lines = a.reason.splitlines() or [a.kind]
        why = next((line.removeprefix("  why").strip() for line in lines if line.startswith("  why")), "")
        found.setdefault((a.contender, f"{lines[0]} ({why})" if why else lines[0]), []).append(a.program)
    return [(who, what, f"{len(names)}: {', '.join(names)}") for (who, what), names in found.items()]


def table(body: Sequence[Sequence[Any]], headers: Sequence[str], style: str) -> str:
    safe = [[str(cell).replace("|", "\\|") for cell in row] for row in body]
    return tabulate(safe, headers=headers, tablefmt=style, disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
