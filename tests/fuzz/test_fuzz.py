"""A minute of the fuzz, the programs that failed once, and faults that it must find.

The programs are the first ones of a fixed seed, the same at every run; `make fuzz` tries others.
"""

from __future__ import annotations

import pytest
import torch

from fuzz.check import FAILURES, Outcome, check
from fuzz.corpus import rows
from fuzz.faults import FAULTS
from fuzz.generate import mixing_programs, program
from fuzz.grammar import FAMILIES, OPS
from fuzz.program import Program, elaborate
from fuzz.shrink import candidates, shrunk, writable
from fuzz.source import script
from fuzz.trial import trial
from support.selection import one_in

SEED, PROGRAMS, PROOFS, CHUNK = 4, 18, 80, 5


def explained(made: Program, found: Outcome) -> str:
    return f"{found.kind}: {found.text or found.reason}\n{script(made)}\n{made.to_json()}"


@pytest.mark.parametrize("number", one_in(9, range(PROGRAMS)))
def test_program(number: int) -> None:
    """Exact or refused, for every quantity of the program, at three batch sizes."""
    made = program(SEED, number)
    found = check(made)
    assert not found.failed, explained(made, found)


@pytest.mark.parametrize("first", one_in(16, range(0, PROOFS, CHUNK)))
def test_proof(first: int) -> None:
    """Block i of every value is that of sample i; and half of the programs at least are answered and not refused."""
    kinds = []
    for number in range(first, first + CHUNK):
        found = trial(made := program(SEED, number, length=9))
        assert not found.failed, explained(made, found)
        kinds.append(found.kind)
    assert kinds.count("ok") >= CHUNK // 2, kinds


@pytest.mark.slow
def test_mixing() -> None:
    """Each way to mix is refused."""
    for made in mixing_programs(SEED):
        found = trial(made)
        if found.kind == "discarded":  # it fixes the batch size, which only the whole capture knows what to do with
            found = check(made)
        assert found.kind == "refused", explained(made, found)


@pytest.mark.parametrize("name", rows())
def test_corpus(name: str, request: pytest.FixtureRequest) -> None:
    row = rows()[name]
    if row.open:
        request.applymarker(pytest.mark.xfail(reason=row.open, strict=True))
    if name == "matrix-exp-of-a-parameter" and torch.__version__ < "2.12":
        pytest.skip("this version has no derivative of an op in it")
    found = check(row.program)
    assert found.kind == row.expect, explained(row.program, found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    """By one of the programs that run above; those that cannot show it are left out."""
    fault = FAULTS[name]
    if fault.proof:
        made = [*mixing_programs(SEED), *(program(SEED, number, length=9) for number in range(PROOFS))]
    else:
        made = [program(SEED, number) for number in range(PROGRAMS)]
    run = trial if fault.proof else check
    with fault.inject():
        assert any(run(p).failed for p in made if fault.shows(p)), f"no program shows that {name}"


def test_every_instruction_occurs() -> None:
    """In a few hundred programs; and each is the same when it is read again."""
    seen = set()
    for number in range(400):
        made = program(SEED, number)
        seen |= {i.op for i in (*made.body, made.loss)}
        again = Program.from_json(made.to_json())
        assert again == made
        assert elaborate(again, OPS).lines == elaborate(made, OPS).lines
    assert seen == {name for family in FAMILIES.values() for name in family}


def test_a_failure_is_shrunk() -> None:
    """What a program fails by stays, the rest goes."""
    many = (program(SEED, number, length=9) for number in range(1000))
    made = next(p for p in many if any(i.op == "layer.norm" for i in p.body[2:-2]))

    def fails(p: Program) -> bool:
        return any(i.op == "layer.norm" for i in p.body)

    small = shrunk(made, fails, budget=200)
    assert [i.op for i in small.body] == ["layer.norm"]
    assert small.quantities == "grads"
    assert len(small.batches) == 1
    assert writable(small)
    assert not any(fails(p) for p in candidates(small) if writable(p) and p != small)  # nothing smaller does


def test_the_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints how far each gradient is from the loop."""
    many = (program(SEED, number, length=2) for number in range(100))
    made = next(p for p in many if check(p).kind == "ok")
    exec(compile(script(made.changed(batches=(2,))), "script", "exec"), {"__name__": "script"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("losses tensor(0.") or "e-" in printed[0]
    assert len(printed) > 1


def test_kinds_of_failure_are_failures() -> None:
    assert all(Outcome(kind).failed for kind in FAILURES)
    assert not any(Outcome(kind).failed for kind in ("ok", "refused", "discarded"))
