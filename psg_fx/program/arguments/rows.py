"""Inputs whose rows belong to samples: which input holds rows, and of which sample each row is.

`batch_dim` leaves may be `Rows`.  All inputs with equal ones lie along one axis of rows; each axis has a size of its
own, which is another at every call, and a tensor of ids: row r is of sample ids[r].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psg_fx.errors import BadArgument


@dataclass(frozen=True)
class Rows:
    """Dim `dim` of an input holds rows, and row r belongs to sample ids[r].

    ids: the name or position of the input that holds the numbers of the samples; or a function of the inputs that
    returns them; None: each row belongs to the sample of the rows that it points to (edges, say).
    Inputs with the same `ids` lie along one axis, so they have as many rows.
    """

    ids: str | int | Callable[..., Tensor] | None
    dim: int = 0
    offsets: bool = False

    @classmethod
    def from_offsets(cls, offsets: str | int, dim: int = 0) -> Rows:
        """Rows in order of their samples, those of sample s from offsets[s] on.

        offsets: the name or position of the input that holds where each sample begins: B numbers if its own `batch_dim`
        is 0 (`nn.EmbeddingBag`), or B + 1, the last one the number of all rows, if it is None (`cu_seqlens`).
        """
        return cls(offsets, dim, True)

    def __post_init__(self) -> None:
        ids: Any = self.ids
        known = ids is None or callable(ids) or isinstance(ids, (str, int))
        if not known or isinstance(self.ids, bool) or (self.offsets and (self.ids is None or callable(self.ids))):
            raise BadArgument(
                f"{self.ids!r} is no input", where="psg_fx.Rows(ids)", why="it says of which sample each row is",
                fix="pass the name or position of an input, or a function of the inputs that returns ids [R]",
            )  # fmt: skip
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise BadArgument(
                f"dim={self.dim!r} is no dim", where="psg_fx.Rows(ids, dim)", why="the rows lie in one dim of an input",
                fix="pass an int",
            )  # fmt: skip

    def __str__(self) -> str:
        return f"the offsets in {self.ids!r}" if self.offsets else str(self.ids)


@dataclass(frozen=True)
class RowAxis:
    """An axis of rows that inputs share.

    rows: as the user wrote it, its dim aside.  tensor: which of the call's tensors holds ids or offsets, None for a
    function.  closed: the offsets have an entry for the end of the last sample.  inputs: names of the inputs along it.
    """

    rows: Rows
    tensor: int | None
    closed: bool
    inputs: tuple[str, ...]

    @property
    def label(self) -> str:
        """How it is called in words."""
        return f"rows of {', '.join(self.inputs)}"

    def ids(self, tensors: Sequence[Tensor], size: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The sample of each row, `[R]`; None where that follows from what the rows point to.

        tensors: of the call.  size: the number of rows.  arguments, named: the inputs, for a function of them.
        """
        if self.rows.ids is None:
            return None
        given = tensors[self.tensor] if self.tensor is not None else self._called(arguments, named)
        found = given if given.dim() == 1 else given.reshape(-1)
        if not self.rows.offsets:
            return found.to(torch.int64)
        starts = (found[:-1] if self.closed else found).to(torch.int64).contiguous()
        return torch.searchsorted(starts, torch.arange(size, device=found.device), right=True) - 1

    def _called(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        assert callable(self.rows.ids)
        found: Any = self.rows.ids(*arguments, **named)
        if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex():
            raise BadArgument(
                f"the ids of rows are a {type(found).__name__}", where=f"psg_fx.Rows({self.rows.ids!r})",
                why="they are the numbers of the samples of the rows", fix="return a tensor of ints, [R]",
            )  # fmt: skip
        ids: Tensor = found
        return ids


@dataclass(frozen=True)
class Place:
    """Where the rows of an input lie: its axis (the number of it), and the dim."""

    axis: int
    dim: int


def find(which: str | int, names: Sequence[str], positions: Sequence[str]) -> int:
    """The number of the tensor that is called so.

    names: of the call's tensors, as `input_0` or `input_batch`.  positions: the names of the model's arguments.
    """
    label = f"input_{which}"
    if label not in names and isinstance(which, str) and which in positions:
        label = f"input_{positions.index(which)}"
    if label not in names and f"target_{which}" in names:
        label = f"target_{which}"
    if label in names:
        return list(names).index(label)
    raise BadArgument(
        f"there is no input {which!r}", where="psg_fx.Rows(ids)",
        why=f"tensors of this call are {', '.join(names)}", fix="pass the name or position of an input",
    )  # fmt: skip


def row_axes(
    rows: Sequence[Rows | None], names: Sequence[str], positions: Sequence[str], dims: Sequence[Any]
) -> tuple[tuple[RowAxis, ...], tuple[Place | None, ...]]:
    """The axes of rows, and where they lie in each tensor.

    rows: what `batch_dim` says of each tensor.  dims: the same where it is an ordinary dim.
    """
    keys: dict[Any, list[int]] = {}
    for index, entry in enumerate(rows):
        if entry is not None:
            which = entry.ids if callable(entry.ids) or entry.ids is None else find(entry.ids, names, positions)
            keys.setdefault((entry.offsets, callable(entry.ids), which), []).append(index)
    axes, places = [], [None] * len(rows)  # type: list[RowAxis], list[Place | None]
    for number, ((offsets, called, which), own) in enumerate(keys.items()):
        tensor = None if called or which is None else int(which)
        closed = offsets and tensor is not None and dims[tensor] is None
        first = rows[own[0]]
        assert first is not None
        axes.append(RowAxis(Rows(first.ids, 0, offsets), tensor, closed, tuple(names[k] for k in own)))
        for k in own:
            places[k] = Place(number, rows[k].dim)  # type: ignore[union-attr]
    return tuple(axes), tuple(places)


def counted(sizes: Mapping[str, int]) -> BadArgument:
    """The refusal of inputs along one axis that have different numbers of rows."""
    listed = ", ".join(f"{name}: {n}" for name, n in sizes.items())
    return BadArgument(
        "inputs along one axis have different numbers of rows", where=listed,
        why="inputs with the same psg_fx.Rows share their rows", fix="give what has other rows ids of its own: "
        "psg_fx.Rows(function of the inputs, dim), or psg_fx.Rows(None, dim) for rows that point to others",
    )  # fmt: skip


__all__ = ["Place", "RowAxis", "Rows", "counted", "find", "row_axes"]
