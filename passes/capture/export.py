"""torch.export, with what it would lose put back or refused, and its remarks kept from the user.

Export runs the code on fake tensors (`strict=False`).  Gradient-free regions (`torch.no_grad`) become detached values;
custom autograd functions become ops of their own, because export follows their forward only.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from psg_fx.errors import CaptureFailed, PsgError
from psg_fx.graph import facts
from psg_fx.graph.strides import free_of_strides, refuse_strides
from psg_fx.graph.written_copies import writes_a_copy
from psg_fx.op_table import decomposition, decompositions
from psg_fx.program.changes.effects import require_same_places
from psg_fx.program.decisions.branches import OtherBranch, Readings, watch_the_batch_size
from psg_fx.program.program import Output, Program
from psg_fx.program.state import IN_PLACE
from psg_fx.torch_private.export import (
    calls_that_fail,
    dims_of_vmap,
    modules_named_once,
    own_attributes,
    questions_unseen,
    user_stack_traces,
)
from psg_fx.torch_private.fakes import UnsupportedOperatorException
from psg_fx.torch_private.functional import Functional, functional
from psg_fx.torch_private.graphs import traced_without_code
from psg_fx.torch_private.modes import levels_left_as_found
from psg_fx.torch_private.ops import core_decompositions
from psg_fx.torch_private.quiet import quiet
from psg_fx.torch_private.symbols import rows_for_ops
from psg_fx.torch_private.tracer import traced_quickly

from .constants import constants_that_follow
from .fixed_sizes import join, same_program, values_of
from .functions import (  # noqa: F401  (they say what ops are written as)
    formulas,
    in_bulk,
    losses,
    norms,
    parts,
    pools,
    quantised,
    recurrent_layers,
    rewrites,
    solves,
    stacks,
    under_vmap,
)
from .functions.rewrites import rewritten
from .gradients.custom_backward import keep_custom_backward
from .gradients.derivatives import functional_derivatives
from .gradients.hooks import Hooks
from .gradients.no_grad import detach_no_grad_regions
from .gradients.own_gradients import write_out
from .gradients.writes import seen_by_autograd
from .nothing_picked import arm_fails, require_same_without, without_arms, without_unread_numbers
from .read_numbers import keep_numbers_in_tensors
from .reasons import NOT_ONE_GRAPH, TAKEN_FOR_A_CONSTANT, capture_failed, failure_at, without_shapes
from .sizes_read import require_sizes_of_one, squeezed_for_a_size
from .unbound import require_kept_writes, select_what_is_written

aten = torch.ops.aten
MakeExample = Callable[[int], Sequence[torch.Tensor]]
Rows = Sequence[tuple[int, int] | None]


@dataclass(frozen=True)
class Exported(Functional):
    """A program as functional ATen: parameters, buffers and constants are placeholders like its inputs.

    written_copy: the line that writes where a value may have a copy or not, "" for none.  squeezed: the line of a
    squeeze of which nothing but its size is read.  trims: the line that pads packed sequences to the longest one.
    note: what the user should know of how it was captured.
    one_size: it serves only the batch size of the call.  most: it serves up to so many samples (None: any number).
    """

    written_copy: str = ""
    squeezed: str = ""
    trims: str = ""
    note: str = ""
    one_size: bool = False
    most: int | None = None


def export(
    program: Program, example: MakeExample, dims: Sequence[int | None], sizes: tuple[int, int], rows: Rows = ()
) -> Exported:
    """`program(example(B))` for every batch size B; where only that fails, for one.

    example: the inputs with B samples.  dims: where the samples lie in them.  sizes: one that nothing else equals, and
    that of the call.  rows: of each input, the dim whose size is that of an axis of rows, and the number of the axis;
    of -1: it is B + 1.
    """
    batch = Dim("batch", min=2)
    axes = {axis: batch + 1 if axis < 0 else Dim(f"rows_{axis}", min=2) for _, axis in filter(None, rows)}
    dynamic = _dynamic(dims, batch)
    dynamic = [{place[0]: axes[place[1]]} if place else d for d, place in itertools.zip_longest(dynamic, rows)]
    readings = Readings()
    hooks = Hooks(program.observed)
    with keep_custom_backward(program.observed):
        try:
            with watch_the_batch_size(readings):
                of_all = _functional(program, example(sizes[0]), dynamic, hooks)
            readings.require_one_number()
            return of_all
        except CaptureFailed as failure:
            if axes:  # two sizes that the code ties to one another, or one that it reads: no graph for all sizes
                raise _told(failure, failure) from None
            found = _by_branches(program, example, dims, sizes, readings, hooks)
            return found or _one_size(program, example, dims, sizes, failure, readings, hooks)


def _dynamic(dims: Sequence[int | None], batch: Any) -> list[dict[int, Any]]:
    return [{} if d is None else {d: batch} for d in dims]


def _by_branches(
    program: Program, example: MakeExample, dims: Sequence[int | None], sizes: tuple[int, int], readings: Readings,
    hooks: Hooks,
) -> Exported | None:  # fmt: skip
    """The program up to the largest batch that takes the branches of a batch of one; for all, where larger ones compute
    the same (`if x.shape[0] >= 64: x = x.contiguous()`) and the call is of one.  None: other reasons to fail.
    """
    most = readings.most()
    if most is None or sizes[0] > most:
        return None

    def of_sizes(hint: int, **bounds: int) -> Exported:
        return _functional(program, example(hint), _dynamic(dims, Dim("batch", **bounds)), hooks)

    again = Readings()
    try:
        larger = of_sizes(sizes[0] + most, min=most + 1) if sizes[1] > most else None
        with watch_the_batch_size(again):
            found = of_sizes(sizes[0], min=2, max=most)
    except CaptureFailed:
        return None
    if again.most() != most:
        return None
    if larger is None:
        return replace(found, note=f"one graph for up to {most} samples: {readings.why()}", most=most)
    return found if not program.written and same_program(found, larger) else None


def _one_size(
    program: Program, example: MakeExample, dims: Sequence[int | None], sizes: tuple[int, int],
    failure: CaptureFailed, readings: Readings, hooks: Hooks,
) -> Exported:  # fmt: skip
    """The program at the batch size of the call, its numbers that follow the batch size found by other sizes."""
    size = sizes[1] or sizes[0]  # for no samples, a graph says what is empty, and does not run
    program.several_sizes = True
    found = _functional(program, example(size), [], hooks)  # what fails here does not fail for the batch size
    try:
        gm, line = _by_other_sizes(program, found, example, dims, (size, sizes[0], 1), hooks)
    except PsgError as other:
        raise _told(failure, other) from failure
    branch = f"{failure.what} ({failure.where})" if isinstance(failure, OtherBranch) else failure.why
    loop = f"the code loops over the samples ({line})" if line else ""
    note = f"one graph for each batch size: {loop or readings.why() or branch}"
    return replace(found, graph_module=gm, note=note, one_size=True)


def _told(failure: CaptureFailed, other: PsgError) -> PsgError:
    """What to say where one graph for all sizes fails, and one for a size, too: the branch that another batch takes."""
    return failure.as_known() if isinstance(failure, OtherBranch) else other


def _by_other_sizes(
    program: Program, first: Functional, example: MakeExample, dims: Sequence[int | None],
    sizes: tuple[int, int, int], hooks: Hooks,
) -> tuple[GraphModule, str]:  # fmt: skip
    """What was captured at the first size, its numbers that follow the batch size found by the others: one that nothing
    else equals, and one; and the line of a loop over the samples.
    """
    found, written, output, each = [first], program.written, program.output, list(dict.fromkeys(sizes))
    for n in each[1:]:
        program.output = Output()
        try:
            found.append(_functional(program, example(n), [], hooks))
        except CaptureFailed as failure:
            raise failure_at(failure, n, sizes[0]) from failure
        require_same_places(written, program.written)
    program.written, program.output = written, output
    tensors, samples = values_of(first, example(sizes[1])), iter(dims)
    places = [next(samples) if s.kind is InputKind.USER_INPUT else None for s in first.graph_signature.input_specs]
    return join([f.graph_module for f in found], each, tensors, places, constants_that_follow(found, each))


_CALLER = Program.results.__code__
"""Where model and loss are called."""


def _functional(
    program: Program, examples: Sequence[torch.Tensor], dynamic: list[dict[int, Any]], hooks: Hooks
) -> Exported:
    """`program(examples)` as functional ATen, also where masks that it branches on pick nothing."""
    return without_arms(program, lambda: _with_arms(program, examples, dynamic, hooks))


def _with_arms(
    program: Program, examples: Sequence[torch.Tensor], dynamic: list[dict[int, Any]], hooks: Hooks
) -> Exported:
    try:
        found = _as_it_runs(program, examples, dynamic, hooks)
    except CaptureFailed as failure:
        if failure.why != TAKEN_FOR_A_CONSTANT:
            raise
        with dims_of_vmap():
            found = _as_it_runs(program, examples, dynamic, hooks)
    if program.branches.found:
        return require_same_without(found, program, lambda other: _as_it_runs(other, examples, dynamic, hooks))
    if program.puts_picks:
        without_unread_numbers(found.graph_module)
    return found


def _as_it_runs(
    program: Program, examples: Sequence[torch.Tensor], dynamic: list[dict[int, Any]], hooks: Hooks
) -> Exported:
    """`program(examples)` as functional ATen, differentiable, losses and recurrent layers written out."""
    shapes = (dynamic,) if dynamic else None
    with (
        torch.enable_grad(), _quiet(), user_stack_traces(_CALLER), traced_quickly(), traced_without_code(),
        levels_left_as_found(), hooks.recorded(), rows_for_ops(),
    ):  # fmt: skip
        try:
            with (
                rewritten(bool(program.call.axes)) as padding, seen_by_autograd(), own_attributes(), IN_PLACE,
                functional_derivatives(), program.stand_ins.expected(program), questions_unseen(),
                calls_that_fail(), modules_named_once(),
            ):  # fmt: skip
                exported = torch.export.export(program, (list(examples),), dynamic_shapes=shapes, strict=False)
            select_what_is_written(exported.graph_module)
            detach_no_grad_regions(exported.graph_module)
            require_kept_writes(exported.graph_module)
            copied = writes_a_copy(exported.graph_module)
            if dynamic and not program.call.axes:
                require_sizes_of_one(exported.graph_module)
            squeezed = "" if program.call.axes else squeezed_for_a_size(exported.graph_module)
            found = Exported(
                **vars(functional(exported, decompositions())), written_copy=copied, squeezed=squeezed,
                trims=padding.line,
            )  # fmt: skip
            _require_any_size(found, dynamic)
            hooks.put_in_place(found.graph_module)
            write_out(found.graph_module)
            keep_numbers_in_tensors(found.graph_module)
        except PsgError as error:  # torch.fx writes the graph's own traceback into its text
            raise error.alone() from None
        except UnsupportedOperatorException as error:
            raise without_shapes(error) from error
        except (MemoryError, torch.OutOfMemoryError):  # those who look for a batch size that fits wait for it
            raise
        except Exception as error:
            raise arm_fails(program, error) or capture_failed(error) from error
    refuse_strides(found.graph_module)
    free_of_strides(found.graph_module)
    return found


def _require_any_size(found: Functional, dynamic: Sequence[dict[int, Any]]) -> None:
    """Refuse a graph for one number of samples where it was asked for any: some ops make a number of a symbol when they
    are rewritten, after export has made sure that none is.
    """
    pairs = zip(facts.placeholders(found.graph_module), found.graph_signature.input_specs, strict=True)
    inputs = [node.meta["val"] for node, spec in pairs if spec.kind is InputKind.USER_INPUT]
    for value, dims in zip(inputs, dynamic, strict=False):
        if any(not facts.shape(value)[dim].free_symbols for dim in dims):
            raise CaptureFailed(
                NOT_ONE_GRAPH, where="the model or the loss",
                why="an op of it has functional forms for one batch size only",
                fix="write into tensors by index (x[:, 0] = y), or make new ones by torch.stack and torch.cat",
            )  # fmt: skip


@decomposition(aten.type_as.default)
def _cast(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`value.type_as(other)`, which reads nothing of `other` but its dtype and device."""
    return value.to(other.device, other.dtype)


@decomposition(aten.copy.default)
def _copy(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A write into a view, whose backward is missing."""
    return new.to(old.dtype).expand(old.shape).clone()


_GRID = aten.affine_grid_generator.default  # its backward takes no symbol for the batch size
decomposition(_GRID)(core_decompositions()[_GRID])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export's own remarks from the user: recurrent layers make it warn of attributes that it restores."""
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
        for kept in ("A model attribute .* requires gradient", "The .grad attribute of a Tensor that is not a leaf"):
            warnings.filterwarnings("ignore", kept, UserWarning)  # whoever reads what it holds is refused
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
        yield
