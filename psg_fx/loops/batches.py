"""What a loader gives, as a call of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.plain_objects import looked_into
from psg_fx.program.arguments.packed import is_packed
from psg_fx.step.compiled import StepOutput
from psg_fx.step.mistakes import refuse_rows
from psg_fx.step.parts import as_given
from psg_fx.step.with_loss import LossModule
from psg_fx.tensors import is_of_ints, short_name

Prepare = Callable[[Any], Any]
Indices = str | int | Callable[[Any], Any]
"""Where a batch has an int for every sample, such as its place in the data set: a key, a position, or a function."""


@dataclass(frozen=True)
class Batch:
    """One call of a step.  arguments: inputs, and targets if there are any.  given: its keywords.  indices: [B]."""

    arguments: tuple[Any, ...]
    given: Mapping[str, Any]
    indices: torch.Tensor | None = None

    def run(self, step: LossModule) -> StepOutput:
        """The step's output."""
        out: StepOutput = step(*self.arguments, **self.given)
        return out

    def grouped(self, num_groups: int) -> Batch:
        """The same for groups of samples, whose numbers stand in `indices`."""
        return replace(self, given={**self.given, "groups": self.indices, "num_groups": num_groups}, indices=None)

    def size(self, step: LossModule) -> int:
        """The number of samples."""
        return step._take_apart(*self.arguments).batch_size()

    def of_rows(self, step: LossModule, rows: torch.Tensor) -> Batch:
        """The batch of these samples alone."""
        call = step._take_apart(*self.arguments)
        refuse_rows(
            call, "a part of a batch", "over(loader, step, store=..., indices=...)",
            "go on with the batches of the run before, so that the store has all samples of each, or none",
        )  # fmt: skip
        at = {device: rows.to(device) for device in {t.device for t in call.tensors}}
        tensors = [
            t if dim is None else t.index_select(dim, at[t.device])
            for t, dim in zip(call.tensors, call.dims, strict=True)
        ]
        each = step.settings.reads_each
        given = {k: _of_rows(v, rows) if k in each else v for k, v in self.given.items()}
        indices = None if self.indices is None else self.indices[rows]
        return replace(self, arguments=as_given(call, tensors), given=given, indices=indices)


def batch_of(
    found: Any, prepare: Prepare | None, indices: Indices | None, device: torch.device, given: Mapping[str, Any],
    named: str = "indices",
) -> Batch:  # fmt: skip
    """The call that a loader's batch stands for, on the device.  given: keywords of every call.  named: what the
    indices are.
    """
    places = None
    if indices is not None:
        places, found = _places(found, indices, named)
    if prepare is not None:
        found = prepare(found)
    inputs, targets, own = _parts(found)
    arguments = (inputs,) if targets is None else (inputs, targets)
    return Batch(_moved(arguments, device), {**given, **_moved(dict(own), device)}, places)


def _parts(found: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """Inputs, targets or None, keywords."""
    if isinstance(found, torch.Tensor) or is_packed(found):
        return found, None, {}
    if isinstance(found, Mapping):
        return dict(found), None, {}
    if isinstance(found, (tuple, list)) and 1 <= len(found) <= 3:
        inputs, targets, own = (*found, *(None, {})[len(found) - 1 :])[:3]
        if isinstance(own, Mapping):
            return inputs, targets, own
    count = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
    raise BadArgument(
        f"a batch is a {type(found).__name__}{count}", where="over(loader, step)",
        why="it is a tensor or a dict of inputs, (inputs, targets), or (inputs, targets, keywords of the step)",
        fix="over(..., prepare=lambda batch: ((batch[0], batch[1]), batch[2])), or another function that says so",
    )  # fmt: skip


def _places(found: Any, indices: Indices, named: str) -> tuple[torch.Tensor, Any]:
    """An int for every sample, [B] of int64 on the CPU, and the batch without them."""
    try:
        if callable(indices):
            places, rest = indices(found), found
        elif isinstance(found, Mapping):
            places, rest = found[str(indices)], {k: v for k, v in found.items() if k != indices}
        else:
            places = found[int(indices)]
            rest = tuple(v for i, v in enumerate(found) if i != int(indices) % len(found))
        numbers = torch.as_tensor(places, device="cpu")
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
        raise BadArgument(
            f"a batch has no {named} at {indices!r}", where=f"over(..., {named}=...)",
            why=f"{type(error).__name__}: {error}",
            fix="a key of the batch, a position in it, or a function of it that returns [B] ints",
        ) from error  # fmt: skip
    kind = numbers.dtype
    if numbers.numel() and not is_of_ints(kind):  # of no list: of floats
        raise BadArgument(
            f"{named} of a batch are of {short_name(kind)}", where=f"over(..., {named}=...)",
            why="they are the places of its samples in the data set" if named == "indices" else
            "they are the numbers of its samples' groups",
            fix="let it give [B] ints",
        )  # fmt: skip
    return numbers.to(torch.int64).reshape(-1), rest


def _of_rows(value: Any, rows: torch.Tensor) -> Any:
    """The entries of these samples, of the kind that they are."""
    if isinstance(value, (list, tuple)):
        return [value[row] for row in rows.tolist()]
    return torch.as_tensor(value)[rows]


def _moved(tree: Any, device: torch.device) -> Any:
    """The tensors of tuples, lists and mappings on the device, and packed sequences, which move as torch moves them."""
    if isinstance(tree, Mapping) and type(tree) is not dict:  # a tokenizer's output, which pytrees take for a leaf
        tree = dict(tree)
    tree = looked_into(tree)
    return pytree.tree_map(
        lambda leaf: leaf.to(device=device, non_blocking=device.type == "cuda")
        if isinstance(leaf, torch.Tensor) or is_packed(leaf)
        else _moved(leaf, device) if isinstance(leaf, Mapping) else leaf,
        tree, is_leaf=is_packed,
    )  # fmt: skip
