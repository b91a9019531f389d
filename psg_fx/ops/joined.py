"""Tensors side by side: torch's own kernels, as ops that a compiler does not write out (`passes/compile/joins.py`)."""

from __future__ import annotations

import torch

from psg_fx.ops.define import define_op

joined = define_op("joined(Tensor[] parts, int dim) -> Tensor", torch.cat, torch.cat)
"""torch.cat."""

stacked = define_op("stacked(Tensor[] parts, int dim) -> Tensor", torch.stack, torch.stack)
"""torch.stack."""
