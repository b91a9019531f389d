"""Sums over the samples of all processes, placed like the parameters: a reduce-scatter of many at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from psg_fx.distributed.sums import Named, added, buckets, share_of
from psg_fx.errors import NotYetSupported

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # until torch 2.12


class Placed:
    """Sums of this process's samples, to be added up and placed like the parameters, in their dtypes whatever a
    mixed-precision policy computes in.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.meshes = list(dict.fromkeys(p.device_mesh for p in self.parameters.values() if isinstance(p, DTensor)))

    def shares(self, named: Named, count: int) -> Named:
        found = {mesh: share_of(count, next(iter(named.values())).device, _groups(mesh)) for mesh in self.meshes}
        return {name: found[self._mesh(name)] for name in named}

    def add(self, named: Named) -> dict[str, torch.Tensor]:
        ways: dict[Any, dict[str, torch.Tensor]] = {}
        for name, value in named.items():
            p = self.parameters[name]
            dim = _sharded_mesh_dim(p) if isinstance(p, DTensor) else None
            ways.setdefault((self._mesh(name), isinstance(p, DTensor), dim), {})[name] = value.to(p.dtype)
        found: dict[str, torch.Tensor] = {}
        for (mesh, is_placed, dim), values in ways.items():
            if dim is not None:
                found |= self._scattered(mesh, dim, values)
            elif is_placed:
                found |= {name: self._redistributed(name, value) for name, value in values.items()}
            else:
                found |= added(values, _groups(mesh))
        return {name: found[name] for name in named}

    def _mesh(self, name: str) -> Any:
        """Of the processes that share a parameter.  One that lies outside is the same in those that share the rest."""
        p = self.parameters[name]
        if isinstance(p, DTensor):
            return p.device_mesh
        if len(self.meshes) > 1:
            raise NotYetSupported(
                f"{name} is not sharded, and the rest of the model is on several meshes", where=name,
                why="it is not known over which processes its gradient is summed", fix="shard it too, or freeze it",
            )  # fmt: skip
        return self.meshes[0]

    def _scattered(self, mesh: Any, dim: int, named: Named) -> dict[str, torch.Tensor]:
        """Every process gets the sum of its part: one message for many parameters, laid in a row for each process."""
        size, rank, found = mesh.size(dim), mesh.get_local_rank(dim), {}
        for bucket in buckets(named.items()):
            rows = [_in_parts(value, self._shard(name, dim).dim, size) for name, value in bucket]
            own = rows[0].new_empty(sum(row.shape[1] for row in rows))
            _reduce_scatter(own, torch.cat(rows, 1).view(-1), group=mesh.get_group(dim))
            for other in (d for d in range(mesh.ndim) if d != dim):
                dist.all_reduce(own, group=mesh.get_group(other))
            pieces = own.split([row.shape[1] for row in rows])
            for (name, value), piece in zip(bucket, pieces, strict=True):
                local = _part(piece, value.shape, self._shard(name, dim).dim, size, rank)
                found[name] = self._placed(name, local)
        return found

    def _shard(self, name: str, dim: int) -> Any:
        return self.parameters[name].placements[dim]  # type: ignore[attr-defined]

    def _placed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        p: Any = self.parameters[name]
        return DTensor.from_local(
            local.to(p.device), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _redistributed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        p: Any = self.parameters[name]
        partial = [Partial("sum")] * p.device_mesh.ndim
        whole = DTensor.from_local(value.contiguous(), p.device_mesh, partial, run_check=False)
        placed: torch.Tensor = whole.redistribute(placements=p.placements)
        return placed.to(p.device)


def _sharded_mesh_dim(p: Any) -> int | None:
    """The one dim of the mesh over which a parameter is cut, where it is the same along all others; else None."""
    dims = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]
    return dims[0] if len(dims) == 1 and type(p.placements[dims[0]]) is Shard else None


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


def _groups(mesh: Any) -> list[Any]:
    """Groups over which sums are taken one after the other, so that they are over the whole mesh."""
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]
