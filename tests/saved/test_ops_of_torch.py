"""What stands for the ops of psg_fx in a file computes the same, of torch's own ops alone."""

from __future__ import annotations

import pytest
import torch

import psg_fx.passes.pipeline  # noqa: F401  (defines the ops)
from psg_fx.op_table import operator
from psg_fx.ops.define import of_torch_alone
from support.op_extra import recurrences

CALLS = {name: calls for name, calls in recurrences().items() if name != "psg_fx::attach"}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_same_results(name: str) -> None:
    op = operator(name)
    assert op is not None
    for call in CALLS[name]:
        found, expected = of_torch_alone(op)(*call), op(*call)
        torch.testing.assert_close(found, expected)
