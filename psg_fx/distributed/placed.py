"""Sums over the samples of all processes, placed like the parameters: a reduce-scatter of many at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from psg_fx.distributed.sums import Named, added, buckets
from psg_fx.distributed.tensor_parallel import TensorParallel
from psg_fx.errors import NotYetSupported
from psg_fx.step.compiled import StepOutput

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # until torch 2.12


class Placed:
    """Sums of this process's samples, to be added up and placed like the parameters, in their dtypes whatever a
    mixed-precision policy computes in.

    slices: over which processes the model is sliced, if it is: these have the same samples, and a sum is a slice.
    """

    def __init__(self, model: nn.Module, slices: TensorParallel) -> None:
        self.slices = slices
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._known: dict[Any, _Way] = {}
        found = {name: self._own_way(p) for name, p in self.parameters.items() if isinstance(p, DTensor)}
        self.ways = [way for way in found.values() if way.dims]
        for name in (name for name, way in found.items() if way.dims and way.processes != self.ways[0].processes):
            raise NotYetSupported(
                f"{name} is sharded over other processes than the parameters before", where="fully_shard",
                why="sums are over the samples of all processes, and a mesh of some has those of some",
                fix="shard all parts over one mesh, or over meshes of the same processes",
            )  # fmt: skip

    @property
    def groups(self) -> list[Any]:
        """Over which sums are taken; none where no parameter's mesh has processes with other samples."""
        return self.ways[0].groups if self.ways else []

    def add(self, named: Named) -> dict[str, torch.Tensor]:
        ways: dict[Any, tuple[_Way, dict[str, torch.Tensor]]] = {}
        like = {name: value for name, value in named.items() if self._is_like_parameter(name, value)}
        for name, value in like.items():
            p, way = self.parameters[name], self._way(name)
            key = (way.mesh, way.kind, way.sharded)
            ways.setdefault(key, (way, {}))[1][name] = value.to(p.dtype)
        others = {name: value for name, value in named.items() if name not in like}  # numbers, of the user's own
        found = added(others, self.groups) if others and self.ways else others
        for way, values in ways.values():
            if way.kind == "scattered":
                found |= self._scattered(way, values)
            elif way.kind == "redistributed":
                found |= {name: self._redistributed(name, value) for name, value in values.items()}
            else:
                sums = added(values, way.groups) if way.groups else values
                found |= {name: self._placed(name, value) for name, value in sums.items()}
        return {name: found[name] for name in named}

    def of_slices(self, out: StepOutput) -> StepOutput:
        """The output of a model that is sliced, said of whole parameters: gradients [B, *shape]; sums too, where they
        are not added up over processes.
        """
        fields = dict(vars(out))
        for field, join in (out.joins or {}).items():
            if isinstance(fields.get(field), Mapping):
                if join == "cat":
                    fields[field] = {name: self._sliced(name, value) for name, value in fields[field].items()}
                elif not self.ways:
                    fields[field] = self.add(fields[field])
        return StepOutput(fields, out.joins)

    def _is_like_parameter(self, name: str, value: torch.Tensor) -> bool:
        return name in self.parameters and value.ndim == self.parameters[name].ndim

    def _way(self, name: str) -> _Way:
        """From the samples of this process to those of all.  A parameter that lies outside of the meshes of samples is
        the same in those processes that share the rest.
        """
        p = self.parameters[name]
        own = self._own_way(p) if isinstance(p, DTensor) else None
        if own is not None and own.dims:
            return own
        return replace(self.ways[0], kind="added") if self.ways else _Way(None, (), -1, "added")

    def _own_way(self, p: Any) -> _Way:
        """That of the parameter's own mesh."""
        key = (p.device_mesh, p.placements)
        if key not in self._known:
            self._known[key] = _Way.of(p, self.slices.mesh_dim(p))
        return self._known[key]

    def _scattered(self, way: _Way, named: Named) -> dict[str, torch.Tensor]:
        """Every process gets the sum of its part: one message for many parameters, laid in a row for each process."""
        dim, found = way.sharded, {}
        size, rank = way.mesh.size(dim), way.mesh.get_local_rank(dim)
        for bucket in buckets(named.items()):
            rows = [_in_parts(value, self._shard(name, dim).dim, size) for name, value in bucket]
            own = rows[0].new_empty(sum(row.shape[1] for row in rows))
            _reduce_scatter(own, torch.cat(rows, 1).view(-1), group=way.mesh.get_group(dim))
            for other in (d for d in way.dims if d != dim):
                dist.all_reduce(own, group=way.mesh.get_group(other))
            pieces = own.split([row.shape[1] for row in rows])
            for (name, value), piece in zip(bucket, pieces, strict=True):
                local = _part(piece, value.shape, self._shard(name, dim).dim, size, rank)
                found[name] = self._placed(name, local)
        return found

    def _shard(self, name: str, dim: int) -> Any:
        return self.parameters[name].placements[dim]  # type: ignore[attr-defined]

    def _placed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        p: Any = self.parameters[name]
        if not isinstance(p, DTensor):
            return local
        return DTensor.from_local(
            local.to(p.device), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _sliced(self, name: str, value: torch.Tensor) -> torch.Tensor:
        p: Any = self.parameters[name]
        dim, mesh = self.slices.dim_of(p), self.slices.mesh
        if dim is None or mesh is None or value.ndim != p.ndim + 1:
            return value
        return DTensor.from_local(value, mesh, [Shard(dim + 1)], run_check=False)

    def _redistributed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        p: Any = self.parameters[name]
        partial = [Partial("sum")] * p.device_mesh.ndim
        whole = DTensor.from_local(value.contiguous(), p.device_mesh, partial, run_check=False)
        placed: torch.Tensor = whole.redistribute(placements=p.placements)
        return placed.to(p.device)


Kind = Literal["scattered", "redistributed", "added"]


@dataclass(frozen=True)
class _Way:
    """From sums of this process's samples to those of all, for parameters that lie alike.

    mesh: of the parameters.  dims: those of it along which processes have other samples.  sharded: the one of these
    along which the parameters are cut, where they are cut along one alone.
    """

    mesh: Any
    dims: tuple[int, ...]
    sharded: int
    kind: Kind

    @staticmethod
    def of(p: Any, slices: int | None) -> _Way:
        """slices: the dim of the mesh along which processes have slices of the same samples."""
        dims = tuple(dim for dim in range(p.device_mesh.ndim) if dim != slices)
        cut = [dim for dim in dims if not p.placements[dim].is_replicate()]
        names = ("Shard",) if slices is None else ("Shard", "_StridedShard")  # of slices, cut along the same dim
        if len(cut) == 1 and type(p.placements[cut[0]]).__name__ in names:
            return _Way(p.device_mesh, dims, cut[0], "scattered")
        if cut and slices is not None:
            raise NotYetSupported(
                f"a parameter lies as {p.placements} on the mesh {p.device_mesh}", where="fully_shard",
                why="it is cut along several dims of the mesh beside that of tensor parallelism",
                fix="use a mesh of samples and slices, with replicas of these at most",
            )  # fmt: skip
        return _Way(p.device_mesh, dims, -1, "redistributed" if slices is None else "added")

    @functools.cached_property
    def groups(self) -> list[Any]:
        """Groups over which sums are taken one after the other, so that they are over all other samples."""
        return [self.mesh.get_group(dim) for dim in self.dims]

    @functools.cached_property
    def processes(self) -> list[int]:
        """Whose samples are summed."""
        here = self.mesh.get_coordinate()
        own = tuple(slice(None) if dim in self.dims else place for dim, place in enumerate(here))
        return sorted(self.mesh.mesh[own].flatten().tolist())


def _in_parts(value: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """[count, n]: the tensor cut along a dim as `torch.chunk` does, the last parts filled up with zeros."""
    first = value.movedim(dim, 0)
    length = -(-first.shape[0] // count) * count
    if length != first.shape[0]:
        first = F.pad(first, [0] * (2 * first.ndim - 1) + [length - first.shape[0]])
    return first.reshape(count, -1)


def _part(piece: torch.Tensor, shape: torch.Size, dim: int, count: int, index: int) -> torch.Tensor:
    """What of one row of `_in_parts` is part `index` of the tensor itself."""
    rest = [size for d, size in enumerate(shape) if d != dim]
    each = -(-shape[dim] // count)
    length = max(0, min(each, shape[dim] - index * each))
    return piece.view(each, *rest).narrow(0, 0, length).movedim(0, dim).contiguous()
