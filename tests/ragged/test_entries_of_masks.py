"""What a mask of pairs is for two rows of different samples, against the values themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from psg_fx.passes.independence.ragged.parts import between, number

OPS = ("__and__", "bitwise_and", "logical_and", "mul", "__or__", "bitwise_or", "logical_or")
GIVEN = (False, True, 0, 1, 2, 3, -1)
"""Numbers in the code; an entry of a mask that is known is one of the first two."""


def computed(name: str, a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = torch.mul(a, b) if name == "mul" else getattr(a, name)(b)
    return found


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_what_is_said_of_two_operands_is_so(name: str, dtype: torch.dtype) -> None:
    """None in the place of an operand stands for anything: what is said holds for each of its values."""
    values = (0, 1) if dtype == torch.bool else (0, 1, 2, 3, 255)
    said = 0
    for known in itertools.product((False, True, None), repeat=2):
        a, b = (torch.tensor(values if k is None else [int(k)], dtype=dtype) for k in known)
        found = computed(name, a[:, None], b[None, :])
        entry = between(name, found.dtype, known)
        said += entry is not None
        assert entry is None or bool((found == int(entry)).all()), known
        assert entry is not None or None in known
    assert said >= 4


@pytest.mark.parametrize("given", GIVEN)
def test_numbers_are_what_they_are(given: int) -> None:
    assert number(given) is (bool(given) if given in (0, 1) else None)


def test_other_values_are_not_known() -> None:
    assert number(1.0) is number(None) is number("1") is None
    assert between("logical_not", torch.bool, [None]) is None
    assert between("bitwise_not", torch.int64, [False]) is None
    assert between("mul", torch.float64, [False, True]) is None
