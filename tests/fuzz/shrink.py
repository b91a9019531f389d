"""Smaller programs that fail alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from fuzz.grammar import OPS
from fuzz.program import Instruction, Misfit, Program, elaborate


def shrunk(program: Program, fails: Callable[[Program], bool], budget: int = 60) -> Program:
    """Drop instructions, simplify choices, sizes and calls, as long as the program fails; at most `budget` are run."""
    tried = [program]
    while True:
        for smaller in candidates(program):
            if not writable(smaller) or smaller in tried:  # in that order: all its choices are made there
                continue
            if len(tried) > budget:
                return program
            tried.append(smaller)
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def writable(program: Program) -> bool:
    """Whether it is still a program."""
    try:
        elaborate(program, OPS)
    except Misfit:
        return False
    return True


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the smallest first."""
    for k in reversed(range(len(program.body))):
        yield dropped(program, k)
    if program.quantities != "grads":
        yield program.changed(quantities="grads")
    if program.plan:
        yield program.changed(plan=0)
    if len(program.batches) > 1:
        yield from (program.changed(batches=b) for b in (program.batches[:1], program.batches[:2]))
    if program.loss.op != "loss.by_hand":
        yield program.changed(loss=Instruction(program.loss.id, "loss.by_hand", program.loss.source))
    if program.batch_dim:
        yield program.changed(batch_dim=0)
    for k in reversed(range(len(program.sizes))):
        if len(program.sizes) > 1:
            yield program.changed(sizes=program.sizes[:k] + program.sizes[k + 1 :], batch_dim=0)
        if program.sizes[k] > 2:
            yield program.changed(sizes=(*program.sizes[:k], 2, *program.sizes[k + 1 :]))
    for k, instruction in enumerate((*program.body, program.loss)):
        for name in instruction.choices:
            yield simpler(program, k, name)


def dropped(program: Program, k: int) -> Program:
    """Without an instruction; who read it reads what it read."""
    gone = program.body[k]

    def other(i: Instruction) -> Instruction:
        choices = {n: gone.source if n[0] == "@" and c == gone.id else c for n, c in i.choices.items()}
        return Instruction(i.id, i.op, gone.source if i.source == gone.id else i.source, choices)

    body = tuple(other(i) for i in program.body if i is not gone)
    return program.changed(body=body, loss=other(program.loss))


def simpler(program: Program, k: int, name: str) -> Program:
    """With the first option in place of a choice."""
    body, loss = list(copy.deepcopy(program.body)), copy.deepcopy(program.loss)
    del [*body, loss][k].choices[name]
    return program.changed(body=tuple(body), loss=loss)
