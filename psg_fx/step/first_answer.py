"""The first answer of a step beside the definition: the loss of one sample, by the user's own code on it alone.

What a graph shows is proved for all batches.  What it does not show is found here if it changes the loss: a question
that only a batch of one answers otherwise (`x.squeeze().dim() == 1`), a type that is asked for, state or a draw that
nothing was seen to read.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from psg_fx.errors import NotYetSupported
from psg_fx.graph.same_op import draws
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import packed
from psg_fx.step.own_code import copied, tried
from psg_fx.torch_private.onednn import may_round
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.quiet import quiet

_APART = {torch.float64: 1e-4, torch.complex128: 1e-4, torch.float32: 0.02, torch.complex64: 0.02}
_APART_IN_HALF = 0.2
"""How far two losses may lie apart, relative to them and to the mean of the batch, by the coarsest dtype in the graph:
rounding, with what cancels.
"""


class OfOneSample:
    """The loss of the last sample of a call by the code itself, which the step's answer to that call must have."""

    def __init__(self, loss: float, size: int, apart: float) -> None:
        self._loss, self._size, self._apart = loss, size, apart
        self._refusal: NotYetSupported | None = None

    def settled(self, losses: torch.Tensor) -> bool:
        """Whether the answer need not be looked at again.  Raises NotYetSupported, at every call from then on."""
        real = type(losses) is torch.Tensor  # and no fake one, under a mode of the caller
        if self._refusal is None and real and len(losses) == self._size:  # else it is one of a part of the call
            self._refusal = self._compared(losses.detach().double().tolist())
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        return True

    def _compared(self, losses: Sequence[float]) -> NotYetSupported | None:
        found, wanted = losses[-1], self._loss
        finite = [abs(each) for each in losses if math.isfinite(each)]
        scale = max(abs(wanted), sum(finite) / max(len(finite), 1))
        if found == wanted or (math.isnan(found) and math.isnan(wanted)) or abs(found - wanted) <= self._apart * scale:
            return None
        last = len(losses) - 1
        return NotYetSupported(
            f"the loss of sample {last} is {wanted:.6g} alone, and {found:.6g} in this batch",
            where=f"loss_fn(model(x[{last}:]), y[{last}:])",
            why="the code does something else for one sample than for several, or at each run, that no op of the graph "
            "shows: it asks for a number of dims or a type, or reads what nothing was seen to read",
            fix="step.explain() has the ops that it became; where only rounding sets the two apart, "
            'transform(..., options={"psg_fx.compare_first": False})',
        )  # fmt: skip


def of_one_sample(model: nn.Module, loss_fn: Any, call: Call, gm: GraphModule) -> OfOneSample | None:
    """The loss of the call's last sample; None where it is not one number, or nothing is known of it."""
    size, nodes = call.batch_size(), [node for node in gm.graph.nodes if node.op == "call_function"]
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not size or call.axes or together or any(map(draws, nodes)):
        return None
    found = _loss_alone(model, loss_fn, call)
    if found is None or found.numel() != 1 or found.is_meta:
        return None
    values = [value for node in gm.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    dtypes = {value.dtype for value in values if value.is_floating_point() or value.is_complex()}
    apart = max(_APART.get(dtype, _APART_IN_HALF) for dtype in dtypes)
    return OfOneSample(found.detach().double().item(), size, _APART_IN_HALF if may_round() else apart)


def _loss_alone(model: nn.Module, loss_fn: Any, call: Call) -> torch.Tensor | None:
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
            found = loss_fn(model(*args, **kwargs), *targets, **target_kwargs)
        except Exception:  # code that does not run on one sample, or memory for it: nothing is said of it
            return None
    return found if isinstance(found, torch.Tensor) else None
