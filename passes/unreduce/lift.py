"""An op of the program of one sample, as a plain function of `[B, ...]` values that does it for every sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.op_table import Batching, enter, known

from ..independence.arguments import bound

enter("cat", "concat", "gather", "sort", "topk", "kthvalue", batching=Batching.NEXT_DIM)
enter("slice_scatter", "select_scatter", batching=Batching.NEXT_DIM)
enter("layer_norm", "rms_norm", "native_layer_norm", batching=Batching.LEADING)


def lifted(
    node: Node, spread: Sequence[Node], kept: Sequence[Node], number: Callable[[Node], Any]
) -> Callable[..., Any]:
    """(spread.., kept..) -> the op for each sample.

    spread: inputs that carry samples, or (reduced ones) lie as `[B, *S]` by now.  kept: the same for all samples.
    number: the value of a SymInt argument in the program of one sample.
    """
    axes = [facts.fact(n).samples for n in spread]
    ndim = next(facts.tensors(node.meta["val"])).ndim
    batching = known(node.target).batching
    given = [n.meta["val"] for n in (*spread, *kept)]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and all(a is None for a in axes)
    pointwise = pointwise and len({v.dtype for v in given}) == 1  # a number gives way to other dtypes, `[B]` does not

    def filled(values: Sequence[Tensor]) -> Callable[[Node], Any]:
        place = dict(zip((*spread, *kept), values, strict=True))
        return lambda n: place[n] if n in place else number(n)

    def op(*values: Tensor) -> Any:
        fill = filled(values)
        run: Any = known(node.target).formula or node.target
        return run(*torch.fx.map_arg(node.args, fill), **torch.fx.map_arg(node.kwargs, fill))

    def along(*values: Tensor) -> Any:
        named: dict[str, Any] = dict(torch.fx.map_arg(bound(node), filled(values)))
        named["dim"] = named["dim"] % max(1, *(v.ndim for v in given)) + 1
        assert callable(node.target)
        return node.target(**named)

    def run(*values: Tensor) -> Any:
        first = [leading(v, a) for v, a in zip(values[: len(spread)], axes, strict=True)]
        same = values[len(spread) :]
        if pointwise:
            return op(*(widened(v, ndim + 1) for v in first), *same)
        if batching is Batching.LEADING:
            return op(*first, *same)
        if batching is Batching.NEXT_DIM:
            return along(*first, *(v.expand(first[0].shape[0], *v.shape) for v in same))
        in_dims = (0,) * len(first) + (None,) * len(same)
        return torch.vmap(op, in_dims=in_dims, randomness="error")(*first, *same)

    return run


def leading(value: Tensor, axis: facts.SampleAxes) -> Tensor:
    """`[.., outer·B·inner, ..]` -> `[B, .., outer·inner, ..]`; a reduced value lies along dim 0 already."""
    if not isinstance(axis, SampleAxis):
        return value
    if axis.outer == axis.inner == 1:
        first = value if axis.dim == 0 else value.movedim(axis.dim, 0)
        return first.unsqueeze(axis.dim + 1)
    size = value.shape[axis.dim] // (axis.outer * axis.inner)
    apart: Tensor = value.unflatten(axis.dim, (axis.outer, size, axis.inner))
    return apart.movedim(axis.dim + 1, 0).flatten(axis.dim + 1, axis.dim + 2)


def widened(value: Tensor, ndim: int) -> Tensor:
    """`[B, *S]` -> `[B, 1.., *S]`, so that it broadcasts from the right as `S` did."""
    missing = ndim - value.ndim
    return value if missing <= 0 else value.view(value.shape[0], *([1] * missing), *value.shape[1:])
