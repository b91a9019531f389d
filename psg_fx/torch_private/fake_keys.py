"""What the result of an op on fake tensors depends on, as a key (`remembered.py`)."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Cannot(Exception):
    """The result is not remembered."""


_KNOWLEDGE: dict[Hashable, int] = {}
"""What is known of symbols -> a number that stands for it, and for nothing else ever."""
_numbers = itertools.count(1)


class Knowledge:
    """What is known of the symbols of one capture, as long as nothing is added."""

    def __init__(self, env: Any) -> None:
        self.env = env  # also so that its id stays its own
        self.number = 0
        if env is None:
            return
        self.ranges, self.counts = list(env.var_to_range.values()), _counts(env)
        values = values_of(env)
        if env._translation_validation_enabled:
            self.number = -1
            return
        asserts = [(s, tuple(a.expr for a in found)) for s, found in env.deferred_runtime_asserts.items()]
        full = (
            tuple(values.items()), tuple(env.var_to_range.items()), tuple(g.expr for g in env.guards),
            tuple(env.axioms.items()), frozenset(env.replacements.items()), frozenset(env.divisible), tuple(asserts),
            env.settings, frozenset(env.size_like), tuple(env.unbacked_renamings.items()),
            tuple(env.unbacked_alloc_order.items()),
        )  # fmt: skip
        if full not in _KNOWLEDGE:
            _KNOWLEDGE[full] = next(_numbers)
        self.number = _KNOWLEDGE[full]

    def is_of(self, env: Any) -> bool:
        """Whether nothing was added since."""
        if env is None:
            return True
        ranges = env.var_to_range.values()
        same = len(ranges) == len(self.ranges) and all(map(operator.is_, self.ranges, ranges))
        return same and self.counts == _counts(env)


def _counts(env: Any) -> tuple[int, ...]:
    return (
        len(env.guards), len(env.axioms), len(env.replacements), len(env.divisible), env.num_deferred_runtime_asserts,
        len(values_of(env)), len(env.size_like), len(env.unbacked_renamings), len(env.unbacked_alloc_order),
    )  # fmt: skip


def forget() -> None:
    """All that is known: what is stored by the numbers that stand for it is forgotten as well."""
    _KNOWLEDGE.clear()


def values_of(env: Any) -> dict[sympy.Symbol, sympy.Integer]:
    """The values of symbols in the example."""
    found: dict[sympy.Symbol, sympy.Integer]
    found = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return found


def settings_of(func: Any) -> tuple[Hashable, ...]:
    """What kernels of torch read beside their arguments."""
    python = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
    return (op_implementations_dict.get(func), python, *[ask() for ask in _ASKED])


_SETTINGS = (
    "get_default_dtype", "_get_default_device", "is_inference_mode_enabled", "is_grad_enabled",
    "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
    "_get_cudnn_enabled", "_get_mkldnn_enabled", "_get_deterministic_algorithms", "_is_any_autocast_enabled",
    "_dispatch_tls_is_dispatch_key_included",
)  # fmt: skip
_ASKED: tuple[Callable[[], Hashable], ...] = tuple([getattr(torch._C, name, int) for name in _SETTINGS[:-1]])
_OF_SYMBOLS = (
    "guards", "axioms", "replacements", "divisible", "num_deferred_runtime_asserts", "deferred_runtime_asserts",
    "var_to_range", "settings", "_translation_validation_enabled", "size_like", "unbacked_renamings",
    "unbacked_alloc_order",
)  # fmt: skip


@functools.cache
def is_available() -> bool:
    """Whether this torch has all that is asked here."""
    env = ShapeEnv()
    values = hasattr(env, "backed_var_to_val") or hasattr(env, "var_to_val")
    return (
        values and all(hasattr(env, name) for name in _OF_SYMBOLS) and all(hasattr(torch._C, n) for n in _SETTINGS)
        and hasattr(FakeTensorMode, "dispatch") and _HANDLED is not None
    )  # fmt: skip


PLAIN = frozenset({str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
NUMBERS = frozenset({int, float, bool, complex})


class Operands:
    """The tensors and symbols among the arguments of an op, in order."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.found: list[Any] = []
        self.symbols: dict[int, int] = {}

    def described(self, value: Any) -> Hashable:
        """All that a result depends on of an argument, which symbols are the same ones included."""
        kind = type(value)
        if kind in PLAIN:
            return value  # type: ignore[no-any-return]
        if kind in NUMBERS:
            return kind, value
        if kind is FakeTensor:
            return self._tensor(value)
        if kind is torch.SymInt:
            self.found.append(value)
            return torch.SymInt, self._size(value)
        if isinstance(value, (tuple, list)):
            return tuple([self.described(v) for v in value])
        if kind is dict:
            return tuple([(k, self.described(v)) for k, v in value.items()])
        raise Cannot

    def _tensor(self, value: Any) -> Hashable:
        if value.fake_mode is not self.mode or value.constant is not None or value.layout is not torch.strided:
            raise Cannot
        if value.real_tensor is not None:
            raise Cannot
        self.found.append(value)
        return (
            value.dtype, value.fake_device, tuple([self._size(s) for s in value.shape]),
            tuple([self._size(s) for s in value.stride()]), self._size(value.storage_offset()),
            value.requires_grad, value.is_conj(), value.is_neg(),
        )  # fmt: skip

    def _size(self, size: Any) -> Any:
        if type(size) is int:
            return size
        return size.node.expr, self.symbols.setdefault(id(size.node), len(self.symbols))


def size_key(size: Any) -> Any:
    """A size as it is written."""
    return size if type(size) is int else (size.node.expr,)


_FUNCTIONS: dict[Any, bool] = {}


def is_function(func: Any) -> bool:
    """Whether the op's result is a function of the key, as far as the op says."""
    found = _FUNCTIONS.get(func)
    if found is None:
        found = _FUNCTIONS[func] = (
            isinstance(func, OpOverload) and func.namespace in ("aten", "prims") and not func._schema.is_mutable
            and not OF_VALUES.intersection(func.tags) and func.overloadpacket not in _LEFT
            and func not in (_HANDLED or ())
        )  # fmt: skip
    return found


OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
aten = torch.ops.aten
_LEFT = {
    aten.detach, aten.alias,  # as fast as any memory
    aten.as_strided, aten.as_strided_scatter, aten._reshape_alias,  # look at how much memory there is
    aten.lift_fresh, aten.lift_fresh_copy,  # make constants
}  # fmt: skip
_TABLES = ("_DISPATCH_META_HANDLERS", "_DISPATCH_HANDLE_DIRECTLY")
_HANDLED: set[Any] | None = (
    {op for table in _TABLES for op in getattr(fake_tensor, table)}
    if all(hasattr(fake_tensor, table) for table in _TABLES)
    else None
)
"""Questions to a tensor, answered at once."""
