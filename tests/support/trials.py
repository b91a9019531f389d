"""Trials of independence rules: one operator, its samples placed in its arguments, and what its rule says of that.

The program of one sample is a call as it is found; the batch holds three such calls with other values, joined along a
dim of the arguments that carry samples.  A dim of size n then has n·B entries, laid out as any outer · B · inner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from psg_fx.errors import NotYetSupported, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import GraphFacts, SampleAxis
from psg_fx.passes.independence.probe import candidates, close, take
from psg_fx.passes.independence.table import SampleRule
from psg_fx.passes.independence.values import Result
from psg_fx.passes.independence.walk import Prover
from support.op_samples import Call
from support.placements import NUMBER, PIVOTED, SAME, Placement

SIZE, TRIED = 7, (0, 1, 6)  # no argument has a size of 7, so nothing is mistaken for the batch


@dataclass(frozen=True)
class Outcome:
    """What a trial showed.  said: the rule accepted; holds: it is true on the values (None: nothing was claimed)."""

    call: Call
    placement: Placement
    said: str
    holds: bool | None = None

    def __str__(self) -> str:
        return f"{self.call.signature()} with {self.placement}: {self.said}"


# ---- the values ------------------------------------------------------------------------------------------------------


def join(parts: list[Tensor], axis: SampleAxis) -> Tensor:
    """Samples put together: the inverse of `take`."""
    unfolded = [p.unflatten(axis.dim, (axis.outer, 1, axis.inner)) for p in parts]
    return torch.cat(unfolded, axis.dim + 1).flatten(axis.dim, axis.dim + 2)


def shuffled(value: Tensor, k: int) -> Tensor:
    """The same entries at other places, smaller ones for floating point: what was valid mostly stays so."""
    if k == 0:
        return value
    generator = torch.Generator().manual_seed(k)
    moved = value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)
    if value.numel() == 1 and value.dtype == torch.bool:
        return ~moved if k == 1 else moved
    return moved * 0.8**k if value.is_floating_point() or value.is_complex() else moved


def scaled(value: Tensor, k: int) -> Tensor:
    """Other sizes, the same structure (a positive definite matrix stays one)."""
    return value * 1.5**k if value.is_floating_point() or value.is_complex() else value


def extreme(value: Tensor, k: int) -> Tensor:
    """Sample 1 far from the others, for what depends on the largest or smallest of all."""
    far = k == 1 and (value.is_floating_point() or value.is_complex())
    return shuffled(value, k) * -60.0 if far else shuffled(value, k)


def part(value: Tensor, axis: SampleAxis, kind: str, k: int, vary: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The argument of sample k."""
    if kind == NUMBER:
        return torch.full(value.shape, k)
    if kind == SAME:
        return value.narrow(axis.dim, 0, 1).expand(value.shape).contiguous()
    return vary(value, k)


class Values:
    """The call on the batch, and on some samples alone."""

    def __init__(self, call: Call, placement: Placement, vary: Callable[[Tensor, int], Tensor]) -> None:
        leaves, _ = call.leaves()
        samples: list[list[Any]] = [list(leaves) for _ in TRIED]
        batch = list(leaves)
        for place, axis in placement.axes.items():
            kind = placement.kinds[place]
            fixed = call.name in PIVOTED and not leaves[place].is_floating_point()
            parts = [part(leaves[place], axis, kind, 0 if fixed else k, vary) for k in range(SIZE)]
            batch[place] = join(parts, axis)
            for sample, k in zip(samples, TRIED, strict=True):
                sample[place] = parts[0] if kind == NUMBER else parts[k]
        for place in placement.sized:
            batch[place] = leaves[place] * SIZE
        self.batch = call.with_leaves(batch)
        found = self.batch.run()
        self.plain = isinstance(found, Tensor)
        self.whole = entries(found)
        self.alone = [entries(call.with_leaves(s).run()) for s in samples]
        if any([shape_of(v) for v in s] != [shape_of(v) for v in self.alone[0]] for s in self.alone):
            raise ValueError("the shapes depend on the values")
        if [v.ndim for v in self.whole if isinstance(v, Tensor)] != [
            v.ndim for v in self.alone[0] if isinstance(v, Tensor)
        ] or not any(isinstance(v, Tensor) for v in self.whole):
            raise ValueError("the number of dims or of outputs depends on the batch size")


def shape_of(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def entries(value: Any) -> list[Any]:
    """The outputs of an operator."""
    return [value] if isinstance(value, Tensor) else list(value) if isinstance(value, (tuple, list)) else [value]


# ---- the question --------------------------------------------------------------------------------------------------


@functools.cache
def shapes() -> tuple[FakeTensorMode, torch.SymInt, sympy.Symbol]:
    """A symbol B for the batch size, and the mode in which it lives."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size = mode.from_tensor(torch.empty(7919), symbolic_context=context).shape[0]
    assert isinstance(size, torch.SymInt)
    return mode, size, size.node.expr


@functools.lru_cache(maxsize=100_000)
def symbolic(single: tuple[int, ...], whole: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A fake tensor whose shape is `single` at B = 1 and `whole` in the batch, linear in B."""
    mode, _, _ = shapes()
    with mode:
        return torch.empty([symbolic_size(s, w) for s, w in zip(single, whole, strict=True)], dtype=dtype)


def symbolic_size(single: int, whole: int) -> Any:
    """A size as c·B + a; B² where no whole numbers fit, since no rule may accept either."""
    batch, slope = shapes()[1], (whole - single) // (SIZE - 1)
    if slope * (SIZE - 1) != whole - single or single < slope or slope < 0:
        return batch * batch
    return slope * batch + (single - slope) if slope else single


def described(single: list[Any], whole: list[Any], plain: bool) -> Any:
    """`meta["val"]` of an operator."""
    found = [
        symbolic(tuple(s.shape), tuple(w.shape), w.dtype) if isinstance(w, Tensor) else w
        for s, w in zip(single, whole, strict=True)
    ]
    return found[0] if plain else tuple(found)


def answer(call: Call, placement: Placement, values: Values, rule: SampleRule) -> Result:
    """What the rule says, checked against the shapes; or its refusal."""
    _, size, symbol = shapes()
    root = GraphModule({}, Graph()) if not _ROOT else _ROOT[0]
    _ROOT[:] = [root]
    root.meta[facts.KEY] = GraphFacts(symbol)
    prover, graph = Prover(root), Graph()
    leaves: list[Any] = []
    for place, (one, many) in enumerate(zip(call.leaves()[0], values.batch.leaves()[0], strict=True)):
        leaves.append(one)
        if isinstance(one, Tensor):
            leaves[-1] = graph.placeholder(f"argument_{place}")
            leaves[-1].meta["val"] = symbolic(tuple(one.shape), tuple(many.shape), many.dtype)
            kind = placement.kinds.get(place)
            prover.known[leaves[-1]] = Result(placement.axes.get(place), kind == SAME, int(kind == NUMBER))
        elif place in placement.sized:
            leaves[-1] = graph.placeholder(f"argument_{place}")
            leaves[-1].meta["val"] = one * size
            prover.known[leaves[-1]] = Result()
    args, kwargs = call.with_leaves(leaves).args, call.with_leaves(leaves).kwargs
    node: Node = graph.call_function(call.op, tuple(args), dict(kwargs))
    node.meta["val"] = described(values.alone[0], values.whole, values.plain)
    found, _ = prover.operate(node)
    prover.check(node, found)
    return found


_ROOT: list[GraphModule] = []


# ---- the trial -----------------------------------------------------------------------------------------------------


def trial(call: Call, placement: Placement, rule: SampleRule) -> Outcome | None:
    """Ask the rule and check its answer; None where the operator does not run on such a batch."""
    for vary in (shuffled, scaled):
        try:
            values = Values(call, placement, vary)
        except Exception:
            continue
        break
    else:
        return None
    try:
        found = answer(call, placement, values, rule)
    except SamplesMixed as error:
        return Outcome(call, placement, f"mixed ({error.why})", None if call.drawn else apart(values))
    except NotYetSupported as error:
        return Outcome(call, placement, f"not yet ({error.why})", None if call.drawn else apart(values))
    if found.reduced:
        return Outcome(call, placement, "reduced")
    if placement.sized and not placement.axes and found.axes is None:
        return Outcome(call, placement, "no samples: its number is taken at B = 1")
    holds = call.drawn or true(found, values)
    try:
        if holds and not call.drawn:
            holds = true(found, Values(call, placement, extreme))
    except Exception:  # the values are not valid for this operator
        pass
    return Outcome(call, placement, f"accepted {found}", holds)


def true(found: Result, values: Values) -> bool:
    """Block i of each output's axis is the output on sample i alone; an output without samples is the same for all."""
    each = found.axes if isinstance(found.axes, tuple) else (found.axes,) * len(values.whole)
    for place, (whole, axis) in enumerate(zip(values.whole, each, strict=True)):
        if not isinstance(whole, Tensor):
            continue
        rows = [alone[place] for alone in values.alone]
        if found.index and axis is not None:
            rows = [row + i * found.index for i, row in zip(TRIED, rows, strict=True)]
        if not agree(whole, rows, axis):
            return False
        if found.uniform and axis is not None and not close(whole, whole.narrow(axis.dim, 0, 1).expand_as(whole)):
            return False
    return True


def agree(whole: Tensor, rows: list[Tensor], axis: SampleAxis | None) -> bool:
    """Whether `whole` holds the rows of each sample at its place."""
    if axis is not None and whole.shape[axis.dim] != axis.outer * SIZE * axis.inner:
        return False
    return all(close(take(whole, axis, i), row) for i, row in zip(TRIED, rows, strict=True))


def apart(values: Values) -> bool:
    """Whether the samples stay apart for some axis of each output, whatever the rule says."""
    for place, whole in enumerate(values.whole):
        if not isinstance(whole, Tensor):
            continue
        rows = [alone[place] for alone in values.alone]
        grown = [d for d in range(whole.ndim) if whole.shape[d] == SIZE * rows[0].shape[d]]
        options = [a for d in grown for a in candidates(d, rows[0].shape[d])] if grown else [None]
        if not any(agree(whole, rows, axis) for axis in options):
            return False
    return any(isinstance(w, Tensor) and w.shape != values.alone[0][k].shape for k, w in enumerate(values.whole))
