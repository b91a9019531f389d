"""What the steps of several processes return, as for the batch of all of them.

Sums over samples add up over processes:  Σ_i c_i g_i = Σ_p Σ_{i of p} c_i g_i;  means are weighted by the numbers of
samples B_p of the processes:  ḡ = Σ_p B_p ḡ_p / Σ_p B_p.  A variance is that of the second moments less the mean of
all squared.  What has a row for every sample stays with its process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Join
from psg_fx.step.compiled import StepOutput
from psg_fx.torch_private.sharded import is_sharded_tensor

_BUCKET = 2**25
"""Bytes that are sent as one message: large enough for the rate of the network, small beside a model."""

Named = Mapping[str, torch.Tensor]


class Processes(Protocol):
    """How named tensors of this process become those of all."""

    @property
    def groups(self) -> Groups:
        """Over which sums are taken, one after the other, so that they are over all."""

    def add(self, named: Named) -> dict[str, torch.Tensor]:
        """The sums over processes."""


def reduce(out: StepOutput, group: dist.ProcessGroup | None = None) -> StepOutput:
    """The output of a step on this process's samples, with sums and means over the samples of all processes.

    `clipped_sum` and `weighted_sum` are added up; `mean_grad` and `second_moment` are means over all samples, so that
    shares of any size, also empty ones, count as they should.  `second_moment` of `SecondMoment(centered=True)` needs
    `MeanGrad()` beside it.  Losses, norms, factors and whatever else has a row for every sample remain those of this
    process's samples, and so does `gram`.  Every process must call it, with outputs of the same step.  Where the step
    was called with `groups=`, all samples of a group must have been in one process.  Processes that share a model by
    `parallelize_module` compute the same samples, so the group has one process of each mesh of these: that of the
    mesh's other dim, `mesh.get_group("samples")`.

    Args:
        out: what a step (or `microbatch`) returned; its tensors are not changed.
        group: of processes, None for all.

    Raises:
        BadArgument: the output is over all processes already, no step's, or a variance without its mean; a quantity
            without `joins()`; a second moment of groups; a group with processes that have computed the output together,
            by slices of the model; or `torch.distributed.init_process_group` was not called.
    """
    if getattr(out, "joins", None) is None:
        known = type(out) is StepOutput
        raise BadArgument(
            "this is no output of one process" if known else f"out is a {type(out).__name__}",
            where="psg_fx.distributed.reduce(out)",
            why="it is over all processes already, and adding it up again would count every process once more"
            if known else "the output of a step says how each of its fields is added up",
            fix="pass what the step returned, once",
        )  # fmt: skip
    check_joins(out.joins or {}, "psg_fx.distributed.reduce(out)")
    if not (dist.is_available() and dist.is_initialized()):
        raise BadArgument(
            "there is no group of processes", where="psg_fx.distributed.reduce(out)",
            why="processes find one another by torch.distributed.init_process_group, which was not called",
            fix="call it first; in a single process leave reduce out: its output is that of all samples",
        )  # fmt: skip
    _check_group(out.together, group)
    return over_processes(out, _Group(group))


def _check_group(together: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Refuse a group that would add up slices of a model.  together: processes that have computed an output so."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if len(set(together) & set(ranks)) > 1:
        raise BadArgument(
            "the group has processes that have computed the same samples",
            where=f"psg_fx.distributed.reduce(out{'' if group is None else ', group'})",
            why=f"parallelize_module has sliced the model over the processes {', '.join(map(str, together))}: "
            "different slices would be added up, and samples counted several times",
            fix="give the group of the mesh's other dim, that of different samples: reduce(out, "
            'mesh.get_group("samples")); where there is none, the output is that of all samples already',
        )  # fmt: skip


def check_joins(joins: Mapping[str, Join], where: str) -> None:
    """Refuse a field that does not follow from those of the processes, and means over groups of samples."""
    for field in (field for field, join in joins.items() if join == "unknown"):
        raise BadArgument(
            f"it is not known how {field} of all processes follows from those of each", where=where,
            why="the quantity that fills it has no joins()",
            fix='say how: def joins(self): return {field: "sum"}; or "mean", or "cat" for a row for every sample',
        )  # fmt: skip
    if "groups" in joins.values():
        raise BadArgument(
            "SecondMoment of groups in all processes does not follow from those of each", where=where,
            why="it is a mean over groups, and a process does not say how many of these it has",
            fix="leave SecondMoment out of quantities, or call the step without groups",
        )  # fmt: skip
    if joins.get("second_moment") == "variance" and "mean_grad" not in joins:
        raise BadArgument(
            "SecondMoment(centered=True) of all processes does not follow from those of each", where=where,
            why="the processes' means differ, and are not known",
            fix="ask for MeanGrad() as well: quantities=[SecondMoment(centered=True), MeanGrad()]",
        )  # fmt: skip


def over_processes(out: StepOutput, processes: Processes) -> StepOutput:
    """The output over all processes: the same fields, of which sums and means are replaced."""
    check_joins(out.joins or {}, "the sums of all processes")
    joins, fields, count = out.joins or {}, dict(vars(out)), len(out.losses)
    for field, join in joins.items():
        if join in ("cat", "local") or field not in fields:
            continue
        alone = isinstance(fields[field], torch.Tensor)
        named: Named = {field: fields[field]} if alone else fields[field]
        if join == "variance":
            named = {name: value + _square(out.mean_grad[name], value) for name, value in named.items()}
        if join != "sum":
            share = share_of(count, next(iter(named.values())).device, processes.groups)
            named = {name: (_wide(value) * share).to(value.dtype) for name, value in named.items()}
        found = processes.add(named)
        fields[field] = found[field] if alone else found
    for field in (f for f, join in joins.items() if join == "variance"):
        pairs = ((name, value, _square(fields["mean_grad"][name], value)) for name, value in fields[field].items())
        fields[field] = {name: (value - square).clamp(min=0) for name, value, square in pairs}
    return StepOutput(fields)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _square(mean: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mean.to(like.dtype).square()


class _Group:
    """A group of processes, each with all of every tensor."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.groups: Groups = [group]

    def add(self, named: Named) -> dict[str, torch.Tensor]:
        found = added({name: local(value) for name, value in named.items()}, self.groups)
        return {name: placed_like(named[name], value) for name, value in found.items()}


def local(value: torch.Tensor) -> torch.Tensor:
    """What of a tensor this process has."""
    return value.to_local() if is_sharded_tensor(value) else value  # type: ignore[attr-defined]


def placed_like(value: Any, part: torch.Tensor) -> torch.Tensor:
    """The part of this process, placed as a DTensor is; the part itself of any other tensor."""
    if not is_sharded_tensor(value):
        return part
    mesh, placements = value.device_mesh, value.placements
    found: torch.Tensor = type(value).from_local(
        part, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return found


Groups = Sequence[dist.ProcessGroup | None]
"""A group of processes (None: all), or those of each dim of a mesh."""


def share_of(count: int, device: torch.device, groups: Groups) -> torch.Tensor:
    """count / Σ count over the processes, as a scalar on the device; 0 where there are no samples at all."""
    total = torch.full((), count, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return count / total.clamp(min=1)


def added(named: Named, groups: Groups) -> dict[str, torch.Tensor]:
    """The sums over processes, in few messages.  Memory is added as it lies, and how a result lies depends on the plan
    for a process's own batch size, so all is laid in a row first.
    """
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets(named.items()):
        row = torch.cat([value.reshape(-1) for _, value in bucket])
        for group in groups:
            dist.all_reduce(row, group=group)
        pieces = row.split([value.numel() for _, value in bucket])
        found |= {name: piece.view(value.shape) for (name, value), piece in zip(bucket, pieces, strict=True)}
    return {name: found[name] for name in named}


def buckets(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Tensors of one dtype and device each, of some size together."""
    by_kind: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for name, value in named:
        by_kind.setdefault((value.dtype, value.device), []).append((name, value))
    for entries in by_kind.values():
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, value in entries:
            bucket.append((name, value))
            size += value.numel() * value.element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
