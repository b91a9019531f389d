"""The one table of what is known of each op: `psg-fx ops NAME` prints a row, docs/add-an-op.md says what one needs.

A cell is filled by a decorator next to the function that it belongs to, so this file lies low and knows none of them.
A key is an op of torch (`linear.default`, or `linear` for all its overloads), of another library (`mylib::myop`), a
class of ops (`<pointwise>`, `<custom>`), or a Python function of torch, by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from psg_fx.errors import InternalError

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

POINTWISE = "<pointwise>"
"""All ops with torch's own tag `pointwise`, where they have no cell of their own."""
CUSTOM = "<custom>"
"""All custom autograd functions: an op each (`ops/of_users/`), made where a captured model calls one."""


@dataclass(frozen=True)
class GradientRule:
    """function: a site -> the network of each parameter by name.  params: name -> the argument that may hold it, as in
    "1" or "1.0".  Without params (the rule of a class): a site and a position -> the network of that one operand.
    """

    function: Function
    params: Mapping[str, str] | None


@dataclass(frozen=True)
class SampleRule:
    """apply: an op -> where the samples of the output lie, or a refusal.

    proof: the name of the argument, kept in the fact of the value.
    sizes: the rule understands arguments such as `2*B` (views, factories, slices).
    index: the rule may be given the numbers of the samples, `arange(B)`.
    shapes_only: the values of the tensor arguments do not matter (`zeros_like`).
    """

    apply: Function
    proof: str
    sizes: bool = False
    index: bool = False
    shapes_only: bool = False


class Strides(enum.Enum):
    """How an op depends on where its input lies in memory."""

    RESHAPE = "possible for some strides alone: captured as a reshape"
    ROW = "needs neighbours of the last dim side by side: captured with a contiguous copy of its input"
    DERIVATIVE = (
        "it factorizes the transpose of a matrix that lies in order, and so does its derivative, which is traced for "
        "several samples: a slice of one sample may lie in order, too, so that it is captured with a contiguous copy"
    )
    MEANING = "what it means depends on strides: refused"
    CONTIGUOUS = (
        "its kernel takes tensors for contiguous without a look, or refuses others: they are made so where it runs"
    )
    LAST_DIM = "the same of neighbours in the last dim"


class Order(enum.Enum):
    """How the elements of an op's result stand to those of its first argument."""

    SAME = "the same, each in its place: a copy, a cast, or the argument itself"
    RESHAPED = "the same, in the same order, in another shape"


class Batching(enum.Enum):
    """How an op of one sample is done for all of them, where `vmap` would fix the batch size."""

    NEXT_DIM = "the same op, along dim + 1"
    LEADING = "the same op: more leading dims do not matter to it"


def _says(title: str, by: str, without: str) -> Mapping[str, str]:
    """title: what the cell holds.  by: what fills it, and where.  without: what happens if there is none."""
    return {"title": title, "by": by, "without": without}


@dataclass(frozen=True)
class Known:
    """What is known of an op: all that can be said of one."""

    gradient: GradientRule | None = field(default=None, metadata=_says(
        "gradient rule", "@rule in passes/rules/",
        "a parameter among its arguments gets vmap(vjp) of the op, which materialises the gradient of every sample",
    ))  # fmt: skip
    samples: SampleRule | None = field(default=None, metadata=_says(
        "sample rule", "@sample_rule in passes/independence/",
        "refused where samples reach it, unless it is composed of ops that have one, or custom and trusted by the user",
    ))  # fmt: skip
    formula: Function | None = field(default=None, metadata=_says(
        "formula in other ops", "@formula in psg_fx/ops/in_other_ops.py",
        "vmap(vjp) runs the op itself",
    ))  # fmt: skip
    prefix_formula: Function | None = field(default=None, metadata=_says(
        "formula between a parameter and its use",
        "@prefix_formula in psg_fx/ops/in_other_ops.py, psg_fx/ops/across.py, psg_fx/ops/recurrent/of_parameters.py",
        "there, too, the op itself is run (or its formula)",
    ))  # fmt: skip
    decomposition: Function | None = field(default=None, metadata=_says(
        "written out after capture", "@decomposition in passes/capture/",
        "it stays in the captured graph as it is",
    ))  # fmt: skip
    at_capture: Function | None = field(default=None, metadata=_says(
        "run in its place at capture", "@at_capture in passes/capture/ (of Python functions)",
        "what the function of torch does is captured",
    ))  # fmt: skip
    under_autograd: Function | None = field(default=None, metadata=_says(
        "run in its place by differentiation", "@under_autograd in passes/differentiate/, or next to the op",
        "differentiation runs the op itself",
    ))  # fmt: skip
    over_kept_rows: Function | None = field(default=None, metadata=_says(
        "the same where a mask picks rows", "@over_kept_rows in passes/independence/rewriting/sums.py",
        "refused on rows that a mask has picked out of the samples, if it joins them",
    ))  # fmt: skip
    bounds: Function | None = field(default=None, metadata=_says(
        "bounds of its values", "@bounded in passes/independence/bounds.py",
        "an index computed with it may be any number: refused where that can leave the sample",
    ))  # fmt: skip
    strides: Strides | None = field(default=None, metadata=_says(
        "reads strides", "enter(.., strides=) in psg_fx/graph/strides.py",
        "its value is the same wherever its inputs lie in memory",
    ))  # fmt: skip
    order: Order | None = field(default=None, metadata=_says(
        "has its argument's elements", "enter(.., order=) in psg_fx/graph/order.py",
        "its elements are others than those of its first argument, or lie in another order",
    ))  # fmt: skip
    undifferentiated: bool = field(default=False, metadata=_says(
        "draws, without a gradient", "enter(.., undifferentiated=) in passes/sites.py",
        "what it makes of a parameter has a gradient; refused there if it draws at random",
    ))  # fmt: skip
    batching: Batching | None = field(default=None, metadata=_says(
        "for every sample of a loss", "enter(.., batching=) in passes/unreduce/lift.py",
        "vmap runs it for every sample",
    ))  # fmt: skip
    selects: bool = field(default=False, metadata=_says(
        "only selects elements", "enter(.., selects=) in passes/sites.py",
        "what it makes of a parameter is differentiated by autograd, back to the parameter",
    ))  # fmt: skip
    finite: bool = field(default=False, metadata=_says(
        "finite for finite numbers", "enter(.., finite=) in psg_fx/graph/finite.py",
        "what it computes of rows that count nothing is kept from parameters, and is not taken for nothing",
    ))  # fmt: skip
    trusted: bool = field(default=False, metadata=_says(
        "trusted by the user", "psg_fx.trust(op) in the user's code",
        "a custom op needs a sample rule or this word",
    ))  # fmt: skip


_NOTHING = Known()
_ROWS: dict[Any, Known] = {}


def known(target: object) -> Known:
    """All that is known of the target of a node: what is said of this overload, or else of the op."""
    if isinstance(target, OpOverload):
        return _of_overload(target)
    return _NOTHING if isinstance(target, str) else _ROWS.get(target, _NOTHING)


@functools.cache
def _of_overload(target: OpOverload) -> Known:
    own, every = _ROWS.get(key_of(target), _NOTHING), _ROWS.get(_op_name(target), _NOTHING)
    return Known(**{column.name: getattr(own, column.name) or getattr(every, column.name) for column in COLUMNS})


COLUMNS = dataclasses.fields(Known)


def rows() -> Mapping[Any, Known]:
    """The whole table: key -> what is said under it."""
    return _ROWS


def row(key: Any) -> Known:
    """What is said under one key, such as that of a class of ops."""
    return _ROWS.get(key_of(key), _NOTHING)


def key_of(op: Any) -> Any:
    """The key of an op, of an op's name (with or without `aten::`), or of a function."""
    if isinstance(op, OpOverload):
        return f"{_op_name(op)}.{op._schema.overload_name or 'default'}"
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name.removeprefix("aten::")
    return op.removeprefix("aten::") if isinstance(op, str) else op


def _op_name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def printed(key: Any) -> str:
    """The name of a key for people: `aten.linear.default`, `torch.nn.functional.ctc_loss`, `<custom>`."""
    if not isinstance(key, str):
        of_tensors = getattr(torch.Tensor, key.__name__, None) is key
        module = getattr(key, "__module__", None) or "torch"
        return f"{'torch.Tensor' if of_tensors else module}.{key.__name__}"
    return key if key.startswith("<") else key.replace("::", ".") if "::" in key else f"aten.{key}"


def enter(*keys: Any, **cells: Any) -> None:
    """Enter the same for some ops (or names, or functions).  What is known already is not said a second time."""
    for key in map(key_of, keys):
        before = _ROWS.get(key, _NOTHING)
        for name, new in cells.items():
            if (old := getattr(before, name)) and not (old is new is True):
                title = next(c.metadata["title"] for c in COLUMNS if c.name == name)
                raise InternalError(
                    f"{printed(key)} has its {title} already: {_said(old)}, and now {_said(new)}",
                    where=getattr(function_of(new), "__module__", "psg_fx.op_table"),
                    why="of an op, each thing is said once", fix="remove one of the two",
                )  # fmt: skip
        _ROWS[key] = dataclasses.replace(before, **cells)
    _of_overload.cache_clear()


def function_of(cell: Any) -> Any:
    """What a cell says, where that is a function."""
    return getattr(cell, "function", getattr(cell, "apply", cell))


def _said(cell: Any) -> str:
    return str(getattr(function_of(cell), "__name__", cell))


@contextlib.contextmanager
def changed(*keys: Any, **cells: Any) -> Iterator[None]:
    """For a while, other cells for some ops: what a test takes away, or puts in that is wrong."""
    before = dict(_ROWS)
    _ROWS.update({key: dataclasses.replace(_ROWS.get(key, _NOTHING), **cells) for key in map(key_of, keys)})
    _of_overload.cache_clear()
    try:
        yield
    finally:
        _ROWS.clear()
        _ROWS.update(before)
        _of_overload.cache_clear()


def _by(column: str, keys: tuple[Any, ...]) -> Callable[[F], F]:
    def register(function: F) -> F:
        enter(*keys, **{column: function})
        return function

    return register


def formula(*ops: Any) -> Callable[[F], F]:
    """The op in simpler ones with the same gradients, for `vmap(vjp)` to run, whose backward takes any batch size."""
    return _by("formula", ops)


def prefix_formula(*ops: Any) -> Callable[[F], F]:
    """The same, used only between a parameter and its use."""
    return _by("prefix_formula", ops)


def decomposition(*ops: Any) -> Callable[[F], F]:
    """What the op is in the captured graph, written in others."""
    return _by("decomposition", ops)


def at_capture(*functions: Any) -> Callable[[F], F]:
    """What runs in place of a Python function of torch while a model is captured."""
    return _by("at_capture", functions)


def under_autograd(*ops: Any) -> Callable[[F], F]:
    """What differentiation runs in place of the op, because autograd has no backward of it, or a wrong one."""
    return _by("under_autograd", ops)


def over_kept_rows(*ops: Any) -> Callable[[F], F]:
    """(x, kept, ..) -> the same over those rows of x that are kept."""
    return _by("over_kept_rows", ops)


def bounded(*ops: Any) -> Callable[[F], F]:
    """(arguments by name, bounds of an argument) -> the lowest and the highest value."""
    return _by("bounds", ops)


def decompositions() -> dict[OpOverload, Function]:
    """Op -> what it is written as after capture, of the ops that this torch has."""
    found = {}
    for key, said in _ROWS.items():
        if said.decomposition and (op := operator(key)) is not None:
            found[op] = said.decomposition
    return found


def operator(key: str) -> OpOverload | None:
    """The overload that a key names, if this torch has it."""
    library, _, name = key.rpartition("::")
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, library or "aten"), packet, None), overload or "default", None)
    return op if isinstance(op, OpOverload) else None
