"""Taking a user's arguments apart and putting them together: pytrees, sample dims, batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.program.packed import Member, Pair, padded
from psg_fx.program.rows import Place, RowAxis, Rows, counted, row_axes
from psg_fx.program.values import Once

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
BatchDim = Any
"""An int, None or `Rows`, or a prefix pytree of those."""

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
        made = _samples(tensors, self.dims[:-1], self.axes, numbers)
        call = replace(self, tensors=(*tensors, made), constants=constants)
        _check_rows(call)
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
            raise counted(size, {self.names[i]: given[i].shape[d] for i, d in along})
        return size

    @functools.cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """The number of rows of each axis."""
        return tuple(self.rows(k) for k in range(len(self.axes)))

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

    def __init__(self, batch_dim: BatchDim, positions: Callable[[], Sequence[str]] = tuple) -> None:
        self._batch_dim, self._positions = batch_dim, positions
        self._known: dict[Any, Call] = {}

    def __call__(
        self, inputs: Arguments, targets: Arguments = ((), {}), num_samples: int | None = None
    ) -> Call:  # fmt: skip
        """The call of a model and of a loss with these arguments, positional and by name."""
        given = (*inputs[0], *targets[0])
        if inputs[1] or targets[1] or not all(isinstance(t, torch.Tensor) for t in given):
            return self._with_numbers(given, inputs, targets, num_samples)
        tensors = given
        shape = len(inputs[0]), tuple(t.ndim for t in tensors)
        former = self._known.get(shape)
        if former is None or num_samples is not None:
            call = self._take_apart((inputs, targets), num_samples)
            self._known[shape] = replace(call, tensors=())
            return call
        for tensor, name in zip(tensors, former.names, strict=False):
            _refuse_other_kinds(tensor, name)
        if not former.axes:
            call = Call(tensors, former.names, former.dims, former.inputs, former.spec, (), former.structure)
        else:
            call = former.again(tensors, former.constants, [])
        call.batch_size()
        return call

    def _with_numbers(
        self, given: tuple[Any, ...], inputs: Arguments, targets: Arguments, num_samples: int | None
    ) -> Call:  # fmt: skip
        """A call that has more than tensors: as the last one, if it holds rows, and beside tensors ints alone."""
        whole = (inputs, targets)
        if (
            inputs[1]
            or targets[1]
            or num_samples is not None
            or not all(type(v) is int or isinstance(v, torch.Tensor) for v in given)
        ):
            return self._take_apart(whole, num_samples)
        shape = len(inputs[0]), tuple(-1 if type(v) is int else v.ndim for v in given)
        former = self._known.get(shape)
        if former is None:
            call = self._take_apart(whole, num_samples)
            if call.axes:
                self._known[shape] = replace(call, tensors=())
            return call
        tensors = [v for v in given if type(v) is not int]
        for tensor, name in zip(tensors, former.names, strict=False):
            _refuse_other_kinds(tensor, name)
        numbers = [given[k] for k in former.counts]
        constants = tuple((k, None if k in former.counts else given[k]) for k, _ in former.constants)
        call = former.again(tensors, constants, numbers)
        call.batch_size()
        return call

    def _take_apart(self, structure: Any, num_samples: int | None) -> Call:
        return take_apart(structure, self._batch_dim, self._positions, num_samples)


def take_apart(
    structure: Any, batch_dim: BatchDim, positions: Callable[[], Sequence[str]] = tuple, num_samples: int | None = None
) -> Call:
    """Flatten `((args, kwargs), (target_args, target_kwargs))`; `batch_dim`: an int or (inputs_dims, targets_dims).

    positions: the names of the model's arguments.  num_samples: as given to the call.
    """
    structure = padded(structure)
    paths, spec = pytree.tree_flatten_with_path(structure)
    dims = _dims(structure, batch_dim, len(paths))
    tensors, names, kept, constants, counts = [], [], [], [], []
    inputs = 0
    for index, ((path, leaf), dim) in enumerate(zip(paths, dims, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            constants.append((index, leaf))
            if isinstance(leaf, int) and not isinstance(leaf, bool) and dim == 0:
                counts.append(index)
            continue
        is_input = path[0].idx == 0  # type: ignore[attr-defined]
        name = _name(path, is_input)
        inputs += is_input
        _refuse_other_kinds(leaf, name)
        tensors.append(leaf)
        names.append(name)
        kept.append(_checked(path[-1].dim(dim) if isinstance(path[-1], Member) else dim, leaf, name))
    if any(isinstance(dim, Rows) for dim in kept):
        call = _with_rows(tensors, names, kept, positions(), inputs, spec, constants, counts, num_samples)
    else:
        _require_no_count(num_samples)
        call = Call(tuple(tensors), tuple(names), tuple(kept), inputs, spec, tuple(constants), Once(spec))
    call.batch_size()
    return call


def _with_rows(
    tensors: Sequence[torch.Tensor], names: Sequence[str], dims: Sequence[Any], positions: Sequence[str], inputs: int,
    spec: pytree.TreeSpec, constants: Sequence[tuple[int, Any]], counts: Sequence[int], num_samples: int | None,
) -> Call:  # fmt: skip
    """A call of which some inputs hold rows."""
    rows = [dim if isinstance(dim, Rows) else None for dim in dims]
    ordinary = [None if isinstance(dim, Rows) else dim for dim in dims]
    rows = [None if r is None else replace(r, dim=r.dim % t.ndim) for r, t in zip(rows, tensors, strict=True)]
    axes, places = row_axes(rows, names, positions, dims)
    numbers = [value for index, value in constants if index in counts] + [num_samples] * (num_samples is not None)
    if num_samples is not None and (isinstance(num_samples, bool) or not hasattr(num_samples, "__index__")):
        raise BadArgument(
            f"num_samples={num_samples!r} is not a number of samples", where="step(inputs, targets, num_samples=...)",
            why="results have a row for each sample", fix="pass an int",
        )  # fmt: skip
    made = _samples(tensors, ordinary, axes, numbers)
    call = Call(
        (*tensors, made), (*names, SAMPLES), (*ordinary, 0), inputs, spec,
        tuple((index, None if index in counts else value) for index, value in constants), Once(spec), axes,
        (*places, None), tuple(counts),
    )  # fmt: skip
    _check_rows(call)
    return call


def _samples(
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


def _check_rows(call: Call) -> None:
    """Refuse ids that are no numbers of samples, one for each row."""
    for axis, size in zip(call.axes, call.row_sizes, strict=True):
        if axis.tensor is None:
            continue
        ids, name = call.tensors[axis.tensor], call.names[axis.tensor]
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool)
        if not whole or ids.numel() != max(ids.shape, default=0) or (not axis.rows.offsets and ids.numel() != size):
            raise BadArgument(
                f"{name} is no number of a sample for each row", where=f"{name} of shape {tuple(ids.shape)}",
                why=f"it is {str(ids.dtype).removeprefix('torch.')}, and there are {size} {axis.label}",
                fix="pass a tensor of ints with an entry for each row; psg_fx.Rows.from_offsets(name) for where each "
                "sample begins",
            )  # fmt: skip


def _require_no_count(num_samples: int | None) -> None:
    if num_samples is not None:
        raise BadArgument(
            "num_samples is given without rows", where="step(inputs, targets, num_samples=...)",
            why="the inputs have a dim with a place for each sample, which says how many there are",
            fix="leave it out; or say which inputs hold rows: transform(batch_dim=(psg_fx.Rows(ids), ...))",
        )  # fmt: skip


def _refuse_other_kinds(tensor: torch.Tensor, name: str) -> None:
    """Refuse tensors whose samples are not slices of one block of numbers."""
    if tensor.is_nested:
        what = (
            "nested",
            "its samples differ in size, and a graph is for one size",
            "pad it (torch.nested.to_padded_tensor), and mask the padding in the model and the loss; or pass its rows "
            "and where samples begin, x.values() and x.offsets() of the layout torch.jagged, with "
            "batch_dim=((psg_fx.Rows.from_offsets(1), None), 0)",
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


def _checked(dim: Any, tensor: torch.Tensor, name: str) -> Any:
    if isinstance(dim, Rows):
        _checked(dim.dim, tensor, name)
        return dim
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
    if _is_leaf(batch_dim):
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


def _is_leaf(dim: Any) -> bool:
    return dim is None or isinstance(dim, (int, Rows))


def _side(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any, whole: Any) -> list[Any]:
    """Dims for positional and keyword values; a tuple goes with positions, a dict with names."""
    if _is_leaf(dims):
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
    if _is_leaf(prefix):
        return [prefix] * len(pytree.tree_leaves(value))
    if isinstance(value, Pair):
        raise _bad_prefix(whole, "it has several entries for a PackedSequence, which needs one")
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
