"""What has a row for every sample, collected in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.step.leaves import Key, nested


def row_changed(key: Key, rows: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], where: str) -> BadArgument:
    """The rows of a field are not of the dtype and shape that those of former batches have."""
    return BadArgument(
        f"a row of {key[1] or key[0]} is {rows.dtype} {list(rows.shape[1:])} now", where=where,
        why=f"it was {dtype} {list(shape)} before", fix="run all batches in the same way",
    )  # fmt: skip


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
            block = self._room(key, value, end)
            if block.shape[1:] != value.shape[1:] or block.dtype != value.dtype:
                raise row_changed(key, value, block.dtype, block.shape[1:], "over(loader, step)")
            block[self.count : end] = value
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
