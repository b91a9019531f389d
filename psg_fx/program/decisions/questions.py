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
    """ask: makes the answer of a tensor with the values of now, which may be tensors.  answer: what it was."""

    ask: Callable[[torch.Tensor], Any]
    answer: Any

    def asked_of(self, tensor: torch.Tensor) -> Question:
        """The question with the answer of now."""
        now = self._now(tensor)
        return replace(self, answer=tuple(t.clone() for t in now) if _is_tensors(now) else now)

    def is_answered_alike(self, tensor: torch.Tensor) -> bool:
        """Whether the answer is still the same, bit for bit: 1 / -0.0 is not 1 / 0.0, and NaN equals itself."""
        now = self._now(tensor)
        if _is_tensors(now) and _is_tensors(self.answer):
            return len(now) == len(self.answer) and all(map(_are_alike, now, self.answer))
        return type(now) is type(self.answer) and repr(now) == repr(self.answer)

    def _now(self, tensor: torch.Tensor) -> Any:
        try:
            with no_modes(), without_functions(), torch.no_grad():
                found = self.ask(tensor)
        except Exception as error:  # a tensor of another shape, in its place
            return type(error)
        return (found,) if isinstance(found, torch.Tensor) else found

    def __str__(self) -> str:
        return ", ".join(map(_written, self.answer)) if _is_tensors(self.answer) else repr(self.answer)


def _is_tensors(answer: Any) -> bool:
    return isinstance(answer, tuple) and all(isinstance(t, torch.Tensor) for t in answer)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(_bits(one), _bits(other))


def _written(answer: torch.Tensor) -> str:
    return fingerprint(answer) if answer.numel() > _FEW else repr(answer.flatten().tolist())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def entries(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a sparse matrix: places `[2, entries]` and values `[entries]`; those of one place add up."""
    matrix = matrix.detach().to_sparse_coo()
    return matrix._indices(), matrix._values()


def _numbers(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All that it holds."""
    return (tensor.detach(),) if tensor.layout is torch.strided else entries(tensor)


FOR_ITS_VALUE = Question(_numbers, None)
"""What Python has looked at in full."""
