"""A function of one sample, run for every sample without fixing the batch size.

`torch.vmap` does this, but some of its batching rules read the batch size as a plain number, and a graph traced through
them would be right for one batch size only. So a symbolic batch is tried out first, on values of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.errors import NotYetSupported
from psg_fx.graph.same_op import draws
from psg_fx.graph.strides import free_of_strides, laid_out_as_read
from psg_fx.ops.define import define_function
from psg_fx.torch_private.fakes import fake_batch
from psg_fx.torch_private.modes import no_modes
from psg_fx.torch_private.ops import core_decompositions

OneSample = Callable[..., torch.Tensor]
Dims = Sequence[int | None]


def for_each_sample(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor], what: str, where: str) -> torch.Tensor:
    """`[B, ...]`: `one` for every sample; `dims` has 0 for what is stacked and None for what all samples share.

    Tried as it is, then written out in simpler ops; else it is an op of its own, a loop over the samples that there are
    when it runs. `what` and `where` are for the refusal.
    """
    size: Any = next(t.shape[0] for t, dim in zip(tensors, dims, strict=True) if dim == 0)
    if not isinstance(size, torch.SymInt):
        return _mapped(one, dims, tensors)
    if _keeps_batch(one, dims, tensors):
        return _mapped(one, dims, tensors)
    simple = _written_out(one, dims, tensors, core_decompositions())
    if simple is not None and _keeps_batch(simple, dims, tensors):
        return _mapped(simple, dims, tensors)
    plain = _written_out(one, dims, tensors, {})
    if plain is not None and not any(map(draws, plain.graph.nodes)):
        found: torch.Tensor = _as_one_op(plain, dims)(*tensors)
        return found
    raise NotYetSupported(
        f"{what} has no gradient rule, and cannot be traced for a single sample", where=where or what,
        why="without a rule it is run by vmap over the samples, or written out for one, without random numbers",
        fix="write it with other ops (matmul, index, pointwise), freeze the parameters that it reads, or give it a "
        "rule (docs/add-an-op.md)",
    )  # fmt: skip


def _mapped(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        found: torch.Tensor = torch.vmap(one, in_dims=tuple(dims))(*tensors)
    return found


def _keeps_batch(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether vmap leaves the batch size a symbol, found out on fresh fake values of the same sizes."""
    with no_modes():
        example, is_symbol = fake_batch()
        values = [example(t, dim == 0) for t, dim in zip(tensors, dims, strict=True)]
        try:
            make_fx(lambda *v: _mapped(one, dims, v), tracing_mode="symbolic")(*values)
        except Exception:  # vmap refuses in many ways
            return False
        return is_symbol()


def _written_out(
    one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor], table: Mapping[Any, Any]
) -> GraphModule | None:
    """`one` as a graph of the ops that a table of decompositions leaves, traced on a single sample."""
    with no_modes():
        sample = [
            torch.zeros([int(s) for s in t.shape[dim == 0 :]], dtype=t.dtype, device=t.device)
            for t, dim in zip(tensors, dims, strict=True)
        ]
        try:
            return free_of_strides(make_fx(one, decomposition_table=table, tracing_mode="fake")(*sample))
        except Exception:  # a decomposition that cannot be traced
            return None


def _as_one_op(one: GraphModule, dims: Dims) -> Any:
    """A new op `psg_fx_functions::for_each_sample_k(Tensor, ..) -> Tensor` that runs the graph for every sample."""
    one = laid_out_as_read(one)
    (result,) = one.graph.output_node().args
    value: torch.Tensor = result.meta["val"]  # type: ignore[union-attr]
    stacked = dims.index(0)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        found = shape(*tensors)
        with torch.no_grad():
            for k, row in enumerate(found):
                row.copy_(one(*(t if dim is None else t[k] for t, dim in zip(tensors, dims, strict=True))))
        return found

    def shape(*tensors: torch.Tensor) -> torch.Tensor:
        return tensors[stacked].new_empty((tensors[stacked].shape[0], *value.shape), dtype=value.dtype)

    return define_function("for_each_sample", len(dims), "Tensor", run, shape)
