"""Runs a plan with torch functions.  Tracing this is how a plan becomes a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from psg_fx.algebra.ask import Ask, Phase
from psg_fx.algebra.asks import FLOORS, Materialized
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.network import (
    BATCH,
    Axes,
    Form,
    Kind,
    Members,
    OneHot,
    Patches,
    Routed,
    Source,
    TileSums,
    Unformed,
    WithTileSums,
    has_primed,
)
from psg_fx.algebra.prefix import pull_back
from psg_fx.planner.expr import ContractExpr, DenseExpr, Expr, LeafExpr, SumExpr, dense
from psg_fx.planner.methods import onehot, patches
from psg_fx.planner.plan import ParameterPlan, Part, Plan, reads_weights
from psg_fx.planner.rounding import floor
from psg_fx.tensors import accumulation_dtype, contiguous, permute, reshape


class Evaluator:
    """Computes every part of a plan; equal nodes are computed once.

    env: source -> tensor.  known: key of a node -> its tensor, of those that are computed; others may be entered.
    results: ask key -> parameter -> tensor; also the FLOORS of norms, for those that have one.
    named: contractions, worth a name in the graph: parameter, kind, tensor.
    leaving_out: names of weights whose zeros leave samples out of sums, even if these are NaN or inf.
    """

    def __init__(
        self, plan: Plan, env: dict[Source, torch.Tensor], count: int, device: torch.device,
        leaving_out: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.leaving_out = leaving_out
        self._absent: torch.Tensor | None = None
        self.plan, self.env, self.count, self.device = plan, env, count, device
        self.results: dict[str, dict[str, torch.Tensor]] = {key: {} for key in (*(a.key for a in plan.asks), FLOORS)}
        self.named: list[tuple[str, str, torch.Tensor]] = []
        self.known: dict[int, torch.Tensor] = {}
        self._weights: Mapping[str, Mapping[str, torch.Tensor]] = {}

    def first(self) -> None:
        """Everything that needs no weights of the samples: gradients, norms, products, plain sums."""
        for parameter in self.plan.parameters:
            self._ask(parameter, Materialized())
            for ask in self.plan.asks:
                if ask.phase is Phase.CONTRACTIONS:
                    self._ask(parameter, ask)
            found = floor(parameter, partial(self._evaluate, gradient=parameter.gradient, local=self.known))
            if found is not None:
                self.results[FLOORS][parameter.gradient.name] = found

    def second(self, weights: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """The weighted sums."""
        self._weights = weights
        for parameter in self.plan.parameters:
            for ask in self.plan.asks:
                if ask.phase >= Phase.WEIGHTED:
                    self._ask(parameter, ask)

    def _ask(self, plan: ParameterPlan, ask: Ask) -> None:
        parts = [part for part in plan.parts if part.ask == ask]
        asked = ask.key in self.results
        if not asked and not parts:
            return
        value = self._sum(plan.gradient, ask, parts)
        if ask.phase is Phase.GRADIENTS:
            self.env[Source(Kind.GRADS, plan.gradient.name)] = value
        if asked:
            self.results[ask.key][plan.gradient.name] = value

    def _sum(self, gradient: ParameterGradient, ask: Ask, parts: list[Part]) -> torch.Tensor:
        """One ask of one parameter, in its own shape; zero where no part of the loss reaches the parameter."""
        dtype = accumulation_dtype(gradient.dtype) if ask.accumulated else gradient.dtype
        shape = ask.shape(gradient, self.count)
        if not parts:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        values = [self._part(part, gradient) for part in parts]
        found = reshape(ask.finish(sum(values[1:], start=values[0]), len(values)), shape).to(dtype)
        return contiguous(found) if ask.like_parameter else found

    def _part(self, part: Part, gradient: ParameterGradient) -> torch.Tensor:
        """The part, for the parameter if the ask is like it, by weights as they were given."""
        largest = self._read_weights(part, gradient) if part.ask.reads else None
        value = self._pulled(part, gradient) if part.ask.like_parameter else self._value(part, gradient)
        return value if largest is None else value.to(torch.float32) * largest

    def _read_weights(self, part: Part, gradient: ParameterGradient) -> torch.Tensor | None:
        """Enter the weights of an ask.  Returns what its sum is to be multiplied by, if they are relative to that."""
        chosen = self._weights[part.ask.reads][gradient.name]
        weights, largest = _within(chosen, part.contraction.network.leaves[0].dtype)
        self.env[Source(Kind.WEIGHTS, part.ask.reads)] = weights
        self._absent = chosen == 0 if part.ask.reads in self.leaving_out else None
        return largest

    def _value(self, part: Part, gradient: ParameterGradient) -> torch.Tensor:
        """The part's contraction with its axes in the network's order."""
        network = part.contraction.network
        local = {} if part.ask.reads else self.known  # weights differ between parameters, which then share nothing
        tensor = self._evaluate(part.tree, gradient, local)
        return _scaled(permuted(tensor, part.tree.axes, network.out), network.scale * part.contraction.scale)

    def _pulled(self, part: Part, gradient: ParameterGradient) -> torch.Tensor:
        """The part for the parameter, from the one for the operand of its site."""
        value, batched = self._value(part, gradient), part.ask.per_sample
        lead = (self.count,) if batched else ()
        if not part.contraction.terms:
            return reshape(value, (*lead, *gradient.shape))
        term = gradient.terms[part.contraction.terms[0]]
        operand = reshape(value, (*lead, *(int(s) for s in term.shape)))
        pulled = pull_back(term, gradient.name, operand, self.env, batched)
        return reshape(pulled, (*lead, *gradient.shape))

    def _evaluate(self, expr: Expr, gradient: ParameterGradient, local: dict[int, torch.Tensor]) -> torch.Tensor:
        if expr.key in self.known:
            return self.known[expr.key]
        if expr.key in local:
            return local[expr.key]
        value: Any = self._compute(expr, gradient, local)
        keep(local if reads_weights(expr) else self.known, expr, value)
        if isinstance(expr, ContractExpr) and not isinstance(expr.arg.form, (Routed, Unformed)):
            self.named.append((gradient.name, _kind(expr), value[0] if isinstance(value, tuple) else value))
        return value  # type: ignore[no-any-return]

    def _compute(self, expr: Expr, gradient: ParameterGradient, local: dict[int, torch.Tensor]) -> torch.Tensor:
        if isinstance(expr, LeafExpr):
            return expr.leaf.build(*(self.env[source] for source in expr.leaf.sources))
        operands = [self._evaluate(child, gradient, local) for child in expr.children]
        if self._absent is not None and isinstance(expr, ContractExpr) and reads_weights(expr):
            operands = [
                self._present(x, child, expr.method.widens) for x, child in zip(operands, expr.children, strict=True)
            ]
        return compute(expr, operands, self.count)

    def _present(self, value: torch.Tensor, expr: Expr, widened: bool) -> torch.Tensor:
        """An operand with zeros for samples that are left out: 0 · NaN is NaN."""
        if reads_weights(expr) or BATCH not in expr.axes or not value.is_floating_point():
            return value
        assert self._absent is not None
        value = value.to(accumulation_dtype(value.dtype)) if widened else value  # of one cast all zeros are written
        place = expr.axes.index(BATCH) if expr.arg.dense else 0
        return value.masked_fill(self._absent.reshape([-1 if d == place else 1 for d in range(value.ndim)]), 0)


def keep(values: dict[int, Any], expr: Expr, value: Any) -> None:
    """Enter what a node came to; of a pair the tensor, too."""
    values[expr.key] = value
    if isinstance(expr.arg.form, WithTileSums):
        values[dense(expr).key] = value[0]


def compute(expr: Expr, operands: Sequence[torch.Tensor], count: int | None = None) -> torch.Tensor:
    """An inner node's tensor from those of its children.  count: of samples, or of groups of them; by default as
    planned.
    """
    if isinstance(expr, DenseExpr):
        (stored,), form = operands, _counted(expr.child.arg.form, expr.sizes, count)
        if isinstance(form, WithTileSums):
            return stored[0]
        if isinstance(form, OneHot):
            return onehot.densify(stored, form, expr.dtype)
        assert isinstance(form, Patches)
        return patches.densify(stored, form)
    if isinstance(expr, SumExpr):
        dims = [i for i, x in enumerate(expr.child.axes) if x not in expr.axes]
        return operands[0].sum(dims)
    assert isinstance(expr, ContractExpr)
    p = expr.pair
    a, b = (replace(arg, form=_counted(arg.form, p.sizes, count)) for arg in (p.a, p.b))
    return expr.method.emit(replace(p, a=a, b=b), *operands)


def _counted(form: Form, sizes: Mapping[str, int], count: int | None) -> Form:
    """The form with the number of groups."""
    if not isinstance(form, Members) and not (isinstance(form, Routed) and form.members):
        return form
    return replace(form, classes=sizes[BATCH] if count is None else count)


def _within(weights: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights in a dtype.  Of float16, which ends at 65504 and has few digits below 6e-5, relative to the largest one,
    which is returned, too: sums are multiplied by it.
    """
    if dtype is not torch.float16:
        return weights.to(dtype), None
    weights = weights.to(torch.float32)
    largest = torch.cat([weights.abs().reshape(-1), weights.new_zeros(1)]).amax()  # of no groups, too
    largest = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return (weights / largest).to(dtype), largest


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else tensor * scale


def _kind(expr: ContractExpr) -> str:
    if isinstance(expr.arg.form, TileSums):
        return "tile_squares"
    if has_primed(expr.axes):
        return "gram"
    if expr.axes == (BATCH,):
        return "sq_norm"
    return "grad_sample" if BATCH in expr.axes else "sum"


def permuted(tensor: torch.Tensor, have: Axes, want: Axes) -> torch.Tensor:
    """Bring axes into order."""
    return permute(tensor, [have.index(axis) for axis in want])
