"""Ops that make a value from its shape: every sample sees the same program, so a dim of size c·B carries samples."""

from __future__ import annotations

from psg_fx.graph.facts import SampleAxis

from ..table import Placement, sample_rule
from ..values import NUMBERING, Op, Result, broadcast

_FILLS = """
    zeros ones full empty empty_permuted empty_strided new_zeros new_ones new_full new_empty new_empty_strided
    zeros_like ones_like full_like empty_like zero scalar_tensor _efficientzerotensor
"""
_DRAWS = "rand randn randint rand_like randn_like randint_like normal normal_functional uniform exponential"
_ORDERED = "linspace logspace eye tril_indices triu_indices hann_window hamming_window fft_fftfreq fft_rfftfreq"


@sample_rule(*_FILLS.split(), proof="same for all samples", sizes=True, shapes_only=True)
def fill(op: Op) -> Result:
    """The same number everywhere: any order inside the dim is right."""
    out = op.out()
    like = next((v for v in op.values() if v.axis is not None and v.layout == out), None)
    if like is not None:
        return Result(like.axis, uniform=True)
    return Result() if out.dim is None else Result(SampleAxis(out.dim, 1, out.factor), uniform=True)


@sample_rule(*_DRAWS.split(), proof="drawn per element", sizes=True, shapes_only=True)
def draw(op: Op) -> Result:
    """Independent draws; from here on the order inside the dim is fixed."""
    return Result(fill(op).axes)


@sample_rule("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", proof="drawn per element")
def draw_around(op: Op) -> Result:
    """Independent draws, each with the mean and the deviation at its own place."""
    return Result(broadcast(op, op.values(), len(op.out().shape)).axes)


@sample_rule("arange", "range", proof="number of the sample", sizes=True)
def arange(op: Op) -> Result:
    """`arange(B)` numbers the samples, `arange(B * T)` the T rows of each: usable to pick each sample's own rows, as in
    `x[arange(B), ids]`; `arange(0, B * T, T)` is `arange(B) * T`.
    """
    out = op.out()
    if out.dim is None:
        return Result()
    step = op.raw("step", 1)
    if op.raw("start", 0) == 0 and type(step) is int and step > 0 and op.node.meta["val"].dtype in NUMBERING:
        return Result(SampleAxis(0, 1, out.factor), index=out.factor * step)
    raise op.refuse(
        "its numbers run through all samples, so they differ from those of one sample",
        "number the places within a sample: arange(T), expanded to the batch",
    )


@sample_rule(*_ORDERED.split(), proof="same for all samples", sizes=True, shapes_only=True)
def ordered(op: Op) -> Placement:
    """Numbers that depend on the place: no dim may be the batch."""
    if op.out().dim is not None:
        raise op.refuse("its numbers depend on the place of the sample in the batch")
    return None


@sample_rule("randperm", proof="drawn per element", sizes=True)
def randperm(op: Op) -> Placement:
    """A random order."""
    if op.out().dim is not None:
        raise op.refuse(
            "it draws an order of the samples, so a sample meets another one",
            "permute within a sample, or mix the inputs before the step",
        )
    return None


@sample_rule("multinomial", proof="drawn per element", sizes=True)
def multinomial(op: Op) -> Placement:
    """y[b, :] drawn with the weights x[b, :]; or a draw for each sample, all with the weights x[:]."""
    x = op.need("self")
    if x.axis is None:
        if op.out().dim is not None and not op.raw("replacement", False):
            raise op.refuse(
                "it draws without replacement, so what one sample gets no other does",
                "draw with replacement=True, or within a sample",
            )
        return draw(op)
    if x.axis.dim == x.ndim - 1:
        raise op.refuse("it draws among the samples")
    return x.axis
