"""Calls of single operators: what PyTorch tests its own operators with (`op_db`), and a few written by hand.

Each input of `op_db` is run once, and every operator that it reaches is noted with its arguments: those that export
keeps whole as well as those that they are made of.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

INPUTS, KEPT, LARGEST = 12, 6, 20000
UNSAFE = ("aten::linalg_ldl_solve",)  # it reads outside of memory for pivots that do not belong to its matrix
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)


@dataclass(frozen=True)
class Call:
    """One operator with its arguments."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`mean` or, with its overload, `mean.dim`."""
        return self.op._schema.name.removeprefix("aten::")

    @property
    def drawn(self) -> bool:
        """Whether its values are random or not set, so that only their place can be checked."""
        return torch.Tag.nondeterministic_seeded in self.op.tags or "empty" in self.name

    def leaves(self) -> tuple[list[Any], pytree.TreeSpec]:
        """The flat arguments; the list stays as it is."""
        return self._leaves

    @functools.cached_property
    def _leaves(self) -> tuple[list[Any], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, dict(self.kwargs)))

    def with_leaves(self, leaves: list[Any]) -> Call:
        """The same operator on other arguments."""
        args, kwargs = pytree.tree_unflatten(leaves, self.leaves()[1])
        return Call(self.op, args, kwargs)

    def run(self) -> Any:
        """Its value; the arguments stay as they are."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return self.op(*self.args, **self.kwargs)

    def signature(self) -> str:
        """Two calls with the same one try out the same thing."""
        shown = [tuple(v.shape) if isinstance(v, Tensor) else v for v in self.leaves()[0]]
        return f"{self.op} {shown}"


def table() -> list[Any]:
    """`op_db`, imported so that the settings of this process stay as they are."""
    stub = types.ModuleType("expecttest")  # the module wants it for tests of its own
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    known = sys.modules.get("expecttest")
    with mock.patch("torch.backends.disable_global_flags"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules["expecttest"] = known or stub
        try:
            from torch.testing._internal.common_methods_invocations import op_db
        finally:
            if known is None:
                del sys.modules["expecttest"]
    return list(op_db)


class Notes:
    """The calls of each operator, at most a handful that differ: those of its own entry, and those met elsewhere."""

    def __init__(self) -> None:
        self.own: dict[OpOverload, dict[str, Call]] = {}
        self.met: dict[OpOverload, dict[str, Call]] = {}
        self.entry = ""

    def add(self, op: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note one call; an operator in place is noted as the one that returns its result."""
        functional = functional_form(op)
        if functional is None:
            return
        call = Call(functional, args, kwargs)
        found = (self.own if call.name.strip("_") == self.entry else self.met).setdefault(functional, {})
        if len(found) >= KEPT:
            return
        tensors = [v for v in call.leaves()[0] if isinstance(v, Tensor)]
        if any(t.numel() > LARGEST or t.is_sparse or t.is_quantized for t in tensors):
            return
        if (signature := call.signature()) not in found:
            copied = [v.detach().clone() if isinstance(v, Tensor) else v for v in call.leaves()[0]]
            found[signature] = call.with_leaves(copied)


def functional_form(op: object) -> OpOverload | None:
    """The operator itself, or `add` for `add_`; None where there is none."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.name in UNSAFE:
        return None
    if not op._schema.is_mutable:
        return op
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    found = getattr(getattr(torch.ops.aten, name, None), op._schema.overload_name or "default", None)
    return found if isinstance(found, OpOverload) and not found._schema.is_mutable else None


def _noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    self.notes.add(func, args, kwargs or {})
    return func(*args, **(kwargs or {}))


class Whole(SchemaCheckMode):
    """Notes operators as export sees them: layers and other compositions whole."""

    def __init__(self, notes: Notes) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[arg-type]
        self.notes = notes

    __torch_dispatch__ = _noted


class Parts(TorchDispatchMode):
    """Notes operators as they are carried out."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    __torch_dispatch__ = _noted


@functools.cache
def recorded() -> Mapping[OpOverload, list[Call]]:
    """Every operator that `op_db` reaches on the CPU, with a handful of calls."""
    notes = Notes()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for info in table():
            notes.entry = (info.aten_name or "").strip("_")
            for function in programs(info):
                with Parts(notes), enable_python_dispatcher(), Whole(notes):
                    try:
                        function()
                    except Exception:  # an operator that this machine or this dtype lacks
                        continue
            for function in backward_passes(info):
                with Parts(notes), contextlib.suppress(Exception):
                    function()
    ops = [*notes.own, *(op for op in notes.met if op not in notes.own)]
    found = {op: [*notes.own.get(op, {}).values(), *notes.met.get(op, {}).values()] for op in ops}
    return {op: calls[:KEPT] for op, calls in found.items() if calls}


def programs(info: Any) -> Iterator[Callable[[], Any]]:
    """The inputs of one entry of `op_db`, as functions that run it."""
    dtype = next((d for d in DTYPES if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    for count, sample in enumerate(info.sample_inputs_func(info, "cpu", dtype, False)):
        if count >= INPUTS:
            return
        yield functools.partial(info.op, sample.input, *sample.args, **sample.kwargs)


def backward_passes(info: Any) -> Iterator[Callable[[], Any]]:
    """The backward of each input of one entry of `op_db`."""
    if torch.float64 not in info.supported_backward_dtypes("cpu"):
        return
    for count, sample in enumerate(info.sample_inputs_func(info, "cpu", torch.float64, True)):
        if count >= INPUTS:
            return
        try:
            found = pytree.tree_leaves(info.op(sample.input, *sample.args, **sample.kwargs))
        except Exception:
            continue
        outputs = [o for o in found if isinstance(o, Tensor) and o.requires_grad and o.layout is torch.strided]
        if outputs:
            yield functools.partial(_backward, outputs)


def _backward(outputs: list[Tensor]) -> None:
    torch.autograd.backward(outputs, [o.detach().cos() for o in outputs])
