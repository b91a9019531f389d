"""How export is told which composite ops it keeps whole, without asking at every call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._export import utils as _export_utils
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import exported_program

from psg_fx.torch_private.patching import patched_here, seen_here, wrapped_here


@dataclass(frozen=True)
class _Kernels:
    """The Python kernels of a composite op: as they are, and as they are while export keeps the op whole."""

    function: Callable[..., Any]
    plain: dict[Any, Any]
    kept: dict[Any, Any]
    fake: Any


_KERNELS: dict[OpOverload, _Kernels] = {}


@contextlib.contextmanager
def remembered_composites() -> Iterator[None]:
    """Let `run_decompositions` set up the composite ops that it keeps whole as it did the first time.

    Torch asks its dispatcher for them and registers a dozen kernels for each of the 500 at every call, which takes
    longer than the export of a small model.  Ops are asked for again when there are others than before.
    """
    names = ("_collect_all_valid_cia_ops", "_override_composite_implicit_decomp")
    if not all(hasattr(exported_program, name) for name in names):
        yield
        return
    collect, override = (seen_here(exported_program, name) for name in names)

    @contextlib.contextmanager
    def overridden(functions: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
        known = {op: k for op, f in functions.items() if (k := _known(op, f)) is not None}
        others = {op: f for op, f in functions.items() if op not in known}
        plain = {op: dict(op.py_kernels) for op in others}
        with contextlib.ExitStack() as kept:
            with _registered_quickly():
                kept.enter_context(override(others))
            for op, function in others.items():
                _KERNELS[op] = _Kernels(function, plain[op], dict(op.py_kernels), op_implementations_dict[op])
            for op, kernels in known.items():
                _set_kernels(op, kernels.kept)
                op_implementations_dict[op] = kernels.fake
            try:
                yield
            finally:
                for op, kernels in known.items():
                    _set_kernels(op, kernels.plain)
                    op_implementations_dict.pop(op, None)

    found = functools.partial(_composites, collect)
    with (
        patched_here(exported_program, names[0], found),
        patched_here(exported_program, names[1], overridden),
    ):
        yield


_COMPOSITES: dict[tuple[str, ...], set[OpOverload]] = {}


def _composites(collect: Callable[[], set[OpOverload]]) -> set[OpOverload]:
    """What `collect` finds, by the composite ops that torch has registered."""
    registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    if registered not in _COMPOSITES:
        _COMPOSITES.clear()
        with _looked_up_once():
            _COMPOSITES[registered] = collect()
    return _COMPOSITES[registered]


@contextlib.contextmanager
def _registered_quickly() -> Iterator[None]:
    """While open, kernels of ops are registered in this thread without the types of what registers them, which torch
    makes anew for each of the 11,000.
    """

    def made(general: Callable[[OpOverload, Any], Any]) -> Callable[[OpOverload, Any], Any]:
        def quick(op: OpOverload, key: Any) -> Any:
            if type(key) is not torch._C.DispatchKey or key in op.py_kernels:
                return general(op, key)

            def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
                op.py_kernels[key] = kernel
                op._dispatch_cache.clear()
                return kernel

            return register

        return quick

    with wrapped_here(OperatorBase, "py_impl", made):
        yield


@contextlib.contextmanager
def _looked_up_once() -> Iterator[None]:
    """While open, torch looks up the composite ops of all namespaces once, and not again for each namespace."""
    with wrapped_here(_export_utils, "_materialize_cpp_cia_ops", functools.cache):
        yield


def _known(op: OpOverload, function: Callable[..., Any]) -> _Kernels | None:
    found = _KERNELS.get(op)
    same = found is not None and found.function is function and found.plain == op.py_kernels
    return found if same and op not in op_implementations_dict else None


def _set_kernels(op: OpOverload, kernels: dict[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
