"""Every rule has a row in `cases`, and no op has two rules."""

from __future__ import annotations

import pytest
import torch

import psg_fx.passes.pipeline  # noqa: F401  (registers every rule)
from cases import CASES
from psg_fx.rules import registered, rule

ROWS = {case.name.partition("/")[0] for case in CASES}


def row_of(target: object) -> set[str]:
    """The first words of row names that an op may have: `conv2d.padding` is met by the rows `conv2d/...`."""
    name = str(target).removeprefix("aten.").partition(".")[0]
    return {name, {"_native_batch_norm_legit_no_training": "batch_norm", "dot": "mv"}.get(name, name)}


@pytest.mark.parametrize("target", sorted(registered(), key=str), ids=str)
def test_rule_has_a_row(target: object) -> None:
    assert row_of(target) & ROWS, f"{target} has a rule ({registered()[target]}) and no row in tests/cases.py"


def test_row_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_second_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two rules for aten.linear.default: linear and other"):

        @rule(torch.ops.aten.linear.default, params={"weight": 1})
        def other(site):
            return {}
