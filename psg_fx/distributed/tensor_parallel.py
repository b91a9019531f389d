"""A tensor-parallel model while a step runs: plain parameters that are the slices of this process, and the plan of
`parallelize_module` as ops between processes (`psg_fx/ops/across.py`) in place of torch's hooks on DTensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from psg_fx.digests import digest, fingerprint
from psg_fx.distributed.parallel_layers import PLANS, ParallelLayer, group_of, parallel_layer, refused
from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.slices import SLICES, Slices
from psg_fx.quantities.base import Quantity
from psg_fx.torch_private.tensor_parallel import has_hooks_of_all_modules, hook_name, local_part, slice_of


@dataclass(frozen=True)
class _Own:
    """A DTensor where it lies, and the parameter on the part of it that this process has."""

    place: dict[str, Any]
    key: str
    parameter: Any
    part: Tensor
    local: nn.Parameter

    def holds(self) -> bool:
        """Whether it is as it was."""
        same = self.place.get(self.key) is self.parameter and local_part(self.parameter) is self.part
        return same and self.local.requires_grad is self.parameter.requires_grad


class TensorParallel:
    """The layers of a model that `parallelize_module` has sliced, over one mesh of one dim.

    `local()` gives the model on the slices of this process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._dressed = [parallel_layer(name, m) for name, m in model.named_modules() if hook_name(m)]
        meshes = list(dict.fromkeys(one.style.mesh for one in self._dressed))
        if len(meshes) > 1:
            raise refused(
                self._dressed[-1].name, self._dressed[-1].module, f"{self._dressed[-1].name} is sliced over another "
                "mesh than the layers before", "norms are summed over one mesh", "slice all layers over one mesh",
            )  # fmt: skip
        self.mesh = meshes[0] if meshes else None
        self.group = group_of(self.mesh) if self.mesh is not None else None
        self._own: list[_Own] = []
        self._depth = 0

    def check(self, quantities: Iterable[Quantity]) -> None:
        """Refuse what does not follow from slices."""
        for quantity in quantities if self.group else ():
            if not all(ask.like_parameter or ask.adds_up for ask in quantity.asks()):
                raise NotYetSupported(
                    f"{type(quantity).__name__} of a tensor-parallel model", where="transform(quantities=...)",
                    why="it reads whole gradients, of which each process has slices",
                    fix="leave it out, or take the model before parallelize_module",
                )  # fmt: skip

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """The model on this process's slices.  It may be entered while it is open."""
        self._depth += 1
        try:
            if self._depth == 1 and self.group:
                self._undress()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._dress()

    def check_equal(self, tensors: Mapping[str, Tensor], fix: str) -> None:
        """Refuse tensors that should be equal in all processes of the mesh and are not.  Every process calls it."""
        said = [f"{name}: {tuple(t.shape)} {t.dtype} {fingerprint(t)}" for name, t in tensors.items()]
        for name, own in zip(tensors, self._compared(said), strict=True):
            if not own:
                raise BadArgument(
                    f"{name} is not the same in all processes of the tensor-parallel mesh", where=name,
                    why="all of them compute the same samples, each with its slices of the model; what is not sliced "
                    "is taken to be equal", fix=fix,
                )  # fmt: skip

    def check_graphs(self, gm: GraphModule) -> None:
        """Refuse graphs that differ, whose collectives might not meet.  Every process calls it."""
        ops = [(str(n.target), [(facts.shape(t), t.dtype) for t in facts.tensors(n.meta.get("val"))])
               for n in gm.graph.nodes if n.op == "call_function"]  # fmt: skip
        if not all(self._compared([digest(repr(ops))])):
            raise NotYetSupported(
                "processes of the tensor-parallel mesh have made different graphs of the model", where="the model",
                why="their collectives would not meet in one order",
                fix="run the same code, with the same settings and versions, on the same kind of device in each",
            )  # fmt: skip

    def _compared(self, said: list[str]) -> list[bool]:
        """Whether each is said in all processes."""
        assert self.mesh is not None
        found: list[Any] = [None] * self.mesh.size()
        dist.all_gather_object(found, said, group=self.mesh.get_group())
        return [all(k < len(other) and other[k] == one for other in found) for k, one in enumerate(said)]

    def ranks(self) -> tuple[int, ...]:
        """The processes that compute the same samples together."""
        return () if self.mesh is None else tuple(_ranks(self.mesh, 0))

    def slices(self) -> Slices | None:
        """What is sliced, while the model is local."""
        if self.group is None:
            return None
        cut = {id(one.local) for one in self._own if self.dim_of(one.parameter) is not None}
        named = self._model.named_parameters(remove_duplicate=False)
        return Slices(self.group.name, frozenset(name for name, p in named if id(p) in cut))

    def dim_of(self, parameter: Any) -> int | None:
        """Along which dim of its own a parameter is sliced; None for one that is whole in every process."""
        dim = self.mesh_dim(parameter)
        placement = None if dim is None else parameter.placements[dim]
        return None if placement is None or placement.is_replicate() else int(placement.dim)

    def part(self, p: Any, value: Any) -> Any:
        """This process's slice of what is given for a parameter, which may have further dims before its own."""
        dim = self.dim_of(p)
        if dim is None or self.mesh is None or not isinstance(value, Tensor):
            return value
        dim += value.ndim - p.ndim
        length = value.shape[dim] // self.mesh.size()
        return value.narrow(dim, self.mesh.get_local_rank() * length, length)

    def mesh_dim(self, parameter: Any) -> int | None:
        """Which dim of a parameter's mesh is that of tensor parallelism; None for none."""
        if self.group is None or not isinstance(parameter, DTensor):
            return None
        assert self.mesh is not None
        mesh, own = parameter.device_mesh, _ranks(self.mesh, 0)  # an equal mesh that was made before has other groups
        return next((dim for dim in range(mesh.ndim) if _ranks(mesh, dim) == own), None)

    def _undress(self) -> None:
        if self._dressed and has_hooks_of_all_modules():
            raise refused(
                self._dressed[0].name, self._dressed[0].module, "forward hooks are on all modules there are",
                "they come before those of a parallel layer, and would see slices, or a part of a sum",
                "register hooks on the modules that they are for, after parallelize_module",
            )  # fmt: skip
        if not self._own or not all(one.holds() for one in self._own):
            self._read()
        for own in self._own:
            own.place[own.key] = own.local
        for one in self._dressed:
            one.undress()

    def _dress(self) -> None:
        for own in self._own:
            own.place[own.key] = own.parameter
        for one in self._dressed:
            one.dress()

    def _read(self) -> None:
        """The parameters as they lie now."""
        self._own = []
        known = {id(one.module): one for one in self._dressed}
        found: list[_Own] = []
        local: dict[int, nn.Parameter] = {}
        for name, module in self._model.named_modules():
            for key in (key for key, b in module._buffers.items() if isinstance(b, DTensor)):
                raise refused(name, module, f"the buffer {f'{name}.{key}' if name else key} is a DTensor",
                               "buffers are taken to be equal in all processes", PLANS)  # fmt: skip
            for key, p in module._parameters.items():
                if isinstance(p, DTensor):
                    self._check(name, module, key, p, known.get(id(module)))
                    part: Any = local_part(p)
                    local.setdefault(id(p), slice_of(p))
                    found.append(_Own(module._parameters, key, p, part, local[id(p)]))
        self._own = found

    def _check(self, name: str, module: nn.Module, key: str, p: Any, one: ParallelLayer | None) -> None:
        """Refuse a DTensor that does not lie as the style of its layer says."""
        full = f"{name}.{key}" if name else key
        assert self.group is not None
        if one is None or key not in one.cut or p.device_mesh.ndim != 1 or self.mesh_dim(p) is None:
            raise refused(name, module, f"the parameter {full} is a DTensor that lies as {_placed(p)}",
                           "it is not as parallelize_module would have left it", PLANS)  # fmt: skip
        dim, wanted = self.dim_of(p), one.cut[key]
        if dim != wanted:
            raise refused(name, module, f"the parameter {full} is a DTensor that lies as {_placed(p)}",
                           f"{one.style.kind} leaves it cut along dim {wanted}", PLANS)  # fmt: skip
        if dim is not None and p.shape[dim] % self.group.size:
            raise refused(
                name, module, f"the parameter {full} has {p.shape[dim]} entries along dim {dim}, for {self.group.size} "
                "processes", "the slices would be of different sizes", "choose sizes that the mesh divides",
            )  # fmt: skip
        if p._backward_hooks:
            raise refused(name, module, f"{full} has a hook on its gradient", "a step would not call it",
                           "remove the hook, and apply it to what the step returns")  # fmt: skip


def said_of_slices(gm: GraphModule, size: int) -> str:
    """What a process sends in a step."""
    sent: dict[str, int] = {}
    for node in gm.graph.nodes:
        name = getattr(node.target, "_opname", "") if node.op == "call_function" else ""
        if getattr(node.target, "namespace", "") == "_c10d_functional" and name != "wait_tensor":
            sent[name] = sent.get(name, 0) + 1
    listed = ", ".join(f"{count} {name}" for name, count in sent.items())
    slices = SLICES.found(gm)
    count = 0 if slices is None else len(slices.parameters)
    return (
        f"Tensor parallel: {count} parameters are sliced over {size} processes, which compute the same samples "
        f"together; the graph has {listed or 'no collectives'}, the same in each"
    )


def _ranks(mesh: Any, dim: int) -> list[int]:
    """The processes that this one has beside it along a dim of a mesh."""
    return dist.get_process_group_ranks(mesh.get_group(dim))


def _placed(p: Any) -> str:
    return f"{tuple(map(str, p.placements))} on {list(p.device_mesh.shape)} processes"
