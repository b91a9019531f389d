"""Every legal tree of every network of every row gives the oracle's number: the planner can be slow, never wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from psg_fx.algebra.ask import Ask, Contraction, ThroughTotal
from psg_fx.algebra.asks import (
    FLOORS,
    Along,
    InnerProducts,
    Materialized,
    Projected,
    SquaredNorm,
    Squares,
    Weighted,
    direction,
    projection,
    sides,
    whole,
)
from psg_fx.algebra.gradient import GRADIENTS, ParameterGradient
from psg_fx.algebra.network import BATCH, Form, Kind, Leaf, Network, Patches, Source
from psg_fx.algebra.site import READ
from psg_fx.graph import facts
from psg_fx.ops.products import tile_products
from psg_fx.planner import rates
from psg_fx.planner.evaluate import Evaluator, compute
from psg_fx.planner.expr import Expr, LeafExpr, dense
from psg_fx.planner.methods import FUSED, METHODS, symmetric
from psg_fx.planner.plan import ParameterPlan, Part, Plan
from psg_fx.planner.trees import trees
from psg_fx.program.arguments.apart import take_apart
from psg_fx.step.binding import Binding, plain_mode
from psg_fx.tensors import product
from support import oracle
from support.cases import CASES, Case
from support.expected import Truth, tolerance_of
from support.rows import answered, in_one_process

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

ASKS = (
    Materialized(), SquaredNorm(), Weighted("given"), Weighted(""), Along(2), InnerProducts(), Squares(), Projected(2),
)  # fmt: skip
Open = list[tuple[Ask, Contraction]]


@dataclass
class Joint:
    """A captured row with the values of its joint graph."""

    gradients: dict[str, ParameterGradient]
    env: dict[Source, Tensor]
    batch: Any
    size: int
    truth: Truth

    def concrete(self, expression: Any) -> int:
        return facts.at(expression, self.batch, self.size) if hasattr(expression, "subs") else int(expression)


def joint(case: Case) -> Joint:
    """Run the joint graph of the row's step for the tensors that its networks read."""
    found = answered(case.name)
    call, gm = take_apart(((case.data(), {}), ((), {})), case.dims), found.step.graphs["merged"]
    info = facts.graph_facts(gm)
    with plain_mode():
        arguments = Binding(gm, found.model, found.loss).arguments(call, {})
        results = gm(*arguments)
    env = {Source(Kind.PLACEHOLDER, n.name): a for n, a in zip(facts.placeholders(gm), arguments, strict=True)}
    read = [(s, v) for s, v in zip(info.outputs, results, strict=True) if s.kind in READ]
    env |= {Source(READ[spec.kind], spec.name): value for spec, value in read}
    return Joint(GRADIENTS.of(gm), env, info.batch, call.batch_size(), found.truth)


def questions(gradient: ParameterGradient, batch: Any, through_total: bool) -> Open:
    """Everything that a plan may contract for this parameter, directly or through its materialised gradient."""
    found: Open = [(Materialized(), contraction) for contraction in Materialized().contractions(gradient)]
    source = whole(gradient, batch) if through_total else gradient
    for ask in ASKS[1:]:
        with contextlib.suppress(ThroughTotal):
            parts = ask.contractions(source)
            found += [(ask, replace(part, terms=()) if through_total else part) for part in parts]
    return found


def plans(joint: Joint, gradient: ParameterGradient) -> Iterator[tuple[Expr, ParameterPlan]]:
    """Plans in which every tree of every question comes up once, the other questions answered by some tree."""
    for through_total in (False, True):
        asked = questions(gradient, joint.batch, through_total)
        options = [[dense(tree) for tree in trees(part.network, joint.concrete, METHODS + FUSED)] for _, part in asked]
        assert all(options), "a network without a tree"
        base = tuple(
            Part(ask, contraction, trees_of[0], 0.0)
            for (ask, contraction), trees_of in zip(asked, options, strict=True)
        )
        yield base[0].tree, ParameterPlan(gradient, through_total, base, 0.0, "")
        for k, trees_of in enumerate(options):
            same = [part for part in base if part.ask == base[k].ask and part is not base[k]]
            needed = [part for part in base if part.ask == Materialized()] if through_total else []
            for tree in trees_of[1:]:
                parts = [replace(base[k], tree=tree), *same, *(p for p in needed if p is not base[k] and p not in same)]
                yield tree, ParameterPlan(gradient, through_total, tuple(parts), 0.0, "")


def evaluate(joint: Joint, plan: ParameterPlan, known: dict[int, Tensor]) -> dict[str, Tensor]:
    """The asks of the plan, by key.  known: nodes of the parameter's other plans, which are not computed again."""
    asks = tuple(dict.fromkeys(part.ask for part in plan.parts))
    step = Plan((plan,), asks, rates.CPU, joint.batch, joint.size)
    with plain_mode():
        evaluator = Evaluator(step, joint.env | given(plan.gradient), joint.size, torch.device("cpu"))
        evaluator.known |= known
        evaluator.first()
        evaluator.second({"given": {plan.gradient.name: joint.truth.weights}, "": {}})
    known.update(evaluator.known)
    return {key: values[plan.gradient.name] for key, values in evaluator.results.items() if values}


def given(gradient: ParameterGradient) -> dict[Source, Tensor]:
    """Directions and random matrices for a parameter."""
    generator = torch.Generator().manual_seed(3)
    found = {direction(gradient.name): torch.randn(2, *gradient.shape, generator=generator, dtype=torch.float64)}
    for new, side in zip("PQ", sides(gradient.shape), strict=False):
        found[projection(gradient.name, new)] = torch.randn(side, 2, generator=generator, dtype=torch.float64)
    return found


def floors(joint: Joint, gradient: ParameterGradient) -> Tensor:
    """8 ε S² by its definition: the gradient of every position by itself, their norms added up; groups apart."""
    reach, eps = torch.zeros(joint.size, dtype=torch.float64), 0.0
    for term in gradient.terms:
        g, letters = term.network, dict(zip(term.network.sizes, "abcdefghijklmnop", strict=False))
        operands = [built(leaf, joint) for leaf in g.leaves]
        eps = torch.finfo(operands[-1].dtype).eps
        shared = [x for x in g.out if x != BATCH and sum(x in leaf.axes for leaf in g.leaves) > 1]
        own = [x for x in g.out if x != BATCH and x not in shared]
        summed = [x for x in g.sizes if x not in g.out]
        spelled = ",".join("".join(letters[x] for x in leaf.axes) for leaf in g.leaves)
        each = torch.einsum(f"{spelled}->{''.join(letters[x] for x in (BATCH, *shared, *summed, *own))}", *operands)
        lead = each.shape[: 1 + len(shared)]
        rows = each.double().reshape(*lead, product(g.sizes[x].subs(joint.batch, joint.size) for x in summed), -1)
        reach += abs(g.scale) * rows.norm(dim=-1).sum(-1).reshape(joint.size, -1).norm(dim=1)
    return 8 * eps * reach.square()


def built(leaf: Leaf, joint: Joint) -> Tensor:
    """The operand as a tensor with all its axes."""
    expr = dense(LeafExpr(leaf.axes, {}, leaf.dtype, leaf))
    stored = leaf.build(*(joint.env[source] for source in leaf.sources))
    return compute(expr, [stored]) if expr.children else stored


def projected(name: str, g: Tensor, values: dict[Source, Tensor]) -> Tensor:
    """Pᵀ g_b Q, a side of at most two elements as it is."""
    matrix = g.reshape(g.shape[0], *sides(tuple(g.shape[1:])))
    for dim, new in zip((1, 2), "PQ", strict=True):
        if dim < matrix.ndim and matrix.shape[dim] > 2:
            matrix = torch.tensordot(matrix, values[projection(name, new)], ([dim], [0])).movedim(-1, dim)
    return matrix.flatten(1)


def expected(joint: Joint, gradient: ParameterGradient) -> dict[str, Tensor]:
    name, g = gradient.name, joint.truth.grads[gradient.name]
    flat, values = g.reshape(len(g), -1), given(gradient)
    return {
        "grads": g,
        "sq_norms": joint.truth.own[name].square(),
        FLOORS: floors(joint, gradient),
        "weighted:given": oracle.weighted_sum({name: g}, joint.truth.weights)[name],
        "weighted:": g.sum(0),
        "dots": flat @ values[direction(name)].reshape(2, -1).T,
        "gram": flat @ flat.T,
        "squares": g.square().sum(0),
        "projection": projected(name, g, values),
    }


SQUARED = ("sq_norms", "gram", "squares")
NOT_HERE = {
    "traps/counter": "another state at every call", "traps/spectral-norm-in-training": "another state at every call",
    "traps/fourier": "complex operands", "traps/fourier-modes": "complex operands",
}  # fmt: skip
"""What the references of this file say wrong, and those of `tests/quantities` right."""
ROWS = [case for case in CASES if not case.refused]
MANY = {"expert_mm/one-token", "bilinear", "layers/bilinear", "layers/lstm-two-ways"}
"""Rows with hundreds of trees, as a row beside them has."""
AGAIN = """
    linear/2d linear/no-bias linear/seq linear/two-middle-dims linear/one-position linear/time-major
    linear/samples-last linear/folded linear/folded-time-major linear/bias-only linear/frozen-bias
    linear/relu-stack mm/left addmm/2d addmm/alpha-beta addmm/folded addmm/bias-row addmm/param-left expand/bmm
    baddbmm/groups matmul/left matmul/vector matmul/vector-2d matmul/broadcast-one matmul/new-batch-dim
    matmul/heads einsum/linear einsum/param-first einsum/groups einsum/lonely-param-axis einsum/split-axes
    einsum/letters-b-and-t einsum/samples-inside einsum/ellipsis einsum/implicit einsum/three conv1d/same-even
    conv2d/plain conv2d/same conv2d/same-even conv2d/valid conv2d/pointwise conv2d/folded-windows
    conv2d/folded-pointwise conv1d/folded-windows-major conv2d/samples-last conv3d/pointwise embedding/seq
    embedding/one-token embedding/two-middle-dims embedding/padding embedding/negative-padding embedding/repeated
    embedding/time-major embedding/position-table embedding/padded-position-table embedding/raw-positions
    embedding_bag/sum embedding_bag/mean index/experts expand/gathered-columns gather/rows gather/fewer-columns
    layer_norm/2d layer_norm/seq layer_norm/no-bias layer_norm/dim-of-one layer_norm/time-major rms_norm/seq
    group_norm/2d group_norm/weight-only group_norm/folded instance_norm/1d batch_norm/eval-1d
    batch_norm/eval-images batch_norm/eval-volumes add/row add/leading-one add/middle-one add/scalar add/one
    add/alpha add/param-is-larger add/data-broadcasts add/samples-last add/new-leading-dims sub/param-first
    sub/reversed-number mul/row mul/column mul/folded div/numerator pow/exponent where/first prelu/channels
    prelu/images prelu/2d expand/class-token expand/new-dim expand/samples-inside expand/initial-state
    prefix/transpose prefix/slice prefix/view prefix/select prefix/unbind prefix/written-over prefix/convolved
    prefix/scaled prefix/cat prefix/stack-self prefix/overlapping-slices prefix/third-overlaps-second
    prefix/expanded-row prefix/functional-weight-norm prefix/weight-norm prefix/symmetric prefix/masked
    prefix/lora prefix/lora-activations prefix/flipped prefix/softmax prefix/conv-weight uses/different-lengths
    uses/penalty-only uses/no-grad expand/attention-key fallback/attention-memory fallback/cosine
    expand/cat-params-and-data add/grid-bias layers/lstm layers/rnn layers/attention layers/attention-time-major
    layers/attention-bias-kv
"""
"""Rows whose networks other rows have, too, as `test_no_row_that_is_left_out_has_another_network` says; but one of each
op is tried.
"""


def is_left(case: Case) -> bool:
    """Whether the row is in the rest, as traps are: they use the rules that other rows are for."""
    return case.name.startswith("traps/") or case.name in MANY or case.name in AGAIN.split()


FIRST = {case.name for case in ROWS if not is_left(case)}


def offer_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices are computed by half however few the positions are, and products with the squares of their tiles
    are offered here, too, by torch and in tiles smaller than any row.
    """
    monkeypatch.setattr(symmetric, "_FROM", 2)
    monkeypatch.setattr(symmetric, "_VECTOR", 1)
    monkeypatch.setattr(tile_products, "DTYPES", (torch.float64, *tile_products.DTYPES))
    monkeypatch.setattr(tile_products, "tile", lambda rows, columns: (2, 3))


@pytest.mark.parametrize("case", in_one_process(ROWS, FIRST))
def test_every_tree(case: Case, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if case.name in NOT_HERE:
        request.applymarker(pytest.mark.xfail(reason=NOT_HERE[case.name], strict=True))
    values = joint(case)
    offer_every_method(monkeypatch)
    tolerance = tolerance_of(case)
    for name, gradient in values.gradients.items():
        if not gradient.terms:
            continue
        want = expected(values, gradient)
        scale = max(g.abs().max().item() for g in values.truth.grads.values())
        known: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}
        for tree, plan in plans(values, gradient):
            for key, got in evaluate(values, plan, known[plan.total]).items():
                smallest = 0.0 if key == FLOORS else 1e-3 * scale ** (2 if key in SQUARED else 1)
                error = oracle.relative_error(got, want[key], smallest)
                assert error < tolerance, f"{key} of {name} by {tree}: relative error {error:.2e}"


def structure(network: Network) -> Any:
    """What says which trees there are, whatever the axes are called; of their sizes, only whether they are 1."""
    names: dict[str, str] = {BATCH: BATCH}

    def renamed(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.setdefault(axis, f"a{len(names)}") for axis in axes)

    leaves = [
        (type(leaf.form), leaf.kinds, leaf.dtype, renamed(leaf.axes), *strides(leaf.form)) for leaf in network.leaves
    ]
    return (*leaves, renamed(network.out), frozenset(names[a] for a, size in network.sizes.items() if size == 1))


def strides(form: Form) -> tuple[Any, ...]:
    return (form.groups, form.stride, form.dilation, form.padding) if isinstance(form, Patches) else ()


def structures(case: Case) -> set[Any]:
    """Of each parameter, those of all its uses."""
    gradients = GRADIENTS.of(answered(case.name).step.graphs["merged"])
    return {tuple(structure(term.network) for term in gradient.terms) for gradient in gradients.values()}


@pytest.mark.rest
def test_no_row_that_is_left_out_has_another_network() -> None:
    found = {case.name: structures(case) for case in ROWS if case.name in FIRST or case.name in AGAIN.split()}
    first = set().union(*(found[name] for name in FIRST))
    assert not {name for name, had in found.items() if had - first}
