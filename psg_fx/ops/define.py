"""How an op of psg_fx is defined: what computes it, its shapes, and the same in ops of torch alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from psg_fx.op_table import operator
from psg_fx.torch_private import native

_LIBRARY = torch.library.Library("psg_fx", "FRAGMENT")
_FUNCTIONS = torch.library.Library("psg_fx_functions", "FRAGMENT")
_NUMBERS = itertools.count()
_OF_TORCH: dict[OpOverload, Callable[..., Any]] = {}
_LIBRARIES: dict[Any, str] = {}
_LAYOUTS: dict[Any, Callable[[torch.Tensor], bool]] = {}
_LATER: dict[str, Callable[[], Any]] = {}


def define_op(
    schema: str, run: Callable[..., Any], shapes: Callable[..., Any], of_torch: Callable[..., Any] | None = None,
    library: str | None = None, layout: Callable[[torch.Tensor], bool] | None = None,
) -> Any:  # fmt: skip
    """The op `psg_fx::name`.  shapes: what it returns, without values, all contiguous; whatever `run` makes is so, too,
    since inductor holds both against each other.  of_torch: what a graph that leaves psg_fx has in its place, where
    `run` cannot be traced.  library: of psg_fx's own in C++, which `run` calls; compiled with a graph that has the op.
    layout: whether a tensor lies as `run` reads it, which makes others contiguous first; in a compiled graph they are
    (`passes/compile/contiguous.py`).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _contiguous(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"psg_fx::{name}", shapes, lib=_LIBRARY)
    op = getattr(torch.ops.psg_fx, name).default
    _OF_TORCH[op] = of_torch or run
    if library:
        _LIBRARIES[op] = library
    if layout:
        _LAYOUTS[op] = layout
    return op


def is_own(op: Any) -> bool:
    """Whether it is an op of psg_fx: autograd takes what it returns for constants."""
    return op in _OF_TORCH


def layout_of(op: Any) -> Callable[[torch.Tensor], bool] | None:
    """Whether a tensor lies as the op reads it; None: it reads all."""
    return _LAYOUTS.get(op)


def begin_libraries(gm: GraphModule) -> None:
    """Begin to compile the libraries in C++ that the ops of a graph call."""
    for library in {_LIBRARIES[node.target] for node in gm.graph.nodes if node.target in _LIBRARIES}:
        native.begin(library)


def _contiguous(run: Callable[..., Any]) -> Callable[..., Any]:
    def contiguous(*arguments: Any) -> Any:
        found = run(*arguments)
        if isinstance(found, torch.Tensor):
            return found.contiguous()
        return type(found)(t.contiguous() for t in found)

    return contiguous


def define_function(
    name: str, inputs: int, outputs: str, run: Callable[..., Any], shapes: Callable[..., Any] | None = None
) -> OpOverload:
    """The op `psg_fx_functions::name_k(Tensor, ..) -> outputs`, another one at each call: a function that is known only
    while a model is captured.  shapes: as above; None: `run` says them.
    """
    name = f"{name}_{next(_NUMBERS)}"
    _FUNCTIONS.define(f"{name}({', '.join(f'Tensor a{i}' for i in range(inputs))}) -> {outputs}")
    _FUNCTIONS.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"psg_fx_functions::{name}", shapes or run, lib=_FUNCTIONS)
    op: OpOverload = getattr(torch.ops.psg_fx_functions, name).default
    _OF_TORCH[op] = run
    return op


def defined_later(define: Callable[[], Any], *names: str) -> None:
    """These ops of psg_fx are defined when they are first wanted, by this function."""
    _LATER.update({f"psg_fx::{name}": define for name in names})


def op_named(key: str) -> OpOverload | None:
    """The op of a key of the table of ops, defined now if it is one of those."""
    if define := _LATER.get(key.partition(".")[0]):
        define()
    return operator(key)


def defined_elsewhere(op: OpOverload, function: Callable[..., Any]) -> None:
    """An op of psg_fx that is not defined here, and what a graph that leaves psg_fx has in its place."""
    _OF_TORCH[op] = function


def of_torch_alone(op: OpOverload) -> Callable[..., Any]:
    """The function of torch's own ops that computes an op of psg_fx."""
    return _OF_TORCH[op]
