"""Taking a user's arguments apart: pytrees, and where the samples lie in each tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.plain_objects import looked_into
from psg_fx.program.arguments.batch_dim import BatchDim, dims_of
from psg_fx.program.arguments.call import SAMPLES, Call, check_rows, samples_of
from psg_fx.program.arguments.key import call_key
from psg_fx.program.arguments.packed import Member, padded
from psg_fx.program.arguments.rows import Rows, row_axes
from psg_fx.program.objects import describe, has_own_functions, is_made_of_others
from psg_fx.program.values import Once
from psg_fx.tensors import as_int, has_bits, short_name, written_out
from psg_fx.torch_private.fakes import FakeTensor
from psg_fx.torch_private.modes import has_tangent, is_transformed

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Apart:
    """Takes calls apart: one whose arguments are tensors alone as the last one of as many, of as many dims each; and
    if they are of the same descriptions as those of the call before, what was found out of that one is handed on.
    """

    def __init__(self, batch_dim: BatchDim, positions: Callable[[], Sequence[str]] = tuple) -> None:
        self._batch_dim, self._positions = batch_dim, positions
        self._known: dict[Any, Call] = {}
        self._last: tuple[list[Any], Call] | None = None
        """What was given last, but values, and its call without tensors."""

    def __call__(
        self, inputs: Arguments, targets: Arguments = ((), {}), num_samples: int | None = None
    ) -> Call:  # fmt: skip
        """The call of a model and of a loss with these arguments, positional and by name."""
        given = (*inputs[0], *inputs[1].values(), *targets[0], *targets[1].values())
        last, asked = self._last, None if num_samples is not None else _descriptions(given)
        if asked is not None:
            asked.append((len(inputs[0]), tuple(inputs[1]), len(targets[0]), tuple(targets[1])))
            if last is not None and last[0] == asked:
                return last[1].like(given)
        call = self._anew(inputs, targets, num_samples)
        same = len(call.tensors) == len(given) and all(map(operator.is_, call.tensors, given))
        if asked is not None and same and not call.constants and not call.axes:
            call_key(call)  # so that it is handed on
            self._last = asked, call.like(())
        return call

    def _anew(self, inputs: Arguments, targets: Arguments, num_samples: int | None) -> Call:
        given = (*inputs[0], *targets[0])
        if inputs[1] or targets[1] or not all(isinstance(t, torch.Tensor) for t in given):
            return self._with_numbers(given, inputs, targets, num_samples)
        tensors = tuple(map(written_out, given))
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
        tensors = [written_out(v) for v in given if type(v) is not int]
        for tensor, name in zip(tensors, former.names, strict=False):
            _refuse_other_kinds(tensor, name)
        numbers = [given[k] for k in former.counts]
        constants = tuple((k, None if k in former.counts else given[k]) for k, _ in former.constants)
        call = former.again(tensors, constants, numbers)
        call.batch_size()
        return call

    def _take_apart(self, structure: Any, num_samples: int | None) -> Call:
        return take_apart(structure, self._batch_dim, self._positions, num_samples)


def _descriptions(given: Sequence[Any]) -> list[Any] | None:
    """All of tensors but their values; None where there is something else, or what has no shape or is not written."""
    found = []
    for t in given:
        if not isinstance(t, torch.Tensor) or t.is_nested or has_bits(t) or is_transformed(t) or has_tangent(t):
            return None
        found.append(describe(t))
    return found


def take_apart(
    structure: Any, batch_dim: BatchDim, positions: Callable[[], Sequence[str]] = tuple, num_samples: int | None = None
) -> Call:
    """Flatten `((args, kwargs), (target_args, target_kwargs))`; `batch_dim`: an int or (inputs_dims, targets_dims).

    positions: the names of the model's arguments.  num_samples: as given to the call.
    """
    structure = padded(looked_into(structure))
    paths, spec = pytree.tree_flatten_with_path(structure)
    dims = dims_of(structure, batch_dim, len(paths))
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
        tensors.append(written_out(leaf))
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
    numbers = [value for index, value in constants if index in counts]
    numbers += [] if num_samples is None else [as_int(num_samples)]
    if None in numbers:
        raise BadArgument(
            f"num_samples={num_samples!r} is not a number of samples", where="step(inputs, targets, num_samples=...)",
            why="results have a row for each sample", fix="pass an int",
        )  # fmt: skip
    made = samples_of(tensors, ordinary, axes, numbers)
    call = Call(
        (*tensors, made), (*names, SAMPLES), (*ordinary, 0), inputs, spec,
        tuple((index, None if index in counts else value) for index, value in constants), Once(spec), axes,
        (*places, None), tuple(counts),
    )  # fmt: skip
    check_rows(call)
    return call


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
        kind = short_name(tensor.layout).removeprefix("_").replace("_", " ")
        what = f"of the layout {kind}", "a graph reads strided tensors", f"pass {name}.to_dense()"
    elif tensor.is_quantized:
        what = "quantised", "a graph reads numbers that have gradients, or indices", f"pass {name}.dequantize()"
    elif is_transformed(tensor) or has_tangent(tensor):
        of = "torch.func (vmap, grad, jvp)" if is_transformed(tensor) else "torch.autograd.forward_ad"
        raise NotYetSupported(
            f"{name} is a tensor of {of}", where=f"{name}, {_sizes(tensor)}",
            why="a step is compiled code, which a transformation does not look into",
            fix="call the step outside of it: it has the gradients of all samples at once; for derivatives of what the "
            "model itself returns, transform the model",
        )  # fmt: skip
    elif has_own_functions(tensor):
        kind = type(tensor).__name__
        why = f"a graph has torch's ops, and {kind} has others for some"
        what = f"a {kind}", why, f"pass {name}.as_subclass(torch.Tensor)"
    elif is_made_of_others(tensor):
        kind = type(tensor).__name__
        what = f"a {kind}, a wrapper around other tensors", "a graph reads one block of numbers", "pass a plain tensor"
    elif tensor.is_meta:
        what = "on the meta device", "it has a shape and no values", "pass a tensor on a device that computes"
    elif isinstance(tensor, FakeTensor):
        what = "a fake tensor", "it has a shape and no values", "make it outside of FakeTensorMode"
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
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
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
