"""`make_fx` for arguments that are fake tensors with symbols already."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node, _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.torch_private.patching import patched_here, wrapped_here
from psg_fx.torch_private.recorded import quickly_recorded
from psg_fx.torch_private.remembered import remembered_results

_WITHOUT_TORCH_NAMES: dict[str, Any] = (
    {"_disable_torch_fn_metadata_mode": True}
    if "_disable_torch_fn_metadata_mode" in inspect.signature(make_fx).parameters
    else {}
)
"""Nobody reads which function of `torch` called an op; noting it takes a call of Python around every one."""


def lazy_sizes() -> contextlib.AbstractContextManager[None]:
    """Sizes become nodes where a node reads them, and not for being computed."""
    found = getattr(proxy_tensor, "maybe_enable_thunkify", None)
    return contextlib.nullcontext() if found is None else found()


known_as_before: Callable[[], contextlib.AbstractContextManager[None]] = (
    proxy_tensor._proxy_tensor_disable_update_tensor_tracker
)
"""While open, a tensor that an op returns as it was given (`x.float()` of float32) is still the node that it was: under
`torch.no_grad()` it would be one of a region without gradients from then on.
"""


def trace_fakes(function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> GraphModule:
    """`make_fx(function, tracing_mode="symbolic")(*arguments)` for fake tensors, which are not made fake again.

    options: further ones of `make_fx`.  Without a table of decompositions it is given an empty one: with none, torch
    2.14 writes `detach` as `alias`, and a graph that is differentiated later has lost where its gradients end.
    """
    options.setdefault("decomposition_table", {})

    def run(*args: Any) -> Any:
        with lazy_sizes():
            return function(*args)

    with tracing_symbols(arguments), traced_quickly(), _untouched_modules():
        return make_fx(run, **_WITHOUT_TORCH_NAMES, **options)(*_distinct(arguments))


@contextlib.contextmanager
def traced_quickly() -> Iterator[None]:
    """While open, traces of this thread do without what nobody reads and what is known.  Opened around several traces,
    so that torch is not changed for each of them.
    """
    if getattr(_open, "quickly", False):
        yield
        return
    _open.quickly = True
    try:
        with without_tensor_meta(), remembered_results(), quickly_recorded():
            yield
    finally:
        _open.quickly = False


_open = threading.local()


def recorded_so_far() -> list[Node]:
    """The nodes of the trace that runs."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return list(mode.tracer.graph.nodes)


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node of the trace that runs which stands for a tensor."""
    mode: Any = proxy_tensor.get_proxy_mode()
    known = mode.tracer.tensor_tracker.get(tensor)
    return None if known is None else known.proxy.node


@contextlib.contextmanager
def _untouched_modules() -> Iterator[None]:
    """Tracers of this thread leave `nn.Module` and `math` as they are: here they trace functions of tensors, and each
    change of a class that has thousands of subclasses visits them all.
    """
    patcher: Any = getattr(_symbolic_trace, "_Patcher", None)
    if not (hasattr(patcher, "patch_method") and hasattr(patcher, "visit_once")):
        yield
        return
    original = patcher.patch_method

    def patch_method(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        if cls is not torch.nn.Module:
            original(self, cls, *args, **kwargs)

    with patched_here(patcher, "patch_method", patch_method), patched_here(patcher, "visit_once", lambda *_: False):
        yield


def without_tensor_meta() -> contextlib.AbstractContextManager[None]:
    """Traced nodes of this thread have `meta["tensor_meta"]` without content: `meta["val"]` says it all, and whether a
    tensor with a symbol among its sizes is contiguous takes long to find out.
    """
    return wrapped_here(proxy_tensor, "_extract_tensor_metadata", lambda _: lambda *args, **kwargs: None)


@contextlib.contextmanager
def tracing_symbols(arguments: Sequence[Any]) -> Iterator[None]:
    """What `make_fx` needs around it so that sizes of fake arguments stay symbols."""
    mode: Any = detect_fake_mode(arguments)
    with mode, enable_python_dispatcher():
        yield


def _distinct(values: Sequence[Any]) -> list[Any]:
    """The values, no tensor twice: a tracer would take the second for the first."""
    seen: set[int] = set()
    found = []
    for value in values:
        again = isinstance(value, torch.Tensor) and id(value) in seen
        found.append(proxy_tensor.snapshot_fake(value) if again else value)  # detach(), without a dispatch
        seen.add(id(value))
    return found


@contextlib.contextmanager
def watching_numbers(seen: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `seen(tensor)` whenever, while code is traced, torch itself reads a number out of a tensor, as of one that
    is given in the place of a number: `F.leaky_relu(x, slope)`, `x[:, k]`.  No function mode is told.
    """
    dispatch = proxy_tensor.ProxyTorchDispatchMode.__torch_dispatch__

    def watched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING:
            seen(args[0])
        return dispatch(self, func, types, args, kwargs)

    with patched_here(proxy_tensor.ProxyTorchDispatchMode, "__torch_dispatch__", watched):
        yield


READING = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
"""Ops that read a number out of a tensor."""
