"""The first answer of a step beside the definition: what the user's own code gives for one sample alone.

What a graph shows is proved for all batches.  What it does not show is found here if it changes the loss, or what a
step without a loss returns: a question that only a batch of one answers otherwise (`x.squeeze().dim() == 1`), a type
that is asked for, state or a draw that nothing was seen to read.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph.same_op import draws
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import packed
from psg_fx.program.made_objects import opened
from psg_fx.step.own_code import copied, tried
from psg_fx.torch_private.onednn import may_round
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.quiet import quiet

_APART = {torch.float64: 1e-4, torch.complex128: 1e-4, torch.float32: 0.02, torch.complex64: 0.02}
_APART_IN_HALF = 0.2
"""How far the two may lie apart, in norm and relative to the sample's and to the batch's (of the mean sample), by the
coarsest dtype in the graph: rounding, with what cancels.
"""


class OfOneSample:
    """What the code itself gives for the last sample of a call, which the step's answer to that call must have.

    alone: the loss, `[1]`, or the outputs.  apart: as above.
    """

    def __init__(self, alone: Sequence[torch.Tensor], call: Call, apart: float, is_loss: bool) -> None:
        self._alone, self._apart, self._is_loss = alone, apart, is_loss
        self._call, self._size = weakref.ref(call), call.batch_size()
        self._refusal: NotYetSupported | None = None

    def settled(self, found: Sequence[torch.Tensor], call: Call) -> bool:
        """Whether answers need not be looked at again.  found: the one to this call, which may be a part of the first
        one, or a later one, where that one failed.

        Raises:
            NotYetSupported: it differs; at every call from then on.
        """
        real = all(type(value) is torch.Tensor for value in found)  # and no fake one, under a mode of the caller
        if self._refusal is None and real and call is self._call() and len(found) == len(self._alone):
            self._refusal = next(filter(None, map(self._compared, found, self._alone)), None)
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        return True

    def _compared(self, value: torch.Tensor, alone: torch.Tensor) -> NotYetSupported | None:
        dim = _sample_dim(value, alone, self._size)
        if dim is None:
            return None
        value = value.detach()
        found, wanted = value.narrow(dim, self._size - 1, 1).double(), alone.double()
        same = (found == wanted) | (found.isnan() & wanted.isnan())
        difference = (found - wanted).masked_fill(same, 0.0)
        scale = max(_norm(wanted), _norm(value) / math.sqrt(self._size))
        if torch.linalg.vector_norm(difference).item() <= self._apart * scale:
            return None
        worst = int(difference.abs().nan_to_num(math.inf).argmax())
        return self._refused(found.flatten()[worst].item(), wanted.flatten()[worst].item())

    def _refused(self, found: float, alone: float) -> NotYetSupported:
        last, one = self._size - 1, f"model(x[{self._size - 1}:])"
        what = "the loss of" if self._is_loss else "a number of the output for"
        return NotYetSupported(
            f"{what} sample {last} is {alone:.6g} alone, and {found:.6g} in this batch",
            where=f"loss_fn({one}, y[{last}:])" if self._is_loss else one,
            why="the code does something else for one sample than for several, or at each run, that no op of the graph "
            "shows: it asks for a number of dims or a type, or reads what nothing was seen to read",
            fix="step.explain() has the ops that it became; where only rounding sets the two apart, "
            'transform(..., options={"psg_fx.compare_first": False})',
        )  # fmt: skip


def of_one_sample(model: nn.Module, loss_fn: Any, call: Call, gm: GraphModule) -> OfOneSample | None:
    """For the call's last sample; None where there is nothing to compare."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not call.batch_size() or call.axes or together or any(map(draws, nodes)):
        return None
    alone = _alone(model, loss_fn, call)
    if loss_fn is not None:
        alone = [value.reshape(1) for value in alone if value.numel() == 1]  # else it is no loss
    if not alone:
        return None
    values = [value for node in gm.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    dtypes = {value.dtype for value in values if value.is_floating_point() or value.is_complex()}
    apart = _APART_IN_HALF if may_round() else max(_APART.get(dtype, _APART_IN_HALF) for dtype in dtypes)
    return OfOneSample([value.detach() for value in alone], call, apart, loss_fn is not None)


def _sample_dim(value: torch.Tensor, alone: torch.Tensor, size: int) -> int | None:
    """Where the samples lie; None where that is not one dim, and for whole numbers: rounding picks one of two."""
    if not value.is_floating_point() or not value.numel() or alone.is_meta or value.dim() != alone.dim():
        return None
    sizes = list(zip(value.shape, alone.shape, strict=True))
    dims = [dim for dim, pair in enumerate(sizes) if pair == (size, 1)]
    return dims[0] if dims and sum(a != b for a, b in sizes) == (size > 1) else None


def _norm(value: torch.Tensor) -> float:
    """Of what is finite."""
    finite = value if value.isfinite().all() else value[value.isfinite()]
    return float(torch.linalg.vector_norm(finite, dtype=torch.float64))


def _alone(model: nn.Module, loss_fn: Any, call: Call) -> list[torch.Tensor]:
    """By the code as it is; nothing of what it does stays, and it prints nothing."""
    last = call.batch_size() - 1
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(tried(model, loss_fn, parameters=False))
            tensors = [copied(t, d, last) for t, d in zip(call.tensors, call.dims, strict=True)]
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # parts that the user compiles take long
            stack.enter_context(quiet())
            stack.enter_context(patched_here(builtins, "print", lambda *args, **kwargs: None))
            (args, kwargs), (targets, target_kwargs) = packed(call.rebuild(tensors))
            found = model(*args, **kwargs)
            found = opened(found) if loss_fn is None else loss_fn(found, *targets, **target_kwargs)
        except Exception:  # code that does not run on one sample, or memory for it: nothing is said of it
            return []
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
