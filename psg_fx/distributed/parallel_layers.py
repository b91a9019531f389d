"""The layers of a tensor-parallel model on the slices of one process: how the input and the output of each lie, and
what moves them, in place of torch's hooks on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.errors import NotYetSupported
from psg_fx.ops import across
from psg_fx.torch_private.tensor_parallel import Style, hook_name, style_of

PLANS = (
    "plan with ColwiseParallel and RowwiseParallel for nn.Linear and nn.Embedding, "
    "SequenceParallel(use_local_output=True) for nn.LayerNorm and nn.RMSNorm, and leave other layers whole"
)


@dataclass(frozen=True)
class Group:
    """The processes of a mesh of one dim.  name: of the process group."""

    name: str
    size: int


@dataclass(frozen=True)
class _Layout:
    """Of a value on the way between layers: cut along a dim; whole (None); or a part of a sum."""

    dim: int | None = None
    partial: bool = False


def _moved(x: Tensor, source: _Layout, target: _Layout, group: Group) -> Tensor:
    """From one layout to another.  `spread` sees to the gradients of what is equal in all processes."""
    before, after = (None if layout.dim is None else layout.dim % x.ndim for layout in (source, target))
    if before == after and not source.partial:
        return x
    if after is not None:
        _check_even(x, after, group)
    found = x
    if source.partial and after is not None:
        found = across.sum_slice(x, after, group.size, group.name)
    elif source.partial:
        found = across.sum_across(x, group.name)
    else:
        if before is not None:
            found = across.gather(found, before, group.size, group.name)
        if after is not None:
            found = across.own_slice(found, after, group.size, group.name)
    return found


def _check_even(x: Tensor, dim: int, group: Group) -> None:
    if x.shape[dim] % group.size:
        raise NotYetSupported(
            f"a value of {x.shape[dim]} entries along dim {dim} is cut for {group.size} processes",
            where="the plan of parallelize_module", why="the slices would be of different sizes",
            fix="choose sizes that the mesh divides",
        )  # fmt: skip


@dataclass(frozen=True)
class MoveInputs:
    """A forward pre-hook: the first input comes to lie as the layer wants it."""

    given: _Layout
    wanted: _Layout
    group: Group

    def __call__(self, module: nn.Module, args: Any) -> Any:
        said = across.lies(args[0], self.given.dim is not None)
        joined = len(getattr(module, "normalized_shape", ()))
        if joined and self.wanted.dim is not None and self.wanted.dim % said.ndim >= said.ndim - joined:
            raise NotYetSupported(
                f"a norm over the last {joined} dims is cut along dim {self.wanted.dim}", where=type(module).__name__,
                why="its mean is over what other processes have", fix="cut along a dim before those",
            )  # fmt: skip
        return (_moved(said, self.given, self.wanted, self.group),)


@dataclass(frozen=True)
class MoveOutputs:
    """A forward hook: from what the slices of the layer give to what the plan wants; a bias is added once."""

    made: _Layout
    wanted: _Layout
    group: Group

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        found = _moved(output, self.made, self.wanted, self.group)
        bias = getattr(module, "bias", None) if self.made.partial else None
        return found if bias is None else found + bias


def _rowwise_linear(self: Any, input: Tensor) -> Tensor:
    """y = Σ_r x_r W_rᵀ without the sum, and without the bias that comes after: [.., n_r] -> [.., m]."""
    return F.linear(input, self.weight)


def _rowwise_embedding(group: Group, self: Any, input: Tensor) -> Tensor:
    """Rows of the vocabulary's slice, zero for ids of other processes: a part of a sum of which one term is not zero,
    ids [..] -> [.., d].
    """
    count = self.num_embeddings // group.size
    local = input - across.index(input, group.name) * count
    here = (local >= 0) & (local < count)
    rows = F.embedding(torch.where(here, local, 0), self.weight)
    if self.padding_idx is not None:  # rows that take no part in the gradient
        rows = torch.where((input == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(here.unsqueeze(-1), rows, 0.0)


_WEIGHTS: dict[tuple[str, type], tuple[dict[str, int | None], _Layout, _Layout]] = {
    ("ColwiseParallel", nn.Linear): ({"weight": 0, "bias": 0}, _Layout(), _Layout(-1)),
    ("RowwiseParallel", nn.Linear): ({"weight": 1, "bias": None}, _Layout(-1), _Layout(partial=True)),
    ("ColwiseParallel", nn.Embedding): ({"weight": 1}, _Layout(), _Layout(-1)),
    ("RowwiseParallel", nn.Embedding): ({"weight": 0}, _Layout(), _Layout(partial=True)),
    ("SequenceParallel", nn.LayerNorm): ({"weight": None, "bias": None}, _Layout(), _Layout()),
    ("SequenceParallel", nn.RMSNorm): ({"weight": None}, _Layout(), _Layout()),
}  # fmt: skip
"""A style and a layer: along which dim each parameter is cut, how its input must lie, and how its output lies."""


@dataclass
class ParallelLayer:
    """A parallel layer, and what it is while a step runs: a forward of its own, and hooks in place of torch's.

    cut: the dim along which each parameter is cut.  forward: on the slices, where it is another one.  hooks: where each
    hook is, torch's, and the one of a step.
    """

    module: Any
    name: str
    style: Style
    cut: Mapping[str, int | None]
    forward: Callable[[Tensor], Tensor] | None
    hooks: tuple[tuple[dict[int, Any], int, Any, Any], ...]

    def undress(self) -> None:
        """On slices from now on.  Refused where a hook or forward would see slices, or a part of a sum."""
        if "forward" in vars(self.module):
            raise _has_a_forward(self.name, self.module, self.style)
        before, after = list(self.module._forward_pre_hooks), list(self.module._forward_hooks)
        if before[-1] != self.style.before or after[0] != self.style.after:
            raise refused(
                self.name, self.module, f"a hook is between {self.name} and what torch's tensor parallelism does "
                "around it", "there it would see slices, or a part of a sum",
                "register pre-hooks before parallelize_module, and hooks after it",
            )  # fmt: skip
        if self.forward is not None:
            self.module.__dict__["forward"] = self.forward
        for hooks, key, _, moves in self.hooks:
            hooks[key] = moves

    def dress(self) -> None:
        """As it was."""
        if self.forward is not None and vars(self.module).get("forward") is self.forward:
            del self.module.__dict__["forward"]
        for hooks, key, of_torch, _ in self.hooks:
            hooks[key] = of_torch


def parallel_layer(name: str, module: nn.Module) -> ParallelLayer:
    """How a layer runs on slices; refused where that is not known."""
    style = style_of(module)
    if style is None:
        raise refused(
            name, module, f"{name or 'the model'} has the hook {hook_name(module)} of torch.distributed",
            "of the styles of parallelize_module, ColwiseParallel, RowwiseParallel and SequenceParallel are known",
            PLANS,
        )  # fmt: skip
    layer: Any = next((k for kind, k in _WEIGHTS if kind == style.kind and isinstance(module, k)), None)
    if layer is None or type(module).forward is not layer.forward or "forward" in vars(module):
        raise _has_a_forward(name, module, style)
    if not style.local_output:
        raise refused(name, module, f"{name} gives a DTensor (use_local_output=False)",
                       "a step computes with plain tensors", "say use_local_output=True")  # fmt: skip
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
        raise refused(name, module, f"the embedding {name} has {option}",
                       "it depends on whole rows or on all tokens", f"leave {option} out")  # fmt: skip
    group = group_of(style.mesh)
    cut, wanted, made = _WEIGHTS[style.kind, layer]
    given, result = _layout(name, module, style.given), _layout(name, module, style.outputs)
    if style.kind == "SequenceParallel":
        wanted = made = given
    before, after = module._forward_pre_hooks, module._forward_hooks
    hooks = (
        (before, style.before, before[style.before], MoveInputs(given, wanted, group)),
        (after, style.after, after[style.after], MoveOutputs(made, result, group)),
    )
    forward: Callable[[Tensor], Tensor] | None = None
    if style.kind == "RowwiseParallel":
        forward = partial(_rowwise_linear if layer is nn.Linear else partial(_rowwise_embedding, group), module)
    return ParallelLayer(module, name, style, cut, forward, hooks)


def _has_a_forward(name: str, module: nn.Module, style: Style) -> NotYetSupported:
    patched = ", with another forward," if "forward" in vars(module) else ","
    return refused(name, module, f"{name} is a {type(module).__name__}{patched} in {style.kind}",
                   "a forward of its own may do anything with slices", PLANS)  # fmt: skip


def _layout(name: str, module: nn.Module, placement: Any) -> _Layout:
    if placement.is_replicate():
        return _Layout()
    if type(placement).__name__ == "Shard":
        return _Layout(int(placement.dim))
    raise refused(name, module, f"{name} has the layout {placement}", "values are whole, or cut along a dim",
                   "use Replicate() or Shard(dim)")  # fmt: skip


def group_of(mesh: Any) -> Group:
    """The processes of a mesh."""
    return Group(mesh.get_group().group_name, mesh.size())


def refused(name: str, module: nn.Module, what: str, why: str, fix: str) -> NotYetSupported:
    """The refusal of a layer, named by its path and class."""
    kind = type(module).__name__
    return NotYetSupported(what, where=f"{name} ({kind})" if name else kind, why=why, fix=fix)
