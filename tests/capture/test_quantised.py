"""Fake quantisation: torch's values, and its derivative of what is not cut off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

SCALE, ZERO = torch.tensor([0.1]), torch.tensor([2], dtype=torch.int32)
SCALES, ZEROS = torch.tensor([0.1, 0.2, 0.05, 0.3]), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 2, -8, 7),
    "tensors": lambda h: torch.fake_quantize_per_tensor_affine(h, SCALE, ZERO, -8, 7),
    "channels": lambda h: torch.fake_quantize_per_channel_affine(h, SCALES, ZEROS, 1, -8, 7),
}


class Quantised(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(4, 4, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for way in WAYS.values():
            h = h + way(h)
        return self.last(h)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_torch_has_it(dtype: torch.dtype) -> None:
    """In a loop over samples, by torch's own ops; some elements are cut off, some are not."""
    model, x, y = Quantised(dtype), 2 * torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    step = psg_fx.transform(model, F.mse_loss, backend="eager")
    for size in (6, 3):
        found = step(x[:size], y[:size])
        for i in range(size):
            loss = F.mse_loss(model(x[i : i + 1]), y[i : i + 1])
            wanted = torch.autograd.grad(loss, list(model.parameters()))
            torch.testing.assert_close(found.losses[i], loss)
            for one, other in zip(found.grads.values(), wanted, strict=True):
                torch.testing.assert_close(one[i], other)
    assert len(step.captures) == 1
