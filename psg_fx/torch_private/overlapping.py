"""What inductor's code writes into, where elements of a tensor share memory: a copy.

An op that writes a part of a value (`index_put`) may take the value's memory where nothing reads that later.  Of rows
that are expanded, or windows (`unfold`), each write is then seen in all that lie there.  Passes before have dropped ops
that change no number (`* ones_like(h)`), but lay such a value out: it is looked at behind them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from psg_fx.torch_private.patching import wrapped_here

_CLONE = torch.ops.aten.clone.default
_IN_ORDER: dict[str, Any] = {"memory_format": torch.contiguous_format}


def may_overlap(value: Tensor) -> bool:
    """Whether elements share memory; so they may where symbolic sizes leave it open."""
    steps = [(_expression(stride), _expression(size)) for stride, size in zip(value.stride(), value.shape, strict=True)]
    reach = sympy.Integer(1)  # of the dims that lie closer
    for stride, size in sorted(filter(lambda step: step[1] != 1, steps), key=lambda step: _at_some_sizes(step[0])):
        if not (stride - reach).expand().is_nonnegative:
            return True
        reach += (size - 1) * stride
    return False


@contextlib.contextmanager
def written_apart() -> Iterator[None]:
    """While open, what this thread has inductor write into has memory of its own for each element."""
    from torch._inductor.fx_passes import reinplace  # slow to import, and only who compiles needs it

    writes = {*reinplace.inplaceable_ops, getattr(reinplace, "_generalized_scatter", None)}

    def apart(original: Callable[[Graph], None]) -> Callable[[Graph], None]:
        def core(graph: Graph) -> None:
            for node in graph.nodes:
                if node.target in writes and isinstance(node.args[0], Node) and may_overlap(node.args[0].meta["val"]):
                    _copy_first(graph, node)
            original(graph)

        return core

    with wrapped_here(reinplace, "reinplace_inplaceable_ops_core", apart):
        yield


def _copy_first(graph: Graph, node: Node) -> None:
    of: Any = node.args[0]
    with graph.inserting_before(node):
        own = graph.call_function(_CLONE, (of,), _IN_ORDER)
    own.meta["val"] = _CLONE(of.meta["val"], **_IN_ORDER)
    node.update_arg(0, own)


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _at_some_sizes(stride: sympy.Expr) -> int:
    return int(stride.subs(dict.fromkeys(stride.free_symbols, 7)))
