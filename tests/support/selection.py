"""Which cases of a long list the ordinary run takes; the others are marked `rest`, and `make test-all` runs them.

A list of mechanisms runs whole, and so does each row of `support/cases` in its own test.  What crosses such a list with
something else (a second size, another backend, one more property) runs one case in so many: `one_in`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

SLOW = frozenset((Path(__file__).parents[1] / "slow.txt").read_text(encoding="utf-8").splitlines())
"""Cases that take a second or more each on two cores and whose function has quicker ones, and functions that take more
than two: `pytest --durations=0` says which.  They are marked `slow`.
"""


def selected(cases: Iterable[Any], chosen: Container[str]) -> list[Any]:
    """The cases as parameters of a test, those whose name is not `chosen` marked `rest`: names, classes, functions, or
    programs with a name.
    """
    return [pytest.param(c, id=name_of(c), marks=[] if name_of(c) in chosen else pytest.mark.rest) for c in cases]


def leaves_out_the_rest(config: pytest.Config) -> bool:
    """Whether this run has no test that is marked `rest`."""
    return "not rest" in config.option.markexpr


def is_rest(parameters: Any) -> bool:
    return any(mark.name == "rest" for mark in getattr(parameters, "marks", ()))


def name_of(case: Any) -> str:
    """A program's own name, a class's or a function's, or what the case prints as."""
    found: Any = getattr(case, "name", None) or getattr(case, "__name__", None)
    return found if isinstance(found, str) else str(case)


def one_in(share: int, cases: Iterable[Any], always: Container[str] = (), kinds: bool = True) -> list[Any]:
    """The cases as parameters of a test: of each kind the first and every `share`-th after it, and `always`.

    The kind of a case is what stands before "/" in its name ("conv2d" of "conv2d/groups"); names without one are all of
    one kind, as all are if there are to be no `kinds`.  A case of several arguments is a tuple.
    """
    counts: Counter[str] = Counter()
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name = "-".join(map(name_of, values))
        kind = name.rpartition("/")[0] if kinds else ""
        taken = counts[kind] % share == 0 or name in always
        counts[kind] += 1
        found.append(pytest.param(*values, id=name, marks=[] if taken else pytest.mark.rest))
    return found


def on_two_backends(cases: Iterable[Any], share: int = 4) -> list[Any]:
    """(case, backend) as parameters of a test: each case on "eager", and the first and every `share`-th after it
    on "inductor"; the others there are marked `slow`.
    """
    found = []
    for k, case in enumerate(cases):
        marks = [] if k % share == 0 else pytest.mark.slow
        found.append(pytest.param(case, "eager", id=f"{name_of(case)}-eager"))
        found.append(pytest.param(case, "inductor", id=f"{name_of(case)}-inductor", marks=marks))
    return found


def at_once(groups: Iterable[Iterable[str]], names: Iterable[str]) -> list[Any]:
    """Tuples of names as parameters of a test that captures all of a tuple in one program: each of the groups, and each
    name alone, marked `rest`.
    """
    together = [pytest.param(tuple(group), id=f"together-{k}") for k, group in enumerate(groups)]
    return together + [pytest.param((name,), id=name, marks=pytest.mark.rest) for name in names]
