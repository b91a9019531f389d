"""Draws of torch.distributions, written so that a graph has their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Gamma

aten = torch.ops.aten


def gamma(self: Gamma, sample_shape: torch.Size | tuple[int, ...] = (), generator: Any = None) -> Tensor:
    """`Gamma.rsample`, of which StudentT and Chi2 are made: torch lifts what has underflowed to the least positive
    number by a write that autograd does not see, so the gradient is that of the draw.
    """
    shape = self._extended_shape(torch.Size(sample_shape))
    drawn = aten._standard_gamma.default(self.concentration.expand(shape), generator) / self.rate.expand(shape)
    least = torch.finfo(drawn.dtype).tiny
    return torch.where(drawn.detach() < least, drawn - drawn.detach() + least, drawn)
