"""`psg_fx.load`: a file of `step.export` as a function of parameters, inputs and targets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument, first_line
from psg_fx.program.arguments.call import SAMPLES, Call
from psg_fx.program.arguments.conditions import require
from psg_fx.program.arguments.packed import padded
from psg_fx.program.arguments.rows import Place
from psg_fx.program.values import Once
from psg_fx.quantities.clipped_sum import bounds_of
from psg_fx.saved.spec import Entry, OfRows, Spec, names_of_sizes, sizes
from psg_fx.saved.write import SPEC
from psg_fx.step.arguments import ABSENT, as_arguments
from psg_fx.step.binding import failed_check
from psg_fx.step.compiled import StepOutput
from psg_fx.step.constants import as_tensor
from psg_fx.step.finite import with_finite_sum
from psg_fx.tensors import apart_from, short_name, written_out
from psg_fx.torch_private.packages import Runner, load_compiled, text_in

_CALL = "loaded(params, inputs, targets)"
_OF_INDEX = re.compile(r"\bout of (bounds|range)\b")


def load(path: str | os.PathLike[str]) -> LoadedStep:
    """The step that `step.export` has written.

    Raises:
        BadArgument: there is no such file, it is no package of psg_fx, or one of another version's format.
    """
    try:
        target = Path(path)
        text = text_in(str(target), SPEC)
    except (OSError, BadZipFile, TypeError) as error:
        raise _no_step(path, f"{type(error).__name__}: {error}") from error
    if text is None:
        raise _no_step(target, f"it is an archive without {SPEC}")
    return LoadedStep(Spec.from_json(text), load_compiled(str(target)), target)


def _no_step(path: Any, why: str) -> BadArgument:
    return BadArgument(f"{path!s} is no file of a step", where="psg_fx.load(path)", why=why,
                       fix="pass what step.export has written")  # fmt: skip


class LoadedStep:
    """A step without its model: `loaded(params, inputs, targets, **given)` -> the output that the step would give.

    spec: what the file says of its inputs and outputs.  It is pickled as the path of its file.
    """

    def __init__(self, spec: Spec, runner: Runner, path: Path) -> None:
        self.spec, self._runner, self._path = spec, runner, path
        self._structure = pytree.treespec_loads(spec.call)
        self._rows_of_one = (1,) * (0 if spec.rows is None else len(spec.rows.axes))

    def __reduce__(self) -> Any:
        return load, (self._path,)

    def __call__(
        self, params: Mapping[str, torch.Tensor], inputs: Any, targets: Any = ABSENT, **given: Any
    ) -> StepOutput:
        """Run the step.

        params: parameters and buffers by name, as in `model.state_dict()`; further names are not read.
        inputs, targets: arranged as those that the step was exported with, of any number of samples.
        given: what the quantities read at a call, as for the step: weights=, directions=; and max_norm=, for another
            bound than that of the export, or other bounds by name; num_samples= where samples are rows and nothing else
            says how many there are.

        Returns the step's output.  Where the model writes buffers, `buffers` has their new values by name.

        Raises:
            BadArgument: a parameter is missing, something has another shape, dtype, device or structure, an index is
                out of range, or a buffer by which code decided at the export has other values.
            SamplesMixed: rows of several samples meet.
        """
        if not isinstance(params, Mapping):
            raise BadArgument(
                f"params is a {type(params).__name__}", where=_CALL, why="they are read by name",
                fix="pass model.state_dict()",
            )  # fmt: skip
        number = given.pop("num_samples", None) if self.spec.rows is not None else None
        call = self._take_apart(as_arguments(inputs), as_arguments(targets), number)
        extras = self._extras(given, call.batch_size())
        held = self.spec.of_kind("parameter", "buffer")
        state = [self._checked(entry, params.get(entry.name), "params") for entry in held]
        self._require_as_decided(params)
        fields = self._fields(self._run(state, call, extras))
        if self.spec.drop:

            def again(call: Call, extras: Mapping[str, torch.Tensor]) -> StepOutput:
                return StepOutput(self._fields(self._run(state, call, extras)))

            fields = with_finite_sum(again, call, extras, fields) or fields
        if call.batch_size() == 0 and "buffers" in fields:  # no forward ran that would write them
            fields["buffers"] = {name: params[name].clone() for name in fields["buffers"] if name in params}
        return StepOutput(fields)

    def _require_as_decided(self, params: Mapping[str, torch.Tensor]) -> None:
        """Refuse other values of what the code has decided by: the file has the graph of that decision."""
        for name, values in self.spec.decided.items():
            now = params.get(name)
            if isinstance(now, torch.Tensor) and repr(now.detach().flatten().tolist()) != repr(list(values)):
                raise BadArgument(
                    f"{name} has other values than at the export", where=f"{_CALL}: params",
                    why="the code decides by them, and the file has the graph of what was decided",
                    fix="export the step again, with these values",
                )  # fmt: skip

    def _take_apart(self, inputs: Any, targets: Any, num_samples: int | None) -> Call:
        leaves, structure = pytree.tree_flatten(padded((inputs, targets)))
        rows, entries = self.spec.rows, self.spec.of_kind("input", "target")
        if rows is not None:
            entries = [entry for entry in entries if entry.name != SAMPLES]
        numbers = [leaves[i] for i in (() if rows is None else rows.counts) if i < len(leaves)]
        constants = tuple(
            (i, None if rows is not None and i in rows.counts and type(leaf) is int else leaf)
            for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)
        )  # fmt: skip
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if structure != self._structure or constants != self.spec.constants or len(tensors) != len(entries):
            raise BadArgument(
                "inputs and targets are arranged otherwise than at the export", where=_CALL,
                why=f"the file takes {', '.join(e.name for e in entries)}"
                + "".join(f", and {value!r} in place {place}" for place, value in self.spec.constants),
                fix="pass them in the same tuples and dicts, with the same numbers among them",
            )  # fmt: skip
        dims = tuple(entry.samples for entry in entries)
        own = sum(entry.kind == "input" for entry in entries)
        call = Call(tuple(tensors), tuple(e.name for e in entries), dims, own, structure, constants, Once(structure))
        for entry, tensor in zip(entries, tensors, strict=True):
            if tensor.ndim != len(entry.shape):
                self._checked(entry, tensor, "inputs and targets", 0)
        if rows is not None:
            call = _with_rows(call, rows, entries).again(
                tensors, constants, numbers + [num_samples] * (num_samples is not None)
            )
        sizes_of_call = call.batch_size(), call.row_sizes
        checked = [
            self._checked(e, t, "inputs and targets", *sizes_of_call) for e, t in zip(entries, tensors, strict=True)
        ]
        return replace(call, tensors=(*checked, *call.tensors[len(checked) :]))

    def _extras(self, given: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
        """The further inputs by name; directions are one for each parameter."""
        flat = dict(given)
        directions = flat.pop("directions", {})
        if not isinstance(directions, Mapping):
            raise BadArgument(
                f"directions is a {type(directions).__name__}", where=_CALL, why="there is one for each parameter",
                fix="pass directions={name: tensor}",
            )  # fmt: skip
        flat |= {f"direction.{name}": value for name, value in directions.items()}
        entries = self.spec.of_kind("given")
        if unknown := set(flat) - {entry.name for entry in entries}:
            known = ", ".join(entry.name for entry in entries) or "nothing beside inputs and targets"
            raise BadArgument(
                f"loaded() got {', '.join(sorted(unknown))}", where=_CALL, why="no quantity of the file reads it",
                fix=f"the file reads {known}",
            )  # fmt: skip
        return {entry.name: self._given(entry, flat.get(entry.name), count) for entry in entries}

    def _given(self, entry: Entry, value: Any, count: int) -> torch.Tensor:
        if value is None and entry.default is None:
            raise BadArgument(
                f"{entry.name} is missing", where=_CALL, why="a quantity of the file reads it at every call",
                fix="pass directions={name: tensor}" if entry.name.startswith("direction.") else f"pass {entry.name}=",
            )  # fmt: skip
        dtype = getattr(torch, entry.dtype)
        given = entry.default if value is None else value
        if entry.name == "max_norm" and value is not None:
            by_parameter = [e.name for e in self.spec.outputs if e.field == "clip_factors" and e.name]
            given = bounds_of(value, by_parameter or None)
        tensor = as_tensor(entry.name, given, dtype, torch.device(self.spec.device))
        if value is None or tensor.ndim == 0:
            tensor = tensor.expand(sizes(entry.shape, count))
        return self._checked(entry, tensor, "what is given", count)

    def _checked(
        self, entry: Entry, value: Any, where: str, count: int = 1, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The value in a row, if it is what the file takes: compiled code does not ask."""
        shape = sizes(entry.shape, count, self._rows_of_one if rows is None else rows)
        if not isinstance(value, torch.Tensor):
            found = f"a {type(value).__name__}" if value is not None else "missing"
        elif list(value.shape) != shape:
            found = f"{list(value.shape)}"
        elif value.dtype is not getattr(torch, entry.dtype) or value.device.type != self.spec.device:
            found = f"{short_name(value.dtype)} on {value.device}"
        else:
            return written_out(value.detach()).contiguous()
        raise BadArgument(
            f"{entry.name} is {found}", where=f"{_CALL}: {where}",
            why=f"the file takes {entry.dtype} {shape} on {self.spec.device}",
            fix="pass model.state_dict()" if entry.kind in ("parameter", "buffer") else "pass what the step takes",
        )  # fmt: skip

    def _run(
        self, state: Sequence[torch.Tensor], call: Call, extras: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """All results; every input in the place that the file has for it."""
        held, tensors = iter(state), iter(call.tensors)
        if call.batch_size() == 0:
            return [
                torch.full(sizes(e.shape, 0), -1 if e.kind == "mixing" else 0, dtype=getattr(torch, e.dtype),
                           device=self.spec.device)
                for e in self.spec.outputs
            ]  # fmt: skip
        flat = [
            next(held) if entry.kind in ("parameter", "buffer")
            else extras[entry.name] if entry.kind == "given" else next(tensors)
            for entry in self.spec.inputs
        ]  # fmt: skip
        try:
            with torch.no_grad():
                found: Sequence[torch.Tensor] = self._runner(*flat)
        except RuntimeError as error:
            if self.spec.rows is not None:
                raise _failed_on_rows(error) from error
            if not _OF_INDEX.search(first_line(error)):
                raise
            raise _index_out_of_range(error, call) from error
        return apart_from(flat, found)

    def _fields(self, results: Sequence[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry, value in zip(self.spec.outputs, results, strict=True):
            if entry.kind == "mixing":
                assert self.spec.rows is not None
                require(self.spec.rows.conditions, value)
            elif entry.kind == "check":
                if value.any():
                    raise failed_check(entry.name, entry.field)
            elif entry.kind == "buffer":
                found.setdefault("buffers", {})[entry.name.removeprefix("model.")] = value
            elif entry.kind == "answer" and entry.name:
                found.setdefault(entry.field, {})[entry.name] = value
            else:
                found[entry.field] = value
        return found


def _with_rows(call: Call, rows: OfRows, entries: Sequence[Entry]) -> Call:
    """A call of which some tensors hold rows: where these lie, their shapes in the file say."""
    axes = tuple(axis.read() for axis in rows.axes)
    _, *names = names_of_sizes(len(axes))
    places = [
        next((Place(names.index(str(size)), dim) for dim, size in enumerate(e.shape) if size in names), None)
        for e in entries
    ]
    return replace(
        call, names=(*call.names, SAMPLES), dims=(*call.dims, 0), axes=axes, places=(*places, None), counts=rows.counts
    )


def _failed_on_rows(error: Exception) -> BadArgument:
    return BadArgument(
        "the compiled code failed on this batch", where=_CALL, why=f"it says: {first_line(error)}",
        fix="let ids be numbers of samples, and pointers numbers of rows; the step itself says which row is none",
    )  # fmt: skip


def _index_out_of_range(error: Exception, call: Call) -> BadArgument:
    """By the values of the tensors of whole numbers: the compiled code knows none of their names."""
    whole = [
        f"{name} from {int(t.min())} to {int(t.max())}" for name, t in zip(call.names, call.tensors, strict=True)
        if t.numel() and not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
    ]  # fmt: skip
    return BadArgument(
        "an index is out of range", where=f"{_CALL}: {', '.join(whole) or 'an index that the code computes'}",
        why=re.sub(r"\btmp\d+\b", "index", f"the compiled code says: {first_line(error)}"),
        fix="pass indices below the size of what they index; the step itself says which line reads them",
    )  # fmt: skip
