"""What tests on a CUDA device share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # torch and inductor about themselves, differently in each version and on each device
    pytest.mark.filterwarnings("default"),
]
"""The marks of a module of such tests."""


def moved(values: Any, device: str = "cuda") -> Any:
    """All tensors of a tree on the device."""
    return tree_map_only(torch.Tensor, lambda t: t.to(device), values)
