"""Image classifiers of torchvision and timm are exact against the loop, or refused for the reason that holds."""

from __future__ import annotations

import pytest

from external import vision_zoo as zoo
from external.program import Program, check, drop_in, truth

PROGRAMS = zoo.programs()
OUTSIDE = [p for p in PROGRAMS if "outside" in p.name]
INSIDE = [p for p in PROGRAMS if p not in OUTSIDE]


@pytest.mark.slow
@pytest.mark.parametrize("program", INSIDE, ids=str)
def test_loss_in_the_step(program: Program) -> None:
    check(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", OUTSIDE, ids=str)
def test_loss_outside(program: Program) -> None:
    check(program, drop_in)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_model_learns(program: Program) -> None:
    """A zero gradient agrees with anything: nearly all parameters of a program have another."""
    grads = truth(program.problem()).values()
    assert sum(bool(g.any()) for g in grads) > 0.9 * len(grads)
