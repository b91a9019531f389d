"""What code asks of a tensor to decide by: asked again at every call, so that a counter may count on while the answer
(`self.step < 100`) stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from psg_fx.digests import fingerprint
from psg_fx.torch_private.modes import no_modes, without_functions

MOST = 16
"""Questions about one tensor; of more, its value is compared."""
_FEW = 1_000
"""Numbers that are written out."""


@dataclass(frozen=True)
class Question:
    """ask: makes the answer of a tensor with the values of now.  answer: what it was."""

    ask: Callable[[torch.Tensor], Any]
    answer: Any

    def asked_of(self, tensor: torch.Tensor) -> Question:
        """The question with the answer of now."""
        now = self._now(tensor)
        return replace(self, answer=now.clone() if isinstance(now, torch.Tensor) else now)

    def is_answered_alike(self, tensor: torch.Tensor) -> bool:
        """Whether the answer is still the same, bit for bit: 1 / -0.0 is not 1 / 0.0, and NaN equals itself."""
        now = self._now(tensor)
        if isinstance(now, torch.Tensor) and isinstance(self.answer, torch.Tensor):
            same = now.shape == self.answer.shape and now.dtype == self.answer.dtype
            return same and torch.equal(_bits(now), _bits(self.answer))
        return type(now) is type(self.answer) and repr(now) == repr(self.answer)

    def _now(self, tensor: torch.Tensor) -> Any:
        try:
            with no_modes(), without_functions(), torch.no_grad():
                return self.ask(tensor)
        except Exception as error:  # a tensor of another shape, in its place
            return type(error)

    def __str__(self) -> str:
        found = self.answer
        if isinstance(found, torch.Tensor) and found.numel() > _FEW:
            return fingerprint(found)
        return repr(found.flatten().tolist() if isinstance(found, torch.Tensor) else found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def entries(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a sparse matrix: places `[2, entries]` and values `[entries]`; those of one place add up."""
    matrix = matrix.detach().to_sparse_coo()
    return matrix._indices(), matrix._values()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """All that it holds, of a sparse one in a matrix of places and values."""
    if tensor.layout is torch.strided:
        return tensor.detach()
    places, values = entries(tensor)
    dtype = torch.promote_types(values.dtype, torch.float64)
    return torch.cat([places.to(dtype), values.to(dtype)[None]])


FOR_ITS_VALUE = Question(_numbers, None)
"""What Python has looked at in full."""
