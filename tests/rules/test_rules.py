"""Every rule has a row in `cases`, and no op has two rules."""

from __future__ import annotations

import pytest
import torch

from psg_fx.algebra.rule import registered, rule
from psg_fx.errors import InternalError
from support.answered import named, row_of
from support.cases import CASES

ROWS = {case.name.partition("/")[0] for case in CASES}


@pytest.mark.parametrize("target", sorted(registered(), key=str), ids=str)
def test_rule_has_a_row(target: object) -> None:
    assert row_of(target) & ROWS, f"{target} has a rule ({registered()[target]}) and no row in tests/support/cases/"


def test_every_rule_is_named_by_rows() -> None:
    """Each rule must have answered in `test_quantities.py::test_row` at least once."""
    wanted = set().union(*(named(case) | set(case.covers) for case in CASES if not case.refused))
    assert wanted == set(registered().values()) | {"pointwise"}


def test_row_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_second_rule_is_refused() -> None:
    with pytest.raises(InternalError, match=r"aten.linear.default has its gradient rule already: linear"):

        @rule(torch.ops.aten.linear.default, params={"weight": 1})
        def other(site):
            return {}
