"""One call of a step: its arguments as flat tensors, where the samples lie in each, and how to put them together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.program.arguments.rows import Place, RowAxis, counted
from psg_fx.program.values import Once
from psg_fx.tensors import is_of_ints, short_name

SAMPLES = "samples"
"""The name of a further input `[B]` of calls with rows, which says how many samples there are and nothing else."""


@dataclass(frozen=True)
class Call:
    """One call's arguments, taken apart.

    tensors: every tensor leaf, inputs first.  names: a readable name for each.  dims: its sample dim or None.
    inputs: how many of them belong to the model's inputs.  spec and constants rebuild the pytrees.
    structure: spec, as a part of a key.
    axes: of rows; then the last tensor is `SAMPLES`.  places: where rows lie in each tensor.  counts: which of the
    constants are the number of samples.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    dims: tuple[int | None, ...]
    inputs: int
    spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    structure: Once
    axes: tuple[RowAxis, ...] = ()
    places: tuple[Place | None, ...] = ()
    counts: tuple[int, ...] = ()

    def again(
        self, tensors: Sequence[torch.Tensor], constants: tuple[tuple[int, Any], ...], numbers: Sequence[int]
    ) -> Call:
        """A call like this one, of other rows.  tensors: without `SAMPLES`.  numbers: ints that are B."""
        made = samples_of(tensors, self.dims[:-1], self.axes, numbers)
        call = replace(self, tensors=(*tensors, made), constants=constants)
        check_rows(call)
        return call

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """((args, kwargs), (target_args, target_kwargs)) with `tensors` in the tensors' places.

        Packed sequences stay padded: `packed` makes them torch's.
        """
        constants, rest = dict(self.constants), iter(tensors)
        if self.axes:
            constants |= dict.fromkeys(self.counts, tensors[-1].shape[0])
        count = len(constants) + len(self.tensors) - bool(self.axes)
        return pytree.tree_unflatten([constants[i] if i in constants else next(rest) for i in range(count)], self.spec)

    def ids(self, tensors: Sequence[Any]) -> list[Any]:
        """The sample of each row of each axis, `[R]`; None where that follows from what the rows point to."""
        called = any(callable(axis.rows.ids) for axis in self.axes)
        args, kwargs = self.rebuild(tensors)[0] if called else ((), {})
        return [axis.ids(tensors, self.rows(k, tensors), args, kwargs) for k, axis in enumerate(self.axes)]

    def rows(self, axis: int, tensors: Sequence[Any] | None = None) -> Any:
        """The number of rows of an axis, on which all inputs along it must agree."""
        given = self.tensors if tensors is None else tensors
        along = [(i, p.dim) for i, p in enumerate(self.places) if p is not None and p.axis == axis]
        size = given[along[0][0]].shape[along[0][1]]
        if tensors is None and any(given[i].shape[d] != size for i, d in along):
            raise counted({self.names[i]: given[i].shape[d] for i, d in along})
        return size

    @functools.cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """The number of rows of each axis."""
        return tuple(self.rows(k) for k in range(len(self.axes)))

    def like(self, tensors: tuple[torch.Tensor, ...]) -> Call:
        """A call like this one with other tensors of the same descriptions, so what was found out of it holds."""
        made: Call = object.__new__(Call)
        vars(made).update(vars(self))  # a frozen dataclass takes longer to make than all else that is asked of it
        vars(made)["tensors"] = tensors
        return made

    def batch_size(self) -> int:
        """The number of samples, on which all inputs must agree."""
        return self._batch_size

    @functools.cached_property
    def _batch_size(self) -> int:
        if not self.tensors:
            raise _no_tensor([type(value).__name__ for _, value in self.constants])
        found = {t.shape[d] for t, d in zip(self.tensors, self.dims, strict=True) if d is not None}
        if len(found) == 1:
            return found.pop()
        sizes = {n: t.shape[d] for n, t, d in zip(self.names, self.tensors, self.dims, strict=True) if d is not None}
        if not sizes:
            raise BadArgument(
                "no input carries the samples", where="transform(batch_dim=...)",
                why="every tensor input has batch_dim None",
                fix="give the sample dim of at least one input in batch_dim",
            )  # fmt: skip
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise BadArgument(
            "the inputs disagree on the number of samples", where=listed,
            why="the size in its sample dim is the batch size, and it must be the same for all",
            fix="pass batches of one size, or say where the samples lie: batch_dim=(inputs_dims, targets_dims), "
            "None for what all samples share",
        )  # fmt: skip


def samples_of(
    tensors: Sequence[torch.Tensor], dims: Sequence[int | None], axes: Sequence[RowAxis], numbers: Sequence[int]
) -> torch.Tensor:
    """`[B]` without a meaning but its size."""
    sizes = [*numbers, *(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None)]
    sizes += [max(tensors[axis.tensor].numel() - 1, 0) for axis in axes if axis.closed and axis.tensor is not None]
    if not sizes:
        raise BadArgument(
            "nothing says how many samples there are", where="step(inputs, targets)",
            why="every input holds rows of samples, or is shared by all",
            fix="step(inputs, targets, num_samples=B); or give a target with a row for each sample",
        )  # fmt: skip
    if len(set(sizes)) > 1 or sizes[0] < 0:
        raise BadArgument(
            f"the number of samples is {' and '.join(map(str, dict.fromkeys(sizes)))}", where="step(inputs, targets)",
            why="inputs with a row for each sample, ints whose batch_dim is 0, offsets and num_samples= all say it",
            fix="pass one number of samples; an int that is none of them has the batch_dim None",
        )  # fmt: skip
    return torch.empty(sizes[0], dtype=torch.bool, device=tensors[0].device)


def check_rows(call: Call) -> None:
    """Refuse ids that are no numbers of samples, one for each row."""
    for axis, size in zip(call.axes, call.row_sizes, strict=True):
        if axis.tensor is None:
            continue
        ids, name = call.tensors[axis.tensor], call.names[axis.tensor]
        if (
            not is_of_ints(ids.dtype)
            or ids.numel() != max(ids.shape, default=0)
            or (not axis.rows.offsets and ids.numel() != size)
        ):
            raise BadArgument(
                f"{name} is no number of a sample for each row", where=f"{name} of shape {tuple(ids.shape)}",
                why=f"it is {short_name(ids.dtype)}, and there are {size} {axis.label}",
                fix="pass a tensor of ints with an entry for each row; psg_fx.Rows.from_offsets(name) for where each "
                "sample begins",
            )  # fmt: skip


def _no_tensor(kinds: Sequence[str]) -> BadArgument:
    return BadArgument(
        "no tensor is among the inputs and targets", where="step(inputs, targets)",
        why=f"they are of {', '.join(dict.fromkeys(kinds))}" if kinds else "there are none",
        fix="torch.from_numpy(x) for an array; a class that holds tensors is looked into once torch knows it "
        "(torch.utils._pytree.register_dataclass)",
    )  # fmt: skip
