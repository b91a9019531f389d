"""`make_fx` for arguments that are fake tensors with symbols already."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.torch_private.patching import patched_here

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


def trace_fakes(function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> GraphModule:
    """`make_fx(function, tracing_mode="symbolic")(*arguments)` for fake tensors, which are not made fake again.

    options: further ones of `make_fx`.
    """

    def run(*args: Any) -> Any:
        with lazy_sizes():
            return function(*args)

    with tracing_symbols(arguments), without_tensor_meta():
        return make_fx(run, **_WITHOUT_TORCH_NAMES, **options)(*_distinct(arguments))


def forgetful_fakes(forgetful: bool) -> contextlib.AbstractContextManager[Any]:
    """Let modes of fake tensors that are made in the meantime remember no results (`remembering_fakes` says why)."""
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False) if forgetful else contextlib.nullcontext()


@contextlib.contextmanager
def remembering_fakes(mode: Any, graph: Graph) -> Iterator[None]:
    """Results of ops on fake tensors are remembered where most ops of the graph are like another one.

    An op that torch remembers costs it twice what it costs otherwise, because each entry is checked when it is made; an
    op that it finds again costs it next to nothing.
    """
    kinds = Counter(_kind(node) for node in graph.nodes if node.op == "call_function")
    before = mode.cache_enabled
    mode.cache_enabled = kinds.total() > 2 * len(kinds)
    try:
        yield
    finally:
        mode.cache_enabled = before


def _kind(node: Node) -> Any:
    """What torch looks up the result of an op by, nearly."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    shapes = tuple(str(v.shape) if isinstance(v, torch.Tensor) else "" for v in values)
    rest = torch.fx.map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, shapes, str(rest)


@contextlib.contextmanager
def without_tensor_meta() -> Iterator[None]:
    """Traced nodes of this thread have `meta["tensor_meta"]` without content: `meta["val"]` says it all, and whether a
    tensor with a symbol among its sizes is contiguous takes long to find out.
    """
    name = "_extract_tensor_metadata"
    if not hasattr(proxy_tensor, name):
        yield
        return
    with patched_here(proxy_tensor, name, lambda *args, **kwargs: None):
        yield


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
        found.append(value.detach() if again else value)
        seen.add(id(value))
    return found
