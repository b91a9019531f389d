"""Custom autograd functions: forward and backward are written out as graphs, and each is proven op by op."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported, PsgError, first_line
from psg_fx.graph import facts
from psg_fx.graph.facts import InputSpec, SampleAxes, SampleAxis
from psg_fx.graph.squeezes import may_take_samples
from psg_fx.ops.of_users.autograd_function import OF_ONE, WRITES_A_COPY, backward_graph, forward_graph
from psg_fx.ops.of_users.custom_call import CustomCall, custom_call
from psg_fx.program.decisions.branches import no_plain_batch_size
from psg_fx.program.reads.observe import observing_backward
from psg_fx.source import locate

from ..arguments import numbers_of_samples, op_name
from ..refused import NUMBERS, NUMBERS_FIX
from ..table import Placement, sample_rule
from ..values import Op, Result, tensors

_FUNCTION = "a custom autograd.Function"
_STATISTIC = "return it from the model as a value of each sample, and take what is over the batch in the loss"


@sample_rule("<custom>", proof="written out")
def custom(op: Op) -> Placement:
    """The outputs of forward; backward must give each input with samples a gradient with the same samples."""
    call = custom_call(op.node.target)
    assert call is not None
    inputs: list[Node] = list(op.node.args)  # type: ignore[arg-type]
    values = [n.meta["val"] for n in inputs]
    known = [op.known[n] for n in inputs]
    with no_plain_batch_size(), _for_all_sizes(op, call, "forward"):
        graph = forward_graph(call, values)
    _require_sizes_alone(op, call, graph, "forward", values, known)
    found = axes_of(op, proven(op, graph, known, _FUNCTION))
    outputs = tensors(op.node.meta["val"])
    _check_backward(op, call, known, values, outputs, found)
    return found[0] if isinstance(op.node.meta["val"], torch.Tensor) else tuple(found)  # type: ignore[arg-type]


def _check_backward(
    op: Op, call: CustomCall, known: Sequence[Result], values: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor], axes: Sequence[SampleAxes],
) -> None:  # fmt: skip
    cotangents = [torch.empty_like(t) for t in outputs]
    data = [i for i, need in enumerate(call.needs) if need and known[i].axes is not None]
    if not data:
        return
    with no_plain_batch_size(), observing_backward(), _for_all_sizes(op, call, "backward"):
        graph = backward_graph(call, values, cotangents, data)
    _require_sizes_alone(op, call, graph, "backward", values, known)
    gradients = proven(op, graph, [*known, *(Result(a) for a in axes)], _FUNCTION)
    for i, gradient in zip(data, gradients, strict=True):
        if gradient.axes != known[i].axes:
            raise op.refuse(
                f"its backward gives a gradient whose samples lie in {gradient.axes or 'no dim'}, not in "
                f"{known[i].axes}",
                "write its backward so that a sample's gradient is computed from that sample alone",
            )


@contextlib.contextmanager
def _for_all_sizes(op: Op, call: CustomCall, method: str) -> Iterator[None]:
    """Refuse a function that does not run for all batch sizes."""
    try:
        yield
    except PsgError:
        raise
    except Exception as error:
        raise NotYetSupported(
            f"{call.title} does not run for all batch sizes", where=locate(op.node),
            why=f"its {method} fails: {first_line(error)}", fix="take sizes from its arguments",
        ) from error  # fmt: skip


def _require_sizes_alone(
    op: Op, call: CustomCall, graph: GraphModule, method: str, values: Sequence[torch.Tensor], known: Sequence[Result]
) -> None:
    """Refuse a function that computes with the batch size: that of a sample is 1, which such a graph does not know; and
    one that makes torch take it for a number, as a loop over the samples does.
    """
    for value, found in zip(values, known, strict=True):
        if isinstance(found.axes, SampleAxis) and not facts.shape(value)[found.axes.dim].free_symbols:
            raise NotYetSupported(
                f"{call.title} fixes the batch size", where=locate(op.node),
                why=f"something in its {method} asks for the number of samples itself: a loop over them, or a split",
                fix="write it with ops on all samples at once",
            )  # fmt: skip
    if graph.meta[WRITES_A_COPY]:
        raise NotYetSupported(
            f"a write in place in {call.title} treats a batch of one sample differently", where=locate(op.node),
            why=f"its {method} writes into a copy that is the value itself for a batch of one, and reads the other one",
            fix="copy by clone(), or compute a new tensor: x.clamp(..) for x.clamp_(..)",
        )  # fmt: skip
    for node in graph.graph.nodes:
        if may_take_samples(node, op.batch):
            raise NotYetSupported(
                f"squeeze in {call.title} treats a batch of one sample differently", where=locate(op.node),
                why=f"its {method} would lose the sample dim there, and later dims have other numbers",
                fix="name the dim: x.squeeze(1), or x.flatten(1)",
            )  # fmt: skip
        if node.op == "get_attr" and isinstance(getattr(graph, str(node.target)), type(values[0])):
            raise NotYetSupported(
                f"{call.title} reads a tensor that is no argument", where=locate(op.node),
                why=f"its {method} has it from outside, where the model computes it; torch gives it no gradient",
                fix="pass it as an argument",
            )  # fmt: skip
    if graph.meta[OF_ONE]:
        raise NotYetSupported(
            f"{graph.meta[OF_ONE]} in {call.title} treats a batch of one sample differently", where=locate(op.node),
            why=f"in its {method} it has another size there, or does not run",
            fix="take sizes from the arguments (x.shape[0]), or from dims that are not the samples'",
        )  # fmt: skip
    without_batch_size(op, graph, call.title, f"its {method}")


def without_batch_size(op: Op, graph: GraphModule, title: str, where: str) -> None:
    """Refuse a graph inside of an op that computes with the batch size."""
    for node in graph.graph.nodes:
        if numbers_of_samples(node, op.batch):
            raise NotYetSupported(
                f"{title} computes with the batch size", where=locate(op.node),
                why=f"{op_name(node)} in {where} takes it as a value, and it is 1 for the loss of one sample",
                fix="use x.shape[0] for shapes alone, and average in the loss",
            )  # fmt: skip


def axes_of(op: Op, found: Sequence[Result]) -> list[SampleAxes]:
    """Where the samples lie in each of several outputs, of which nothing else is known; what is read of them must not
    be a statistic of the batch or number the samples.
    """
    read = {n.args[1] for n in op.node.users if n.target is operator.getitem}
    for k, result in enumerate(found):
        if isinstance(op.node.meta["val"], torch.Tensor) or k in read:
            if result.reduced:
                raise op.refuse(f"its output {k} is taken over all samples", _STATISTIC)
            if result.index or result.structure:
                raise op.refuse(f"its output {k} numbers the samples: {NUMBERS}", NUMBERS_FIX)
    return [r.axes for r in found]


def proven(op: Op, graph: GraphModule, known: Sequence[Result], inside: str) -> list[Result]:
    """What is known of the outputs of a graph of this op; `inside` is said in a refusal."""
    placeholders = facts.placeholders(graph)
    for i, placeholder in enumerate(placeholders):
        count = len(op.node.args)
        placeholder._rename(f"input_{i}" if i < count else f"cotangent_{i - count}")
        placeholder.meta["psg_fx_input"] = InputSpec("input", placeholder.name)
    graph.meta[facts.KEY] = facts.GraphFacts(op.batch)
    try:
        return op.prove(graph, dict(zip(placeholders, known, strict=True)))
    except PsgError as error:
        at: dict[str, Any] = {"where": locate(op.node), "why": error.why, "fix": error.fix}
        raise type(error)(f"in {inside}: {error.what}", **at) from None
