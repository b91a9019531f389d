"""What prints decides nothing: the same plan and the same numbers, whatever things are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Gram, Norms, SecondMoment
from psg_fx.algebra import gradient, network, site
from psg_fx.algebra.ask import Phase
from psg_fx.planner import rates, search
from psg_fx.planner.expr import ContractExpr, DenseExpr, Expr, LeafExpr, SumExpr
from psg_fx.planner.groups import groups
from psg_fx.planner.plan import PLAN
from support import oracle
from support.selection import one_in


class Model(nn.Module):
    """Convolutions, an embedding that is used twice, a scaled weight, norms and a bias: every kind of leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv, self.up = nn.Conv1d(6, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 2)
        self.norm = nn.LayerNorm(6)
        self.layer = nn.Linear(6, 6)
        self.scaled = nn.Parameter(torch.randn(6, 6))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.up(self.conv(self.embed(ids).transpose(1, 2))).transpose(1, 2)
        h = self.layer(self.layer(self.norm(h)).tanh()) @ (0.5 * self.scaled)
        return F.linear(h, self.embed.weight)


ASKED = [Norms(), ClippedSum(0.1), Gram(), SecondMoment()]


def step(budget: int | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    made = psg_fx.transform(Model().double(), F.mse_loss, quantities=ASKED, backend="eager", memory_budget=budget)
    return made, made(torch.randint(7, (4, 9)), torch.randn(4, 10, 7, dtype=torch.float64))


def shape_of(expr: Expr) -> Any:
    """A tree without what it prints."""
    if isinstance(expr, LeafExpr):
        return (expr.leaf.sources, expr.leaf.recipe, expr.axes)
    if isinstance(expr, ContractExpr):
        return (expr.method.name, shape_of(expr.a), shape_of(expr.b), expr.axes)
    assert isinstance(expr, (DenseExpr, SumExpr))
    return (type(expr).__name__, shape_of(expr.child), expr.axes)


def decisions(made: Any) -> Any:
    """All that the planner decided, and how the plan is written."""
    plan = PLAN.of(made.graphs["planned"])
    parts = [
        (p.gradient.name, p.total, p.seconds, [(part.ask, shape_of(part.tree), part.seconds) for part in p.parts])
        for p in plan.parameters
    ]
    late = [part for p in plan.parameters for part in p.parts if part.ask.phase is Phase.AFTER_NORMS]
    kept = [sorted(search.kept_until_norms(part.tree).values()) for part in late]
    alike = [group.names for group in groups(plan)]
    return plan.seconds, plan.need, plan.part, kept, alike, parts


@pytest.fixture
def relabelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every label is another one, and in another order."""
    turned = {"x": "ȳ", "ȳ": "x", "c": "z", "v": "a", "patches(x)": "x", "onehot(ids)": "w"}
    leaf, term, prefix = network.Leaf.__init__, gradient.Term.__init__, site.Prefix.__init__

    def new_leaf(self: Any, label: str, *rest: Any, **named: Any) -> None:
        leaf(self, turned.get(label, "u"), *rest, **named)

    def new_term(self: Any, *given: Any, **named: Any) -> None:
        term(self, *given, **named)
        for name in ("op", "rule", "where"):
            object.__setattr__(self, name, "?")

    def new_prefix(self: Any, *given: Any, **named: Any) -> None:
        prefix(self, *given, **named)
        object.__setattr__(self, "ops", ("_to_copy",) * len(self.ops))

    monkeypatch.setattr(network.Leaf, "__init__", new_leaf)
    monkeypatch.setattr(gradient.Term, "__init__", new_term)
    monkeypatch.setattr(site.Prefix, "__init__", new_prefix)
    monkeypatch.setattr(site.Site, "op", property(lambda self: "?"))


@pytest.fixture
def dear_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is kept has a price from the first byte on."""
    table = rates.CPU
    monkeypatch.setattr(search, "_LITTLE", 0)
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: table)


@pytest.mark.parametrize("budget", one_in(2, [50_000, None]))
def test_labels_decide_nothing(budget: int | None, dear_memory: None, request: pytest.FixtureRequest) -> None:
    plain, want = step(budget)
    before = decisions(plain)
    request.getfixturevalue("relabelled")
    other, found = step(budget)
    assert decisions(other) == before
    assert torch.equal(found.norms, want.norms)
    assert oracle.worst_error(found.clipped_sum, want.clipped_sum) == 0


def test_activations_are_alive_anyway() -> None:
    """What a clipped sum reads and is computed before the norms is kept for it, ȳ too, but no activation as it is."""
    made, _ = step()
    plan = PLAN.of(made.graphs["planned"])
    late = [part for p in plan.parameters for part in p.parts if part.ask.phase is Phase.AFTER_NORMS]
    trees = [tree for part in late for tree in (part.tree, *(other for other, _ in part.alternatives))]
    kept = {key for tree in trees for key in search.kept_until_norms(tree)}
    leaves = {key: n.leaf for tree in trees for key, n in tree.nodes.items() if isinstance(n, LeafExpr)}
    stored = {key for key, leaf in leaves.items() if set(leaf.kinds) == {network.Kind.ACTIVATION}}
    gradients = {key for key, leaf in leaves.items() if leaf.kinds == (network.Kind.COTANGENT,)}
    assert stored
    assert not stored & kept
    assert gradients & kept
