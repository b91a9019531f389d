"""`psg_fx.transform`: the public interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import nn

from psg_fx.errors import BadArgument
from psg_fx.program.arguments.batch_dim import BatchDim
from psg_fx.program.state import ParamFilter
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.sums import Grads
from psg_fx.step import mistakes
from psg_fx.step.module import PerSampleModule
from psg_fx.step.settings import Settings, as_sequence, needs_loss, without_loss
from psg_fx.step.with_loss import LossModule
from psg_fx.step.without_loss import DropInModule
from psg_fx.torch_private.sharded import is_sharded
from psg_fx.torch_private.tensor_parallel import is_tensor_parallel


class _Options(TypedDict, total=False):
    """What both kinds of steps take by name, for type checkers."""

    quantities: Quantity | Sequence[Quantity] | None
    params: ParamFilter
    batch_dim: BatchDim
    loss_reduction: str | None
    backend: str
    mode: str | None
    options: dict[str, Any] | None
    dynamic: bool | None
    reuse_outputs: bool
    memory_budget: float | None
    progress: bool
    accumulate: bool
    warm: str | None


@overload
def transform(model: nn.Module, loss_fn: None = None, **options: Unpack[_Options]) -> DropInModule: ...
@overload
def transform(model: nn.Module, loss_fn: Callable[..., torch.Tensor], **options: Unpack[_Options]) -> LossModule: ...
def transform(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    quantities: Quantity | Sequence[Quantity] | None = None,
    params: ParamFilter = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    reuse_outputs: bool = False,
    memory_budget: float | None = None,
    progress: bool = True,
    accumulate: bool = False,
    warm: str | None = None,
) -> PerSampleModule:
    """Compile a model and its loss into one graph that computes per-sample quantities.

    Args:
        model: any `nn.Module`; its state is read at every call.
        loss_fn: `loss_fn(output, *targets)`, a scalar (any reduction) or `[B]`.  The loss of sample i is by definition
            `loss_fn(model(x[i:i+1]), y[i:i+1])`.  None: the step is the model, and `backward()` leaves
            `grad_sample` `[B, *shape]` on every parameter.
        quantities: one quantity or several; each fills a field of the step's output.  Default `Grads()`.
        params: which parameters: None for all that require gradients, globs on names, or a predicate (name, parameter).
        batch_dim: where the samples lie: an int, or `(inputs_dims, targets_dims)` of ints and None (shared by all).
        loss_reduction: without `loss_fn` only, where psg_fx does not see the loss: "sum" (the default), or "mean" if
            the loss is a mean over the batch.  Under a mean loss the default leaves gᵢ / B, each sample's part of the
            ordinary gradient, where Opacus and "mean" leave gᵢ, the gradient of its own loss.
        backend, mode, options: as in `torch.compile`; "eager" runs the lowered graph as it is.  Three options are
            psg_fx's own.  `"psg_fx.compare_first": False` leaves out that the first answer of each graph is held
            against the code itself on one sample.  `"psg_fx.kept_dtype": torch.bfloat16` lets gradients of float32
            wait for the norms in half the memory, each element rounded by at most 1/256 of itself.
            `"psg_fx.fused_kernels"`: True lets plans use kernels of psg_fx (norms taken while a product is formed,
            inner products of Gram matrices that are never stored, loops of recurrent layers), False does not, nor sums
            of what is stored.  Default: on for an H100 or H200 (Triton) and for float32 on a CPU with inductor (C++),
            off elsewhere; `step.explain()` says where others would gain.
        dynamic: None: the first batch size is compiled statically, the next one dynamically; True: dynamically from the
            start; False: a graph for every size.  None and True: a batch of one sample is compiled once for itself.
        reuse_outputs: on CPU with inductor, keep the memory of large results and intermediate values for later calls,
            which saves the page faults of fresh memory.  Memory is used again once nobody holds a tensor in it, or
            given back explicitly: `step(x, y, out=out)` writes into the tensors of a former output.  Plans then save
            time rather than memory.  With CUDA graphs
            (mode="reduce-overhead") the tensors of an output are valid until the next call.
        memory_budget: with a loss: what a step may allocate beside parameters and inputs, in bytes (int) or as a
            fraction of the device's memory (float).  The planner trades time for memory: cheaper trees, then parts of
            the batch one after the other, whose outputs are put together as by `microbatch`.
        progress: while a step is captured and compiled, a line on stderr says so, if that is a terminal.
        accumulate: without `loss_fn` only: a further `backward()` makes `grad_sample` a list of those of each call, as
            Opacus does.  Otherwise it is refused while a `grad_sample` of the parameters as they are is there.
        warm: "eager": calls do not wait for inductor: the lowered graph is run as it is, with the same results to
            rounding, while its code is compiled in a thread, which the process waits for when it ends.
            `step.wait()` waits for it.

    Returns:
        A module: `step(inputs, targets)` with a loss, `step(*args, **kwargs)` without.

    Raises:
        BadArgument: an argument that does not mean anything.
        SamplesMixed: at the first call: a sample's loss depends on other samples.
        NotYetSupported: at the first call: the gradients exist, but cannot be computed exactly.
        CaptureFailed: at the first call: model and loss do not become one graph.
    """
    if isinstance(model, PerSampleModule):
        raise BadArgument(
            "the model is a step", where="transform(model)", why="it computes gradients, and is no part of a graph",
            fix="transform(step.model, step.loss_fn, quantities=...), with other quantities or options",
        )  # fmt: skip
    sharded = is_sharded(model) or is_tensor_parallel(model)
    if loss_fn is None or not sharded:  # only a step with a loss is had of a sharded model
        mistakes.check_model(model)
    settings = Settings(
        quantities=(Grads(),) if quantities is None else as_sequence(quantities), params=params, batch_dim=batch_dim,
        loss_reduction="sum" if loss_reduction is None else loss_reduction, backend=backend, mode=mode, options=options,
        dynamic=dynamic, reuse_outputs=reuse_outputs, memory_budget=memory_budget, progress=progress,
        accumulate=accumulate, warm=warm,
    )  # fmt: skip
    if loss_fn is not None:
        mistakes.check_loss(loss_fn)
        if loss_reduction is not None:
            raise without_loss("loss_reduction", "a loss that is given is taken apart into those of its samples, "
                               "whatever its reduction")  # fmt: skip
        if accumulate:
            raise without_loss("accumulate", "with a loss nothing is left on the parameters")
        if sharded:
            from psg_fx.distributed.sharded import ShardedModule

            return ShardedModule(model, loss_fn, settings)
        return LossModule(model, loss_fn, settings)
    if quantities is not None:
        raise needs_loss(
            "quantities", "without loss_fn the step leaves grad_sample on the parameters, and nothing else"
        )
    if memory_budget is not None:
        raise needs_loss("memory_budget", "without loss_fn the gradients of the whole batch are materialised")
    return DropInModule(model, None, settings)
