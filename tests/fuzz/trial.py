"""The proof alone: block i of every value, on a random batch, against the same graph on sample i.

A program is traced with a symbol for the batch size and proven; no pass after that runs, so that thousands of programs
are tried in minutes.  Half of them keep composite ops (`linear`, `layer_norm`), as a capture does.
"""

from __future__ import annotations

import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fuzz.check import Outcome, brief, judged
from fuzz.program import Misfit, Program
from fuzz.source import Built, build
from psg_fx.graph import facts
from psg_fx.graph.facts import GraphFacts, InputSpec, OutputSpec, SampleAxis
from psg_fx.graph.tracing import trace
from psg_fx.passes.independence.batch import batch
from psg_fx.torch_private.ops import writes

HINT = 101
SIZES = (3, 2)
WRITTEN_OUT = ("loss.by_hand", "loss.penalised", "mixing loss.over_samples")
"""Losses without ops that hold a reduction inside."""
EMPTY = ("new_empty", "empty_like", "empty", "new_empty_strided", "empty_strided")


def trial(program: Program) -> Outcome:
    """Prove a program and hold the facts against values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            built = build(program)
            if built.counts:
                return Outcome("discarded", "computes with the number of samples")
            alone(built, SIZES[0])
        except Misfit as misfit:
            return Outcome("discarded", f"misfit: {misfit}")
        except Exception as error:
            return Outcome("discarded", f"does not run: {brief(error)}", traceback.format_exc())
        try:
            made = traced(built)
        except Exception as error:  # tracing is torch's
            return Outcome("discarded", f"not traced: {brief(error)}", traceback.format_exc())
        if made is None:
            return Outcome("discarded", "one batch size")
        found = proven(made)
        if found.failed:
            return found
        try:
            wrong = next((text for size in SIZES if (text := disagreement(built, made, size))), "")
        except RuntimeError as error:  # a view that was recorded for other strides
            return Outcome("discarded", f"not run: {brief(error)}", traceback.format_exc())
    return (
        Outcome("wrong", wrong.split(":")[0], f"{wrong}\n{made.print_readable(print_output=False)}") if wrong else found
    )


def proven(gm: GraphModule) -> Outcome:
    """Set the facts of the graph, up to what is refused."""

    def run() -> Outcome:
        batch(gm)
        return Outcome("ok")

    return judged(run)


def whole(built: Built) -> Callable[..., Tensor]:
    """The loss, or the output where the loss is one op, as a function of parameters and buffers, inputs and targets."""
    kept = built.program.loss.op in WRITTEN_OUT
    names = [n for n, _ in (*built.model.named_parameters(), *built.model.named_buffers())]

    def function(state: Sequence[Tensor], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        output = torch.func.functional_call(built.model, dict(zip(names, state, strict=True)), tuple(inputs))
        found: Tensor = built.loss(output, *targets) if kept else output
        return found

    return function


def state(built: Built) -> list[Tensor]:
    return [t.detach() for t in (*built.model.parameters(), *built.model.buffers())]


def samples(built: Built, size: int, i: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """The data of a batch, or of one sample of it."""
    inputs, targets = built.draw(size, size)
    if i is None:
        return list(inputs), list(targets)
    dims = built.batch_dim[0]
    return [x.narrow(d, i, 1).contiguous() for x, d in zip(inputs, dims, strict=True)], [t[i : i + 1] for t in targets]


def alone(built: Built, size: int) -> list[Tensor]:
    """The loss (or output) of each sample, as the program computes it."""
    with torch.no_grad():
        return [whole(built)(state(built), *samples(built, size, i)) for i in range(size)]


def traced(built: Built) -> GraphModule | None:
    """The program with a symbol for the batch size; None where it has fixed the size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(value: Tensor, dim: int | None) -> Tensor:
        dims = [DimDynamic.DUCK if d == dim else DimDynamic.STATIC for d in range(value.ndim)]
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))

    inputs, targets = samples(built, HINT)
    places = [*[None] * len(state(built)), *built.batch_dim[0], *[0] * len(targets)]
    leaves = [fake(t, d) for t, d in zip((*state(built), *inputs, *targets), places, strict=True)]
    first, second = len(state(built)), len(state(built)) + len(inputs)

    def flat(*values: Tensor) -> Tensor:
        return whole(built)(values[:first], values[first:second], values[second:])

    gm = make_fx(flat, tracing_mode="symbolic", pre_dispatch=True)(*leaves) if composite(built.program) else None
    if gm is None or any(writes(node.target) for node in gm.graph.nodes):
        gm = trace(flat, leaves)
    nodes = facts.placeholders(gm)
    for node, dim in zip(nodes, places, strict=True):
        node.meta["psg_fx_input"] = InputSpec("parameter" if dim is None else "input", node.name, samples=dim)
    size = next(n.meta["val"].shape[d] for n, d in zip(nodes, places, strict=True) if d is not None)
    if isinstance(size, int) or facts.expr(size).is_Integer:
        return None
    kind = "loss" if built.program.loss.op in WRITTEN_OUT else "output"
    out = gm.graph.output_node()
    if isinstance(out.args[0], Node):
        out.args = ((out.args[0],),)
    gm.meta[facts.KEY] = GraphFacts(facts.expr(size), (OutputSpec(kind, kind),))  # type: ignore[arg-type]
    gm.recompile()
    return gm


def composite(program: Program) -> bool:
    """Whether composite ops are kept."""
    return bool(zlib.crc32(program.name.encode()) & 1)


class Recorder(Interpreter):
    """Runs a graph and keeps all values; memory that was never written holds ones."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().call_function(target, args, kwargs)
        name = target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""
        return found.fill_(1) if name in EMPTY else found

    def record(self, built: Built, inputs: list[Tensor], targets: list[Tensor]) -> dict[Node, Any]:
        with torch.no_grad():
            self.run(*state(built), *inputs, *targets)
        return dict(self.env)


def disagreement(built: Built, gm: GraphModule, size: int) -> str:
    """The first value whose block i is not that of sample i, or nothing."""
    recorder = Recorder(gm, garbage_collect_values=False)
    values = recorder.record(built, *samples(built, size))
    expected = alone(built, size)
    for i in range(size):
        single = recorder.record(built, *samples(built, size, i))
        for node, value in values.items():
            fact = facts.fact(node)
            if numbers_samples(node):
                continue
            if facts.KEY not in node.meta or fact.reduced or node.op == "output":
                continue
            if not same(value, single[node], fact.samples, i):
                return (
                    f"{node.target} ({fact.proof}): %{node.name} says {fact.samples}; not so for sample {i} of {size}"
                )
        last = gm.graph.output_node().args[0][0]  # type: ignore[index]
        if not close(single[last].flatten(), expected[i].flatten()):
            return f"the graph on one sample: {single[last]}, the program {expected[i]}"
    return ""


def numbers_samples(node: Node) -> bool:
    """Whether the value holds the number of each sample, which a sample alone does not know: a view of arange(B)."""
    if facts.fact(node).proof == "view":
        source = node.args[0]
        return isinstance(source, Node) and numbers_samples(source)
    return facts.fact(node).proof == "number of the sample"


def same(value: Any, single: Any, axes: Any, i: int) -> bool:
    """Whether block i of the axis is the value of sample i."""
    if isinstance(value, (tuple, list)):
        each = axes if isinstance(axes, tuple) else [axes] * len(value)
        return all(same(v, s, a, i) for v, s, a in zip(value, single, each, strict=True))
    return not isinstance(value, Tensor) or close(block(value, axes, i), single)


def block(value: Tensor, axis: SampleAxis | None, i: int) -> Tensor:
    """The entries of sample i."""
    if axis is None:
        return value
    parts = value.unflatten(axis.dim, (axis.outer, -1, axis.inner))
    return parts.select(axis.dim + 1, i).flatten(axis.dim, axis.dim + 1)


def close(value: Tensor, single: Tensor) -> bool:
    """Equal up to rounding."""
    return value.shape == single.shape and torch.allclose(value, single, rtol=1e-5, atol=1e-7, equal_nan=True)
