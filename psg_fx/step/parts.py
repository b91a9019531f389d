"""A batch in parts, one after the other: how it is cut, and how the outputs are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from psg_fx.algebra.ask import Quadratic
from psg_fx.errors import BadArgument
from psg_fx.program.arguments.call import Call
from psg_fx.quantities.base import Join, Quantity
from psg_fx.quantities.own import is_own
from psg_fx.step.compiled import StepOutput
from psg_fx.step.constants import as_tensor
from psg_fx.step.groups import Groups, groups_of
from psg_fx.step.leaves import Key, leaves, nested
from psg_fx.step.settings import Settings
from psg_fx.tensors import accumulation_dtype


def run_in_parts(
    run: Callable[..., StepOutput], settings: Settings, call: Call, given: Mapping[str, Any], size: int,
    report: Callable[[int, int], Any],
) -> StepOutput:  # fmt: skip
    """The output of a step for a call, from parts of at most `size` samples.  run: gives that of a part."""
    count, how = call.batch_size(), joins(settings)
    groups = None if given.get("groups") is None else groups_of(given["groups"], given.get("num_groups"), count)
    if groups is None:
        _check_each(settings, given, count)
        joined = Joined(how, count, settings.reuse_outputs)
    else:
        _check_whole(settings, groups, size)
        given = {**given, "num_groups": groups.count}
        joined = OfGroups(how, count, settings.reuse_outputs, groups.ids, fields_of_samples(settings))
    starts = range(0, count, size)
    for done, start in enumerate(starts, 1):
        part = slice(start, min(start + size, count))
        joined.add(run(*as_given(call, _cut(call, part)), **_cut_given(settings, given, part)), part)
        report(done, len(starts))
    between = settings.joins_of_processes if groups is None else settings.joins_of_groups
    return StepOutput(joined.fields(), between)


def is_linear(quantity: Quantity) -> bool:
    """Whether what it says of a group of samples is the sum of what it says of the group's parts.  One of the user's
    own may take anything of what it asks, and says so itself.
    """
    return _asks_linear(quantity) and (quantity.linear or not is_own(quantity))


def if_linear(quantity: Quantity) -> str:
    """The way out for one of the user's own."""
    own = is_own(quantity) and _asks_linear(quantity)
    return "; or let its class say linear = True, if its fields of parts of a group add up" if own else ""


def _asks_linear(quantity: Quantity) -> bool:
    return not any(isinstance(ask, Quadratic) for ask in quantity.asks())


def fields_of_samples(settings: Settings) -> set[str]:
    """The fields of the output that are of samples also where the others are of groups of them."""
    return {"losses", *(field for q in settings.quantities if q.over_samples for field in q.joins())}


def _check_whole(settings: Settings, groups: Groups, size: int) -> None:
    """Refuse parts between which a group is divided, where a quantity does not follow from sums over parts of it."""
    whole = [q for q in settings.quantities if not is_linear(q)]
    parts = torch.arange(len(groups.ids), device=groups.ids.device) // size
    own = torch.stack([groups.ids, parts], 1)[groups.ids >= 0].unique(dim=0)[:, 0]
    divided = own[1:][own[1:] == own[:-1]]
    if whole and len(divided):
        raise BadArgument(
            f"group {int(divided[0])} has samples in several parts of {size}", where="microbatch(step, size)",
            why=f"{whole[0]} needs the gradient of a whole group at once",
            fix="bring the samples in order of their groups, and choose a size that ends no part within one"
            + if_linear(whole[0]),
        )  # fmt: skip


def joins(settings: Settings) -> dict[str, Join]:
    """How each field of the output follows from those of parts."""
    found: dict[str, Join] = {"losses": "cat"}
    for quantity in settings.quantities:
        if not quantity.joins() or not set(quantity.joins().values()) <= {"cat", "sum", "mean"}:
            raise BadArgument(
                f"{quantity} of a batch does not follow from those of its parts", where="microbatch(step, size)",
                why="it is neither a row for every sample, nor a sum or a mean over samples",
                fix="leave it out of quantities, or run the batch in one piece",
            )  # fmt: skip
        found |= quantity.joins()
    return found


def as_given(call: Call, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Inputs, and targets if there are any, as a step is given them, of these tensors in place of the call's."""
    inputs, targets = (arguments or keywords for arguments, keywords in call.rebuild(tensors))
    return (inputs, targets) if targets else (inputs,)


def _cut(call: Call, part: slice) -> list[torch.Tensor]:
    """The tensors of one part."""
    length = part.stop - part.start
    return [
        t if dim is None else t.narrow(dim, part.start, length) for t, dim in zip(call.tensors, call.dims, strict=True)
    ]


def _check_each(settings: Settings, given: Mapping[str, Any], count: int) -> None:
    """Refuse what is given for another number of samples: parts would be cut out of it that fit."""
    for name in settings.reads_each & {name for name, value in given.items() if value is not None}:
        value = given[name]
        place = value.device if isinstance(value, torch.Tensor) else torch.device("cpu")
        shape = tuple(as_tensor(name, value, torch.complex128, place).shape)  # any numbers
        if shape != (count,):
            raise BadArgument(
                f"{name} have shape {shape}", where=f"step(inputs, targets, {name}=...)",
                why=f"there is one for each of the {count} samples", fix="pass a [B] tensor",
            )  # fmt: skip


def _cut_given(settings: Settings, given: Mapping[str, Any], part: slice) -> dict[str, Any]:
    each = settings.reads_each if given.get("groups") is None else {"groups"}
    return {n: value[part] if n in each and value is not None else value for n, value in given.items()}


def require_joins(fields: Iterable[str], joins: Mapping[str, Join], where: str) -> None:
    """Refuse a field of a quantity of the user's own of which it does not say how it follows from those of parts."""
    for field in fields:
        if field not in joins:
            raise BadArgument(
                f"out.{field} of parts is not known to be put together", where=where,
                why=f"joins() of its quantity has no entry for {field!r}",
                fix=f'let joins() return {{"{field}": "sum"}}, or "mean", or "cat" for a row of each sample',
            )  # fmt: skip


class Joined:
    """The fields of a batch, filled part by part; sums of half precision are held in float32 until all are there.

    overwritten: a part's tensors live only until the next part.
    """

    def __init__(self, joins: Mapping[str, Join], count: int, overwritten: bool) -> None:
        self._joins, self._count, self._overwritten = joins, count, overwritten
        self._own: set[int] = set()
        self._totals: dict[Key, torch.Tensor] = {}
        self._dtypes: dict[Key, torch.dtype] = {}

    def fields(self) -> dict[str, Any]:
        """All fields, in the dtypes that the parts have."""
        return nested({key: total.to(self._dtypes[key]) for key, total in self._totals.items()})

    def add(self, output: StepOutput, part: slice) -> None:
        """Take in the output of one part."""
        require_joins(vars(output), self._joins, "microbatch(step, size)")
        for key, value in leaves(vars(output)):
            self._totals[key] = self._joined_field(key[0], self._totals.get(key), value, part)
            self._dtypes[key] = value.dtype

    def _joined(self, total: torch.Tensor | None, value: torch.Tensor, join: Join, part: slice) -> torch.Tensor:
        if join == "cat":
            if value.shape[:1] != (part.stop - part.start,):
                raise BadArgument(
                    f"a field of shape {tuple(value.shape)} has no row for every sample",
                    where="microbatch(step, size)",
                    why='joins() of its quantity says "cat": the rows of the parts, one after the other',
                    fix='say "sum" or "mean" there, or give it a row for every sample',
                )  # fmt: skip
            if total is None:
                total = value.new_empty((self._count, *value.shape[1:]))
            total[part] = value
            return total
        share = (part.stop - part.start) / self._count if join == "mean" else 1.0
        if total is None:
            value = value.to(accumulation_dtype(value.dtype))
            return self._owned(value) if join == "sum" else value * share
        return total.add_(value) if join == "sum" else total.add_(value, alpha=share)

    def _joined_field(self, field: str, total: torch.Tensor | None, value: torch.Tensor, part: slice) -> torch.Tensor:
        return self._joined(total, value, self._joins[field], part)

    def _owned(self, value: torch.Tensor) -> torch.Tensor:
        """The value itself, or a copy where its memory is another total's too, or will be written by the next part."""
        start = value.untyped_storage().data_ptr()
        shared = start in self._own or (self._overwritten and value.is_cuda)
        self._own.add(start)
        return value.clone() if shared else value


class OfGroups(Joined):
    """The fields of a batch of groups: rows of groups come from the part that has their samples, or are summed where
    several do.  samples: names of the fields that are of samples.
    """

    def __init__(
        self, joins: Mapping[str, Join], count: int, overwritten: bool, ids: torch.Tensor, samples: set[str]
    ) -> None:
        super().__init__(joins, count, overwritten)
        self._ids, self._samples = ids, samples

    def _joined_field(self, field: str, total: torch.Tensor | None, value: torch.Tensor, part: slice) -> torch.Tensor:
        join = self._joins[field]
        if field in self._samples:
            return self._joined(total, value, join, part)
        if join != "cat":  # a mean over groups is over all of them, in every part
            return self._joined(total, value, "sum", part)
        if total is None:
            return value.to(accumulation_dtype(value.dtype), copy=True)
        before, own = self._ids[: part.start], self._ids[part]
        own = own[own >= 0].unique()
        again = torch.isin(own, before)
        new, again = own[~again].to(value.device), own[again].to(value.device)
        total[new] = value[new].to(total.dtype)
        total[again] += value[again]
        return total
