"""What a step of the whole model gives, by the loop over single samples: a second step would have to be captured."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import psg_fx
from psg_fx.reference.definitions import definitions_for, of_groups
from support import oracle


class ByLoop:
    """Called like a step, it gives every field of the quantities, in float64."""

    def __init__(self, model: nn.Module, loss_fn: Any, quantities: Any, params: Sequence[str] | None = None) -> None:
        self.model, self.loss_fn, self.params = model, loss_fn, params
        self.quantities = [quantities] if isinstance(quantities, psg_fx.Quantity) else list(quantities)

    def __call__(self, inputs: Any, targets: Any = None, **given: Any) -> SimpleNamespace:
        losses, grads = oracle.loop_grads(self.model, self.loss_fn, inputs, targets, params=self.params)
        checks, unknown = definitions_for(self.quantities, given)
        assert not unknown
        of_samples = grads
        if "groups" in given:
            grads = dict(of_groups(grads, given["groups"], given.get("num_groups")))
        fields = {c.field: c.expected(losses, of_samples if c.of_samples else grads) for c in checks}
        return SimpleNamespace(**fields)


def close(found: Any, expected: Any, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """A tensor or a dict of them, of any dtype, beside the float64 of the loop."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, check_dtype=False)
