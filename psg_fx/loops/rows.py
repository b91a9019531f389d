"""What has a row for every sample, collected in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psg_fx.loops.leaves import Key, nested


class InMemory:
    """Rows on the CPU, one batch after another.  expected: the number of samples, where it is known."""

    def __init__(self, expected: int | None) -> None:
        self._expected = expected
        self._blocks: dict[Key, torch.Tensor] = {}
        self.count = 0

    def add(self, rows: Mapping[Key, torch.Tensor], count: int) -> None:
        """Take in the rows of `count` samples."""
        end = self.count + count
        for key, value in rows.items():
            self._room(key, value, end)[self.count : end] = value
        self.count = end

    def _room(self, key: Key, like: torch.Tensor, end: int) -> torch.Tensor:
        """The block of a field, with place for `end` rows."""
        block = self._blocks.get(key)
        if block is None:
            size = max(end, self._expected or 0)
            block = self._blocks[key] = like.new_empty((size, *like.shape[1:]), device="cpu")
        elif len(block) < end:
            larger = block.new_empty((max(end, 2 * len(block)), *block.shape[1:]))
            larger[: self.count] = block[: self.count]
            block = self._blocks[key] = larger
        return block

    def fields(self) -> dict[str, Any]:
        """The fields of all samples."""
        for key, block in self._blocks.items():
            if len(block) != self.count:
                self._blocks[key] = block[: self.count].clone()
        return nested(self._blocks)
