"""Runs a plan with torch functions.  Tracing this is how a plan becomes a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psg_fx.each import Gathered, for_each_sample
from psg_fx.gradient import ParameterGradient, Term
from psg_fx.layout import permute, reshape
from psg_fx.methods import onehot, patches
from psg_fx.methods.dense import accumulation_dtype
from psg_fx.network import Axes, OneHot, Patches
from psg_fx.paths import ContractExpr, DenseExpr, Expr, LeafExpr, SumExpr
from psg_fx.planning import ParameterPlan, Part, Plan, reads_weights
from psg_fx.quantity import Ask, Materialized, SquaredNorm, Weighted


class Evaluator:
    """Computes every part of a plan; equal nodes are computed once.

    env: name of a source -> tensor.  results: ask key -> parameter -> tensor.
    named: tensors worth a name in the graph.
    """

    def __init__(self, plan: Plan, env: dict[str, torch.Tensor], count: int, device: torch.device) -> None:
        self.plan, self.env, self.count, self.device = plan, env, count, device
        self.results: dict[str, dict[str, torch.Tensor]] = {ask.key: {} for ask in plan.asks}
        self.named: dict[str, torch.Tensor] = {}
        self._memo: dict[int, torch.Tensor] = {}
        self._weights: Mapping[str, Mapping[str, torch.Tensor]] = {}

    def first(self) -> None:
        """Everything that needs no weights: gradients and norms."""
        for parameter in self.plan.parameters:
            self._ask(parameter, Materialized())
            self._ask(parameter, SquaredNorm())

    def second(self, weights: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """The weighted sums."""
        self._weights = weights
        for parameter in self.plan.parameters:
            for ask in self.plan.asks:
                if isinstance(ask, Weighted):
                    self._ask(parameter, ask)

    def _ask(self, plan: ParameterPlan, ask: Ask) -> None:
        key, parts = ask.key, [part for part in plan.parts if part.ask == ask]
        asked = key in self.results
        if not asked and not parts:
            return
        name = plan.gradient.name
        value = self._sum(plan, parts, key)
        if key == Materialized.key:
            self.env[f"grads:{name}"] = value
        if asked:
            self.results[key][name] = value

    def _sum(self, plan: ParameterPlan, parts: list[Part], key: str) -> torch.Tensor:
        gradient = plan.gradient
        if not parts:
            return self._zero(gradient, key)
        if key == SquaredNorm.key:
            found = [_scaled(self._value(part, gradient), part.scale) for part in parts]
            return torch.stack(found).sum(0).clamp(min=0) if len(found) > 1 else found[0]
        pulled = [self._pulled(part, gradient, batched=key == Materialized.key) for part in parts]
        total = pulled[0]
        for other in pulled[1:]:
            total = total + other
        shape = (self.count, *gradient.shape) if key == Materialized.key else gradient.shape
        return reshape(total, shape).to(gradient.dtype)

    def _zero(self, gradient: ParameterGradient, key: str) -> torch.Tensor:
        if key == Materialized.key:
            return torch.zeros((self.count, *gradient.shape), dtype=gradient.dtype, device=self.device)
        if key == SquaredNorm.key:
            return torch.zeros((self.count,), dtype=accumulation_dtype(gradient.dtype), device=self.device)
        return torch.zeros(gradient.shape, dtype=gradient.dtype, device=self.device)

    def _value(self, part: Part, gradient: ParameterGradient) -> torch.Tensor:
        """The part's contraction with its axes in the network's order."""
        if isinstance(part.ask, Weighted) and part.ask.weights:
            chosen = self._weights[part.ask.weights][gradient.name]
            self.env[f"weights:{part.ask.weights}"] = chosen.to(part.network.leaves[0].dtype)
        local: dict[int, torch.Tensor] = {} if self._own_weights(part) else self._memo
        tensor = self._evaluate(part.tree, gradient, local)
        out = permuted(tensor, part.tree.axes, part.network.out)
        return _scaled(out, part.network.scale)

    def _own_weights(self, part: Part) -> bool:
        """Whether nodes above the weights differ between parameters, so that they must not be shared by key."""
        return isinstance(part.ask, Weighted) and bool(part.ask.weights)

    def _pulled(self, part: Part, gradient: ParameterGradient, batched: bool) -> torch.Tensor:
        value = self._value(part, gradient)
        if not part.terms:
            return reshape(value, gradient.shape)
        term = gradient.terms[part.terms[0]]
        lead = (self.count,) if batched else ()
        return pull_back(term, gradient.name, reshape(value, (*lead, *(int(s) for s in term.shape))), self.env, batched)

    def _evaluate(self, expr: Expr, gradient: ParameterGradient, local: dict[int, torch.Tensor]) -> torch.Tensor:
        if expr.key in self._memo:
            return self._memo[expr.key]
        if expr.key in local:
            return local[expr.key]
        value = self._compute(expr, gradient, local)
        (local if reads_weights(expr) else self._memo)[expr.key] = value
        if isinstance(expr, ContractExpr):
            self.named[f"{gradient.name}_{_kind(expr)}_{len(self.named)}"] = value
        return value

    def _compute(self, expr: Expr, gradient: ParameterGradient, local: dict[int, torch.Tensor]) -> torch.Tensor:
        if isinstance(expr, LeafExpr):
            return expr.leaf.build(*(self.env[source] for source in expr.leaf.sources))
        if isinstance(expr, DenseExpr):
            stored, form = self._evaluate(expr.child, gradient, local), expr.child.leaf.form
            if isinstance(form, OneHot):
                return onehot.densify(stored, form, expr.dtype)
            assert isinstance(form, Patches)
            return patches.densify(stored, form)
        if isinstance(expr, SumExpr):
            child = self._evaluate(expr.child, gradient, local)
            dims = [i for i, x in enumerate(expr.child.axes) if x not in expr.axes]
            return child.sum(dims)
        assert isinstance(expr, ContractExpr)
        a, b = self._evaluate(expr.a, gradient, local), self._evaluate(expr.b, gradient, local)
        return expr.method.emit(expr.pair, a, b)


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else tensor * scale


def _kind(expr: ContractExpr) -> str:
    if any(axis.endswith("'") for axis in expr.axes):
        return "gram"
    if expr.axes == ("b",):
        return "sq_norm"
    return "grad_sample" if "b" in expr.axes else "sum"


def permuted(tensor: torch.Tensor, have: Axes, want: Axes) -> torch.Tensor:
    """Bring axes into order."""
    return permute(tensor, [have.index(axis) for axis in want])


def pull_back(
    term: Term, name: str, value: torch.Tensor, env: Mapping[str, torch.Tensor], batched: bool
) -> torch.Tensor:
    """From the operand back to the parameter through what made it: Jᵀ v, for each sample if `batched`."""
    prefix = term.prefix
    if prefix.trivial:
        return value
    assert prefix.graph is not None
    graph = prefix.graph
    inputs = [env[f"placeholder:{n}"] for n in prefix.inputs]
    own = [i for i, n in enumerate(prefix.inputs) if prefix.owners[n] == name]

    def pull(cotangent: torch.Tensor, *filled: torch.Tensor) -> torch.Tensor:
        def operand(*parameters: torch.Tensor) -> Any:
            replaced = dict(zip(own, parameters, strict=True))
            return Gathered(graph).run(*(replaced.get(i, value) for i, value in enumerate(filled)))

        result, back = torch.func.vjp(operand, *(filled[i] for i in own))[:2]
        first, *others = back(cotangent.to(result.dtype))
        total: torch.Tensor = sum(others, start=first)
        return total

    if not batched:
        return pull(value, *inputs)
    return for_each_sample(
        pull, [0, *[None] * len(inputs)], [value, *inputs], "·".join(prefix.ops), f"{term.where} (on the way of {name})"
    )
