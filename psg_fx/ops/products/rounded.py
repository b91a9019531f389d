"""`psg_fx::rounded`: float32 rounded to bfloat16, where a compiler must not undo it.

Inductor computes with what a value was before it was rounded, wherever one kernel does both: a norm would not be that
of what is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from psg_fx.ops.define import define_op


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


rounded = define_op("rounded(Tensor x) -> Tensor", _rounded, lambda x: x.new_empty(x.shape, dtype=torch.bfloat16))
"""x in bfloat16."""
