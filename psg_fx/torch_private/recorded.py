"""One op of a trace, recorded without what nearly no op needs.

`make_fx` asks of every op whether there are subclasses of tensors, constants, decompositions, script objects or symbols
that nobody has seen among what it reads and gives: half of the time of a trace, and traces are half of a capture.  Here
each op is asked once.  Those that need nothing of it are recorded as `make_fx` records them, and all others by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves

from psg_fx.torch_private.fake_keys import NUMBERS, OF_VALUES, PLAIN
from psg_fx.torch_private.patching import patched_here, seen_here


class _General(Exception):
    """`make_fx` must look at the call."""


_USED = (
    "proxy_call", "track_tensor_tree", "snapshot_fake", "fetch_sym_proxy", "_ProxyTensor", "_build_proxy_for_sym_expr",
)  # fmt: skip


@contextlib.contextmanager
def quickly_recorded() -> Iterator[None]:
    """While open, traces of this thread record plain ops quickly."""
    if not all(hasattr(proxy_tensor, name) for name in _USED):
        yield
        return
    general = seen_here(proxy_tensor, "proxy_call")

    def call(mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer = mode.tracer
        if type(tracer.sympy_expr_tracker) is dict:
            tracer.sympy_expr_tracker = _FirstKept(tracer.sympy_expr_tracker)
        name = _name(func, pre_dispatch)
        if name is None or func in _decomposed(mode) or getattr(mode, "emulate_precision_casts", False):
            return general(mode, func, pre_dispatch, args, kwargs)
        try:
            given = _argument(args, tracer), _argument(kwargs, tracer)
        except _General:
            return general(mode, func, pre_dispatch, args, kwargs)
        node = tracer.create_node("call_function", func, *given, name)
        before, tracer.enable_thunkify = tracer.enable_thunkify, True
        try:
            out = func(*args, **kwargs)
        finally:
            tracer.enable_thunkify = before
        _track(out, Proxy(node, tracer), tracer)
        return out

    with patched_here(proxy_tensor, "proxy_call", call):
        yield


class _FirstKept(dict[Any, Any]):
    """Of each symbol the node that a trace has first: an input's size.

    The number of elements of a tensor may have no node, and is written by the symbols in it; a symbol that is later
    found again as a quotient of that number must not be what it is written by.
    """

    def __setitem__(self, symbol: Any, node: Any) -> None:
        self.setdefault(symbol, node)


class Copied:
    """Records ops of the trace that runs whose results on fake tensors are known.

    kept: composite ops that the trace does not write in others.
    """

    def __init__(self, kept: Container[Any]) -> None:
        self._kept = kept
        self._sizes: dict[Any, torch.SymInt] = {}

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Record a plain op; whether that is possible."""
        mode = proxy_tensor.get_proxy_mode()
        name = func.overloadpacket.__name__ if func in self._kept and _is_kept(func) else _name(func, False)
        if mode is None or name is None or func in _decomposed(mode):
            return False
        tracer: Any = mode.tracer
        tensors = [value for value in tree_leaves(out) if isinstance(value, FakeTensor)]
        if any(tensor in tracer.tensor_tracker for tensor in tensors):
            return False
        try:
            given = _argument(args, tracer), _argument(kwargs, tracer)
        except _General:
            return False
        for tensor in tensors:
            self._know_sizes(tensor, tracer)
        _track(out, Proxy(tracer.create_node("call_function", func, *given, name), tracer), tracer)
        return True

    def saw(self, value: Any) -> None:
        """A value that the trace has: a size of it is a size of what comes later."""
        for size in (*value.shape, *value.stride()) if isinstance(value, FakeTensor) else (value,):
            if type(size) is torch.SymInt:
                self._sizes.setdefault(size.node.expr, size)

    def _know_sizes(self, tensor: Any, tracer: Any) -> None:
        """The trace knows a size by its object, where it was met first: those of known results are others."""
        for size in (*tensor.shape, *tensor.stride()):
            if type(size) is torch.SymInt and size not in tracer.symnode_tracker:
                first = self._sizes.get(size.node.expr)
                if first is not None and first in tracer.symnode_tracker:
                    tracer.symnode_tracker[size] = tracer.symnode_tracker[first]


_TABLE = "decomposition_table"


def _decomposed(mode: Any) -> Mapping[Any, Any]:
    """The ops that are traced as others: of the mode since torch 2.13, of all modes in 2.11, of the context in 2.12."""
    owner, name = (mode, _TABLE) if hasattr(mode, _TABLE) else (proxy_tensor, f"CURRENT_{_TABLE.upper()}")
    found: Mapping[Any, Any] | ContextVar[Mapping[Any, Any]] = getattr(owner, name)
    return found.get({}) if isinstance(found, ContextVar) else found


_NAMES: dict[tuple[Any, bool], str | None] = {}
_LEFT = {
    "lift_fresh", "lift_fresh_copy", "is_nonzero", "size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
}  # fmt: skip


def _name(func: Any, pre_dispatch: bool) -> str | None:
    """How nodes of an op are named; None for ops that are not plain."""
    key = (func, pre_dispatch)
    if key not in _NAMES:
        _NAMES[key] = func.overloadpacket.__name__ if _is_plain(func, pre_dispatch) else None
    return _NAMES[key]


def _is_kept(func: Any) -> bool:
    """Whether a node of the op is all that a trace has of it, unless the op is composite."""
    if not isinstance(func, OpOverload) or func._schema.is_mutable or OF_VALUES.intersection(func.tags):
        return False
    return func.namespace in ("aten", "prims") and func._opname not in _LEFT


def _is_plain(func: Any, pre_dispatch: bool) -> bool:
    if not _is_kept(func):
        return False
    composite = DispatchKey.CompositeImplicitAutograd
    decomposes = composite in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return pre_dispatch or not decomposes


def _argument(value: Any, tracer: Any) -> Any:
    """The argument of the node that stands for an argument of the op."""
    kind = type(value)
    if kind in PLAIN or kind in NUMBERS:
        return value
    if kind is FakeTensor:
        slot = tracer.tensor_tracker.get(value)
        if slot is None or slot.constant is not None:
            raise _General
        return slot.proxy.node
    if kind is torch.SymInt:
        found = proxy_tensor.fetch_sym_proxy(tracer)(value)
        return found.node if isinstance(found, Proxy) else found
    if isinstance(value, (tuple, list)):
        return type(value)([_argument(v, tracer) for v in value])
    if isinstance(value, Mapping):
        return {k: _argument(v, tracer) for k, v in value.items()}
    raise _General


def _track(out: Any, proxy: Proxy, tracer: Any) -> None:
    """What is made is known by the node."""
    if type(out) is not FakeTensor or _has_new_symbols(out, tracer):
        proxy_tensor.track_tensor_tree(out, proxy, constant=None, tracer=tracer)
        return
    if out not in tracer.tensor_tracker or not proxy_tensor._is_proxy_tensor_update_tensor_tracker_disabled():
        tracer.tensor_tracker[out] = proxy_tensor._ProxyTensor(proxy, None)
    proxy.node.meta["val"] = proxy_tensor.snapshot_fake(out)
    proxy.node.meta["tensor_meta"] = None  # without content, but there: inductor's patterns of torch 2.11 look for it


def _has_new_symbols(tensor: Any, tracer: Any) -> bool:
    """Whether a size that may be read of a tensor is not known yet: also where it begins in memory, and how many
    elements it has, where that is not a multiple of one size.
    """
    env = tensor.fake_mode.shape_env
    if env is None:
        return False
    if env.pending_fresh_unbacked_symbols or tensor.layout is not torch.strided:
        return True
    sizes = [size for size in (*tensor.shape, *tensor.stride()) if type(size) is not int]
    offset = tensor.storage_offset()
    if any(size not in tracer.symnode_tracker for size in (*sizes, *([offset] if type(offset) is not int else []))):
        return True
    return len({symbol for size in sizes for symbol in size.node.expr.free_symbols}) > 1
