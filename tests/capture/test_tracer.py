"""Graphs of plain functions of fake tensors."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from psg_fx.torch_private.tracer import trace_fakes


def test_where_a_gradient_ends_is_kept() -> None:
    """Also under `torch.no_grad()`, where passes trace what is differentiated later."""
    with FakeTensorMode():
        value = torch.empty(3)
    with torch.no_grad():
        traced = trace_fakes(lambda x: [x - x.detach()], [value])
    x = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(traced(x)[0].sum(), x)[0].tolist() == [1.0] * 3
