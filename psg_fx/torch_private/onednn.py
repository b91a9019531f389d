"""oneDNN's product of two matrices.

`torch.mm` of float32 on a CPU goes to the BLAS that torch was built with, and torch has no public way to oneDNN for it.
The op is the one that inductor calls for linear layers whose weights are frozen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_onednn() -> bool:
    """Whether torch was built with it, and it is not switched off (`torch.backends.mkldnn`)."""
    enabled: bool = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    return enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def may_round() -> bool:
    """Whether torch multiplies float32 in bfloat16, as a user may allow: `set_float32_matmul_precision("medium")`."""
    asked = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)
    return torch.get_float32_matmul_precision() == "medium" if asked is None else bool(asked == "bf16")


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a[m, k] b[k, n] + bias[n] of float32; `a` is copied unless its rows lie side by side."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.mT, bias, "none", [], "")
    return found
