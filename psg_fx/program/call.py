"""Taking a user's arguments apart and putting them together: pytrees, sample dims, batch size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.program.values import Once

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
BatchDim = Any
"""An int, None, or a prefix pytree of those."""


@dataclass(frozen=True)
class Call:
    """One call's arguments, taken apart.

    tensors: every tensor leaf, inputs first.  names: a readable name for each.  dims: its sample dim or None.
    inputs: how many of them belong to the model's inputs.  spec and constants rebuild the pytrees.
    structure: spec, as a part of a key.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    dims: tuple[int | None, ...]
    inputs: int
    spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    structure: Once

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """((args, kwargs), (target_args, target_kwargs)) with `tensors` in the tensors' places."""
        constants, rest = dict(self.constants), iter(tensors)
        count = len(constants) + len(self.tensors)
        return pytree.tree_unflatten([constants[i] if i in constants else next(rest) for i in range(count)], self.spec)

    def batch_size(self) -> int:
        """The number of samples, on which all inputs must agree."""
        return self._batch_size

    @functools.cached_property
    def _batch_size(self) -> int:
        found = {t.shape[d] for t, d in zip(self.tensors, self.dims, strict=True) if d is not None}
        if len(found) == 1:
            return found.pop()
        sizes = {n: t.shape[d] for n, t, d in zip(self.names, self.tensors, self.dims, strict=True) if d is not None}
        if not sizes:
            raise BadArgument(
                "no input carries the samples", where="transform(batch_dim=...)",
                why="every tensor input has batch_dim None or there is no tensor input",
                fix="give the sample dim of at least one input in batch_dim",
            )  # fmt: skip
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise BadArgument(
            "the inputs disagree on the number of samples", where=listed,
            why="the size in its sample dim is the batch size, and it must be the same for all",
            fix="pass batches of one size, or say where the samples lie: batch_dim=(inputs_dims, targets_dims), "
            "None for what all samples share",
        )  # fmt: skip


class Apart:
    """Takes calls apart: one whose arguments are tensors alone as the last one of as many, of as many dims each."""

    def __init__(self, batch_dim: BatchDim) -> None:
        self._batch_dim = batch_dim
        self._known: dict[Any, Call] = {}

    def __call__(self, inputs: Arguments, targets: Arguments = ((), {})) -> Call:
        """The call of a model and of a loss with these arguments, positional and by name."""
        if inputs[1] or targets[1] or not all(isinstance(t, torch.Tensor) for t in (*inputs[0], *targets[0])):
            return take_apart((inputs, targets), self._batch_dim)
        tensors = (*inputs[0], *targets[0])
        shape = len(inputs[0]), tuple(t.ndim for t in tensors)
        former = self._known.get(shape)
        if former is None:
            call = take_apart((inputs, targets), self._batch_dim)
            self._known[shape] = replace(call, tensors=())
            return call
        for tensor, name in zip(tensors, former.names, strict=True):
            _refuse_other_kinds(tensor, name)
        call = Call(tensors, former.names, former.dims, former.inputs, former.spec, (), former.structure)
        call.batch_size()
        return call


def take_apart(structure: Any, batch_dim: BatchDim) -> Call:
    """Flatten `((args, kwargs), (target_args, target_kwargs))`; `batch_dim`: an int or (inputs_dims, targets_dims)."""
    paths, spec = pytree.tree_flatten_with_path(structure)
    dims = _dims(structure, batch_dim, len(paths))
    tensors, names, kept, constants = [], [], [], []
    inputs = 0
    for index, ((path, leaf), dim) in enumerate(zip(paths, dims, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            constants.append((index, leaf))
            continue
        is_input = path[0].idx == 0  # type: ignore[attr-defined]
        name = _name(path, is_input)
        inputs += is_input
        _refuse_other_kinds(leaf, name)
        tensors.append(leaf)
        names.append(name)
        kept.append(_checked(dim, leaf, name))
    call = Call(tuple(tensors), tuple(names), tuple(kept), inputs, spec, tuple(constants), Once(spec))
    call.batch_size()
    return call


def _refuse_other_kinds(tensor: torch.Tensor, name: str) -> None:
    """Refuse tensors whose samples are not slices of one block of numbers."""
    if tensor.is_nested:
        what = (
            "nested",
            "its samples differ in size, and a graph is for one size",
            ("pad it (torch.nested.to_padded_tensor), and mask the padding in the model and the loss"),
        )
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.").removeprefix("_").replace("_", " ")
        what = f"of the layout {kind}", "a graph reads strided tensors", f"pass {name}.to_dense()"
    elif tensor.is_quantized:
        what = "quantised", "a graph reads numbers that have gradients, or indices", f"pass {name}.dequantize()"
    elif tensor.is_meta:
        what = "on the meta device", "it has a shape and no values", "pass a tensor on a device that computes"
    else:
        return
    raise BadArgument(f"{name} is {what[0]}", where=f"{name}, {_sizes(tensor)}", why=what[1], fix=what[2])


def _sizes(tensor: torch.Tensor) -> str:
    return f"{tensor.size(0)} samples" if tensor.is_nested else f"of shape {tuple(tensor.shape)}"


def _checked(dim: Any, tensor: torch.Tensor, name: str) -> int | None:
    if dim is None:
        return None
    if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
        raise BadArgument(
            f"{name} has no dim {dim} for the samples", where=f"{name} of shape {tuple(tensor.shape)}",
            why=f"batch_dim says that its samples lie in dim {dim}",
            fix="give its sample dim in batch_dim=(inputs_dims, targets_dims), None if all samples share it",
        )  # fmt: skip
    return dim % tensor.ndim


def _name(path: pytree.KeyPath, is_input: bool) -> str:
    rest = path[2:]
    keys = [str(getattr(k, "idx", getattr(k, "key", k))) for k in rest]
    return "_".join(["input" if is_input else "target", *keys])


def _dims(structure: Any, batch_dim: BatchDim, count: int) -> list[Any]:
    """The dim of every leaf, from an int or a prefix pytree."""
    if batch_dim is None or isinstance(batch_dim, int):
        return [batch_dim] * count
    (args, kwargs), (targets, target_kwargs) = structure
    has_targets = bool(targets or target_kwargs)
    if isinstance(batch_dim, (tuple, list)) and len(batch_dim) == 2:
        inputs_dims, targets_dims = batch_dim
    elif not has_targets:
        inputs_dims, targets_dims = batch_dim, None
    else:
        raise _bad_prefix(batch_dim, "it is neither an int nor a pair (inputs_dims, targets_dims)")
    return (
        _side(args, kwargs, inputs_dims, batch_dim)
        + _side(targets, target_kwargs, targets_dims, batch_dim)
    )  # fmt: skip


def _side(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any, whole: Any) -> list[Any]:
    """Dims for positional and keyword values; a tuple goes with positions, a dict with names."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(pytree.tree_leaves((args, kwargs)))
    if isinstance(dims, dict):
        pairs = [(value, _get(dims, key, whole)) for key, value in kwargs.items()]
        if args:
            raise _bad_prefix(whole, "it names keyword arguments, and the inputs are positional")
    else:
        if len(dims) != len(args) or kwargs:
            raise _bad_prefix(whole, f"it has {len(dims)} entries for {len(args)} positional arguments")
        pairs = list(zip(args, dims, strict=True))
    found: list[Any] = []
    for value, prefix in pairs:
        found += _expand(value, prefix, whole)
    return found


def _get(dims: dict[str, Any], key: str, whole: Any) -> Any:
    if key not in dims:
        raise _bad_prefix(whole, f"it has no entry for {key!r}")
    return dims[key]


def _expand(value: Any, prefix: Any, whole: Any) -> list[Any]:
    if prefix is None or isinstance(prefix, int):
        return [prefix] * len(pytree.tree_leaves(value))
    children = list(value.values()) if isinstance(value, dict) else list(value)
    prefixes = [_get(prefix, k, whole) for k in value] if isinstance(value, dict) else list(prefix)
    if len(children) != len(prefixes):
        raise _bad_prefix(whole, "its structure does not match the arguments")
    return [dim for child, p in zip(children, prefixes, strict=True) for dim in _expand(child, p, whole)]


def _bad_prefix(batch_dim: Any, why: str) -> BadArgument:
    return BadArgument(
        f"batch_dim={batch_dim!r} does not fit the arguments", where="transform(batch_dim=...)", why=why,
        fix="give one int for everything, or (inputs_dims, targets_dims), each an int, None, or ints and Nones "
        "arranged like the arguments",
    )  # fmt: skip
