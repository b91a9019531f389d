"""The ops of `layers.py` in C++ (`lstm.cpp`, `gru.cpp`, `rnn.cpp`), for float32 on a CPU without a projection.

`lstm_here` and its like have the signature and results of `lstm` and its like, whose loops they fall back to where
nothing compiles.  A compiled graph has them in their place (`passes/compile/recurrences.py`).
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from psg_fx.ops.define import define_op, of_torch_alone
from psg_fx.ops.recurrent import layers as recurrent
from psg_fx.tensors import is_contiguous
from psg_fx.torch_private.native import library, passed, threads


def _name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("psg_fx::")


LIBRARIES = {op: _name(op).partition("_")[0] for op in recurrent.LOOPS}
"""An op with a loop -> the library with the loops of its kind of layer: "lstm" of `lstm` and `lstm_backward`."""


class _Sizes(ctypes.Structure):
    """`Sizes` of the file in C++."""

    _fields_ = [(name, ctypes.c_int64) for name in ("steps", "rows", "units", "gates")]


def _here(op: OpOverload, loop: recurrent.Loop) -> OpOverload:
    """The op that computes the same in C++: its tensors, its results, sizes and the number of threads are passed on."""
    name, kind, place = _name(op), LIBRARIES[op], [a.name for a in op._schema.arguments].index("w")

    def run(*arguments: Any) -> Any:
        compiled = library(kind)
        if compiled is None:
            return loop.run(*arguments)
        arguments = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        found = loop.shapes(*arguments)
        made = [found] if isinstance(found, Tensor) else found
        (gated, units), (steps, rows) = arguments[place].shape, arguments[0].shape[:2]
        sizes = _Sizes(steps, rows, units, gated // units)
        getattr(compiled, name)(*map(passed, (*arguments, *made)), ctypes.byref(sizes), threads())
        return found

    schema = str(op._schema).removeprefix("psg_fx::").replace("(", "_here(", 1)
    made: OpOverload = define_op(schema, run, loop.shapes, of_torch_alone(op), kind, is_contiguous)
    return made


HERE = {op: _here(op, loop) for op, loop in recurrent.LOOPS.items()}
"""An op with a loop -> the one in C++."""
