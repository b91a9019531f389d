"""What `torch.distributed.tensor.parallel.parallelize_module` has made of a model, read from its hooks and DTensors.

Nothing of torch.distributed is imported before the user has.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules

from psg_fx.torch_private.sharded import hooks_from, is_from, name_of_hook

_WHOLE = "_psg_fx_whole_shape"
_SIZES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: lambda shape: shape,  # type: ignore[attr-defined]
    torch.Tensor.size: lambda shape, dim=None: shape if dim is None else shape[dim],
    torch.Tensor.__len__: lambda shape: shape[0],
    torch.Tensor.numel: lambda shape: shape.numel(),
    torch.Tensor.nelement: lambda shape: shape.numel(),
    torch.numel: lambda shape: shape.numel(),
}
_TENSOR, _STYLES = "torch.distributed.tensor", "torch.distributed.tensor.parallel.style"


@dataclass(frozen=True)
class Style:
    """How one module is parallelised: the class of torch's, and the layouts that it was given, of one mesh dim.

    before, after: the keys of its hooks among the module's pre-hooks and hooks.
    """

    kind: str
    mesh: Any
    given: Any
    wanted: Any
    outputs: Any
    local_output: bool
    before: int
    after: int


def is_tensor_parallel(model: object) -> bool:
    """Whether a hook of torch's tensor parallelism is on a model, or on a part of it."""
    return isinstance(model, nn.Module) and any(map(hook_name, model.modules()))


def hook_name(module: nn.Module) -> str:
    """The first hook of tensor parallelism on the module itself, "" if there is none."""
    return next(map(name_of_hook, hooks_from(module, _TENSOR)), "") if _TENSOR in sys.modules else ""


def style_of(module: nn.Module) -> Style | None:
    """How the module is parallelised; None where that is not one of the styles that are known."""
    before = [(k, h) for k, h in module._forward_pre_hooks.items() if is_from(h, _TENSOR)]
    after = [(k, h) for k, h in module._forward_hooks.items() if is_from(h, _TENSOR)]
    if len(before) != 1 or len(after) != 1:
        return None
    first, second = _held(before[0][1]), _held(after[0][1])
    inputs: Any = first.get("input_fn")
    outputs: Any = second.get("output_fn")
    mesh: Any = first.get("device_mesh")
    styles: Any = sys.modules.get(_STYLES)
    if styles is None or mesh is not second.get("device_mesh"):
        return None
    keys = before[0][0], after[0][0]
    for kind in ("ColwiseParallel", "RowwiseParallel"):
        style = getattr(styles, kind)
        if _calls(inputs, style._prepare_input_fn, 2) and _calls(outputs, style._prepare_output_fn, 2):
            layouts, local_output = (*inputs.args, outputs.args[0]), outputs.args[1]
            return _style(kind, mesh, layouts, local_output, keys)
    style = styles.SequenceParallel
    if _calls(inputs, style._prepare_input_fn, 1) and _calls(outputs, style._prepare_output_fn, 1):
        return _style("SequenceParallel", mesh, (inputs.args[0],) * 3, outputs.args[0], keys)
    return None


def _style(kind: str, mesh: Any, layouts: Sequence[Any], local_output: Any, keys: tuple[int, int]) -> Style | None:
    if mesh is None or any(len(layout) != 1 for layout in layouts) or mesh.ndim != 1:
        return None
    given, wanted, outputs = (layout[0] for layout in layouts)
    return Style(kind, mesh, given, wanted, outputs, bool(local_output), *keys)


def _held(hook: Any) -> dict[str, Any]:
    """What the closure of a hook holds, by name."""
    return dict(inspect.getclosurevars(hook).nonlocals) if inspect.isfunction(hook) else {}


def _calls(held: Any, function: Any, count: int) -> bool:
    """Whether it is the function with so many arguments."""
    is_partial = isinstance(held, functools.partial) and held.func is function
    return is_partial and len(held.args) == count and not held.keywords


def has_hooks_of_all_modules() -> bool:
    """Whether forward hooks are on all modules there are: they come before those of a layer."""
    return bool(of_modules._global_forward_hooks)


def local_part(parameter: Any) -> torch.Tensor:
    """The tensor in which this process keeps its part of a DTensor."""
    found: torch.Tensor = parameter._local_tensor
    return found


def slice_of(parameter: Any) -> nn.Parameter:
    """This process's part of a DTensor, as a parameter that says to code which reads its sizes that it is whole."""
    found = nn.Parameter(local_part(parameter), parameter.requires_grad)
    if found.shape != parameter.shape:
        setattr(found, _WHOLE, parameter.shape)
    return found


def size_of_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What code that asks a slice of `slice_of` for its sizes is told; None for other calls, and other tensors."""
    if func not in _SIZES or not (shape := args and getattr(args[0], _WHOLE, None)):
        return None
    return _SIZES[func](shape, *args[1:], **kwargs)


def computes_with_a_slice(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call asks a slice of `slice_of` for more than layers do, and than is the same of the whole."""
    values = [*args, *kwargs.values()]
    values += [v for held in values if isinstance(held, (tuple, list)) for v in held]
    if not any(type(v) is nn.Parameter and hasattr(v, _WHOLE) for v in values):
        return False
    name = func.__self__.__name__ if getattr(func, "__name__", "") == "__get__" else getattr(func, "__name__", "")
    return name not in _OF_LAYERS and name not in _SAME_OF_THE_WHOLE


_OF_LAYERS = {"linear", "embedding"}
_SAME_OF_THE_WHOLE = {
    "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "dim", "is_floating_point",
    "is_complex", "element_size", "itemsize", "get_device", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
    "is_nested", "is_inference", "names", "_version", "_backward_hooks", "__hash__",
}  # fmt: skip


def rank_in(group: str) -> int:
    """The place of this process in the group of a name."""
    import torch.distributed as dist

    found: Any = dist.distributed_c10d
    return dist.get_rank(found._resolve_process_group(group))
