"""The first answer of a step beside the definition: what the user's own code gives for one sample alone.

What a graph shows is proved for all batches.  What it does not show is found here if it changes the loss, its gradient
where the answer shows that of each sample, or what a step without a loss returns: a question that only a batch of one
answers otherwise, a type that is asked for (`type(h) is Tensor`), state or a draw that nothing was seen to read.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.same_op import draws
from psg_fx.passes.capture.functions.rewrites import rewritten
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import packed
from psg_fx.program.made_objects import opened
from psg_fx.quantities.base import Quantity
from psg_fx.reference.cotangents import helped
from psg_fx.step.binding import Binding
from psg_fx.step.first_gradient import TIMES, Answer, Apart, GradientAlone, by_autograd, of_rounding, rounded
from psg_fx.step.own_code import copied, tried
from psg_fx.step.shown import shown_by
from psg_fx.torch_private.export import without_reentrant_checkpoints
from psg_fx.torch_private.inductor import uncompiled
from psg_fx.torch_private.onednn import may_round
from psg_fx.torch_private.patching import patched_here, wrapped_here
from psg_fx.torch_private.quiet import quiet

_APART = {torch.float64: 1e-4, torch.complex128: 1e-4, torch.float32: 0.02, torch.complex64: 0.02}
_APART_IN_HALF = 0.2
"""How far the two may lie apart, in norm and relative to the sample's and to the batch's (of the mean sample), by the
coarsest dtype in the graph: rounding, with what cancels.
"""


class OfOneSample:
    """What the code itself gives for the last sample of a call, which the step's answer to that call must have.

    alone: the loss, `[1]`, or the outputs.  apart: as above.  eps: what numbers are rounded to.
    gradient: of the loss, if the answer shows it.  again: computes that of a call, as it is, with torch's functions as
    a capture has them, whose derivatives are their formulas', or for inputs that are so much rounded.
    """

    def __init__(
        self, alone: Sequence[torch.Tensor], call: Call, apart: float, is_loss: bool, eps: float,
        gradient: GradientAlone | None = None, again: Callable[..., Mapping[str, torch.Tensor] | None] | None = None,
    ) -> None:  # fmt: skip
        self._alone, self._apart, self._is_loss, self._gradient = alone, apart, is_loss, gradient
        self._again, self._eps = again, eps
        self._call, self._last = weakref.ref(call), call.batch_size() - 1
        self._refusal: NotYetSupported | None = None

    def require(
        self, found: Sequence[torch.Tensor], call: Call, gm: GraphModule, binding: Binding, arguments: Sequence[Any],
        fields: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Hold an answer against the code's own; later ones need not be looked at.

        found: the one to this call, which may be a part of the first one, or a later one, where that one failed.
        arguments: of the graph, for this call.  fields: all of the answer.

        Raises:
            NotYetSupported: it differs; at every call from then on.
        """
        real = all(type(value) is torch.Tensor for value in found)  # and no fake one, under a mode of the caller
        if self._refusal is None and real and call is self._call() and len(found) == len(self._alone):
            of_sample = binding.of_sample(arguments, call, self._last)
            whole = binding.without_tangents(arguments)
            answer = Answer(fields or {}, self._last + 1, gm, binding, whole, of_sample)
            refusal = self._compared(found, self._last + 1)
            before = None if refusal is None else self._before_compiling(found, answer)
            if refusal is not None and not self._rounds(found, answer, before):
                self._refusal = refusal if before is None else _by_compiling(refusal)
            elif self._gradient is not None and fields is not None:
                self._refusal = self._differing(self._gradient, call, answer)
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def _differing(self, gradient: GradientAlone, call: Call, answer: Answer) -> NotYetSupported | None:
        apart = gradient.differs(answer)
        if apart is None or self._again is None:
            return None if apart is None else self._of_gradient(apart)
        if (captured := self._again(call, as_captured=True)) is not None:  # torch has higher derivatives wrong
            apart = gradient.of(captured).differs(answer)
        if apart is not None:
            one, other = self._again(call), self._again(call, eps=gradient.eps)
            if one is not None and other is not None and gradient.is_noise(apart, one, other, answer):
                apart = None
        refusal = None if apart is None else self._of_gradient(apart)
        return _by_compiling(refusal) if refusal is not None and apart is not None and apart.compiled else refusal

    def _rounds(self, found: Sequence[torch.Tensor], answer: Answer, whole: Sequence[torch.Tensor] | None) -> bool:
        """Whether the graph, as it is before it is compiled, gives for the sample alone what the code does: the batch
        was only rounded otherwise, and nearly all cancels (the loss of a fit that is nearly perfect).

        whole: what it gives for the batch; None where that is what there is compiled.
        """
        try:
            if whole is None:
                return self._compared(self._computed(answer, answer.of_sample), 1) is None
            return any(self._moves(found, whole, self._computed(answer, each)) for each in answer.rounded(self._eps))
        except Exception:  # a graph for one size of batch alone
            return False

    def _before_compiling(self, found: Sequence[torch.Tensor], answer: Answer) -> Sequence[torch.Tensor] | None:
        """The answer of the graph as it is; None where what makes the difference does so there, too."""
        try:
            whole = self._computed(answer, answer.arguments)
        except Exception:  # no memory
            return None
        return whole if self._is_compilers(found, whole) else None

    def _computed(self, answer: Answer, arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        kind = "loss" if self._is_loss else "output"
        places = [i for i, spec in enumerate(answer.binding.outputs) if spec.kind == kind]
        return facts.computed(answer.gm, places, arguments)

    def _is_compilers(self, found: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> bool:
        """Whether most of a difference arose where the graph was compiled."""
        pairs = zip(self._pairs(found, self._last + 1), self._pairs(whole, self._last + 1), strict=True)
        return any(2 * _apart(one, other) > _apart(one, wanted) for (one, wanted, _), (other, _, _) in pairs)

    def _moves(self, *of: Sequence[torch.Tensor]) -> bool:
        """Whether rounding moves a graph's answer about as far as that of the compiled one lies from the code's."""
        found, whole, moved = (self._pairs(values, self._last + 1) for values in of)
        return all(
            TIMES * _apart(one, other) >= _apart(last, wanted)
            for (last, wanted, _), (one, _, _), (other, _, _) in zip(found, whole, moved, strict=True)
        )

    def _compared(self, found: Sequence[torch.Tensor], size: int) -> NotYetSupported | None:
        """The refusal of what a batch of so many samples has, if it is another value for the last one."""
        for last, wanted, scale in self._pairs(found, size):
            if not _apart(last, wanted) <= self._apart * scale:  # which may be no number
                worst = int(_difference(last, wanted).abs().nan_to_num(math.inf).argmax())
                return self._refused(last.flatten()[worst].item(), wanted.flatten()[worst].item())
        return None

    def _pairs(self, found: Sequence[torch.Tensor], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """What a batch of so many samples has for the last one, what the code has, and how large both are."""
        for value, alone in zip(found, self._alone, strict=True):
            if (dim := _sample_dim(value, alone, size)) is not None:
                last, wanted = value.detach().narrow(dim, size - 1, 1).double(), alone.double()
                yield last, wanted, max(_norm(wanted), _norm(value.detach()) / math.sqrt(size))

    def _refused(self, found: float, alone: float) -> NotYetSupported:
        what = "the loss of" if self._is_loss else "a number of the output for"
        return self._unlike(f"{what} sample {self._last} is {alone:.6g} alone, and {found:.6g} in this batch")

    def _of_gradient(self, apart: Apart) -> NotYetSupported:
        what = f"{apart.what} sample {self._last} has norm {apart.alone:.6g} alone, and {apart.norm:.6g} in this batch"
        known = f"{what}, {apart.distance:.6g} apart" if apart.parameter else what
        return self._unlike(known, apart.parameter)

    def _unlike(self, what: str, parameter: str = "") -> NotYetSupported:
        """parameter: where most of it is."""
        one = f"model(x[{self._last}:])"
        code = f"loss_fn({one}, y[{self._last}:])" if self._is_loss else one
        return NotYetSupported(
            what, where=f"{parameter} in {code}" if parameter else code,
            why="the code does something else for one sample than for several, or at each run, that no op of the graph "
            "shows: it asks for a number of dims or a type, or reads what nothing was seen to read",
            fix="step.explain() has the ops that it became; where only rounding sets the two apart, "
            'transform(..., options={"psg_fx.compare_first": False})',
        )  # fmt: skip


def _by_compiling(refusal: NotYetSupported) -> NotYetSupported:
    """The same of a difference that arose there."""
    return NotYetSupported(
        refusal.what, where=refusal.where, why="the graph says what the code does, and compiled something else: an op "
        "that the compiler has wrong", fix='transform(..., backend="eager"), and report the model',
    )  # fmt: skip


def of_one_sample(
    model: nn.Module, loss_fn: Any, call: Call, gm: GraphModule, binding: Binding, tracked: Sequence[str] = (),
    quantities: Iterable[Quantity] = (),
) -> OfOneSample | None:  # fmt: skip
    """For the call's last sample; None where there is nothing to compare.  tracked: names of the parameters whose
    gradients the quantities are of, each of one sample; none, where that is not so.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not call.batch_size() or call.axes or together or any(map(draws, nodes)):
        return None
    shown = shown_by(quantities) if tracked else None
    named = dict(model.named_parameters()) if shown is not None else {}
    parameters = {name: named[name] for name in tracked if named}
    alone, gradient = _alone(model, loss_fn, call, binding.buffers(), parameters)
    if not alone:
        return None
    values = [value for node in gm.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    dtypes = {value.dtype for value in values if value.is_floating_point() or value.is_complex()}
    eps = of_rounding(dtypes, any(value.is_cuda for value in alone))
    apart = _APART_IN_HALF if may_round() else max(_APART.get(dtype, _APART_IN_HALF) for dtype in dtypes)
    if shown is None or gradient is None:
        return OfOneSample(alone, call, apart, loss_fn is not None, eps)

    def again(call: Call, as_captured: bool = False, eps: float = 0.0) -> Mapping[str, torch.Tensor] | None:
        return _alone(model, loss_fn, call, binding.buffers(), parameters, as_captured, eps)[1]

    found = GradientAlone(shown, gradient, apart, dtypes, eps)
    return OfOneSample(alone, call, apart, loss_fn is not None, eps, found, again)


def _sample_dim(value: torch.Tensor, alone: torch.Tensor, size: int) -> int | None:
    """Where the samples lie; None where that is not one dim, and for whole numbers: rounding picks one of two."""
    if not value.is_floating_point() or not value.numel() or alone.is_meta or value.dim() != alone.dim():
        return None
    sizes = list(zip(value.shape, alone.shape, strict=True))
    dims = [dim for dim, pair in enumerate(sizes) if pair == (size, 1)]
    return dims[0] if dims and sum(a != b for a, b in sizes) == (size > 1) else None


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).masked_fill(same, 0.0)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far; no number where one of them is none."""
    return float(torch.linalg.vector_norm(_difference(one, other)))


def _norm(value: torch.Tensor) -> float:
    """Of what is finite."""
    finite = value if value.isfinite().all() else value[value.isfinite()]
    return float(torch.linalg.vector_norm(finite, dtype=torch.float64))


def _alone(
    model: nn.Module, loss_fn: Any, call: Call, written: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor], as_captured: bool = False, eps: float = 0.0,
) -> tuple[list[torch.Tensor], Mapping[str, torch.Tensor] | None]:  # fmt: skip
    """By the code as it is, which writes these buffers; nothing of what it does stays, and it prints nothing.
    as_captured: with torch's functions as they are written while a model is captured.  eps: inputs are so much rounded.

    Returns the loss or the outputs, and the gradient for these parameters, None where there is none to compare.
    """
    last, gradient = call.batch_size() - 1, None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(tried(model, loss_fn, written))
            stack.enter_context(wrapped_here(nn.functional, "batch_norm", helped))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(without_reentrant_checkpoints())
            if as_captured:
                stack.enter_context(rewritten(rows=False))
            tensors = [copied(t, d, last) for t, d in zip(call.tensors, call.dims, strict=True)]
            if eps:
                tensors[: call.inputs] = [rounded(t, eps) for t in tensors[: call.inputs]]
            stack.enter_context(uncompiled())  # parts that the user compiles take long
            stack.enter_context(quiet())
            stack.enter_context(patched_here(builtins, "print", lambda *args, **kwargs: None))
            (args, kwargs), (targets, target_kwargs) = packed(call.rebuild(tensors))
            found = model(*args, **kwargs)
            found = opened(found) if loss_fn is None else loss_fn(found, *targets, **target_kwargs)
        except Exception:  # code that does not run on one sample, or memory for it: nothing is said of it
            return [], None
        leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if loss_fn is not None:
            leaves = [leaf.reshape(1) for leaf in leaves if leaf.numel() == 1]  # else it is no loss
        if len(leaves) == 1 and parameters:
            gradient = by_autograd(leaves[0], parameters)
    return [leaf.detach() for leaf in leaves], gradient
