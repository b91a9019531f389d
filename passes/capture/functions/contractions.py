"""In which order products of several tensors are contracted, which changes rounding alone.

opt_einsum goes by all sizes, the batch size among them.  torch's `einsum` goes from left to right here; where a library
asks opt_einsum itself (tensorly does), it is told the sizes of the capture.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from psg_fx.tensors import hint
from psg_fx.torch_private.patching import wrapped_here


@contextlib.contextmanager
def orders_of_contractions() -> Iterator[None]:
    """While open, no order is asked for by a size that has no number yet."""

    def in_numbers(shape_of: Any) -> Any:
        return lambda operand: tuple(map(hint, shape_of(operand)))

    with (
        wrapped_here(torch.backends.opt_einsum.m, "is_available", lambda original: lambda: False),  # type: ignore[attr-defined]
        wrapped_here(sys.modules.get("opt_einsum.parser"), "get_shape", in_numbers),
    ):
        yield
