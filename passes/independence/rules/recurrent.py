"""Recurrent layers (`ops/recurrent/`): x `[T, B, ..]`, states `[B, ..]`; a step of a sample reads that sample."""

from __future__ import annotations

from collections.abc import Sequence

from psg_fx.graph.facts import SampleAxis

from ..table import Placement, sample_rule
from ..values import Argument, Op, broadcast


@sample_rule("psg_fx::lstm", "psg_fx::gru", "psg_fx::rnn", proof="recurrence")
def loop(op: Op) -> Placement:
    """All outputs are `[T, B, ..]`."""
    return _loop(op, ("x", "h", "c"), ("w", "bias", "projection"))


@sample_rule("psg_fx::lstm_backward", "psg_fx::gru_backward", "psg_fx::rnn_backward", proof="recurrence")
def loop_backward(op: Op) -> Placement:
    """The gradients of the initial states are `[B, ..]`, all others `[T, B, ..]`."""
    kept = ("hidden", "gates", "inner", "h", "c", "cells", "squashed")
    axis = _loop(op, ("dh", "dc", *kept), ("w", "projection"))
    return tuple(SampleAxis(len(out.shape) - 2, axis.outer, axis.inner) for out in op.outputs())


@sample_rule("psg_fx::attach", proof="recurrence")
def attach(op: Op) -> Placement:
    """The states, where they were; a sample's gradient with respect to `inputs` comes of that sample's states."""
    _same_place(op, [v for name in ("states", "inputs", "saved") for v in op.values_of(name)], ("weights",))
    return tuple(v.axis for v in op.values_of("states"))


@sample_rule("psg_fx::ctc", proof="recurrence")
def ctc(op: Op) -> Placement:
    """-log p(target[b]) `[B]` of `[T, B, C]`, targets `[B, S]` and lengths `[B]`."""
    _require_own(op, "log_probs", 1)
    return SampleAxis(0)


@sample_rule("psg_fx::ctc_backward", proof="recurrence")
def ctc_backward(op: Op) -> Placement:
    """`[T, B, C]`."""
    _require_own(op, "cotangent", 0)
    _require_own(op, "log_probs", 1)
    return SampleAxis(1)


def _require_own(op: Op, name: str, dim: int) -> None:
    """Everything else `[B, ..]`, as a batch of one has it."""
    places = [(name, dim), ("targets", 0), ("input_lengths", 0), ("target_lengths", 0)]
    for argument, place in places:
        if op.need(argument).axis != SampleAxis(place):
            raise op.refuse(
                f"its {argument} hold the samples in {op.need(argument).axis or 'no dim'}, not in dim {place}",
                "pass log_probs [T, B, C], targets [B, S] and lengths [B]",
            )


def _loop(op: Op, names: Sequence[str], weights: Sequence[str]) -> SampleAxis:
    data = [v for name in names if (v := op.value(name))]
    axis = _same_place(op, data, weights)
    if axis is None or any(v.axis is None for v in data):
        raise op.unsupported("some of its sequences and states carry samples and some do not")
    return axis


def _same_place(op: Op, data: Sequence[Argument], weights: Sequence[str]) -> SampleAxis | None:
    """Where the samples lie in all that runs over time: dim 1 of `[T, B, ..]`."""
    if any(v.axis is not None for name in weights for v in op.values_of(name)):
        raise op.refuse("its weights carry samples", "use one set of weights for all samples")
    axis = broadcast(op, data, 3).axes
    assert not isinstance(axis, tuple)
    if axis is not None and axis.dim != 1:
        over = "time, over which the layer runs" if axis.dim == 0 else "the features, which each step multiplies"
        raise op.refuse(f"the samples lie in the dim of {over}", "check batch_first of the layer, and batch_dim")
    return axis
