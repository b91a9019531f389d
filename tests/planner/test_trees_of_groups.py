"""Every tree of the networks of groups whose rows stay where they are, against the whole product of its operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.asks import Along, InnerProducts, Materialized, SquaredNorm, Squares, Weighted
from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.members import GROUPS, Belonging, Grouping, Memberships
from psg_fx.algebra.network import Kind, Leaf, Members, Network, OneHot, Source
from psg_fx.algebra.site import Prefix
from psg_fx.planner.evaluate import compute, permuted
from psg_fx.planner.expr import Expr, LeafExpr, dense, seconds
from psg_fx.planner.rates import CPU
from psg_fx.planner.trees import trees

B, G, I, O, V = 6, 3, 4, 5, 7
BATCH = sympy.Symbol("B", integer=True, positive=True)
IDS = torch.tensor([1, 0, 1, -1, 1, 0])
ASKS: tuple[Ask, ...] = (
    Materialized(), SquaredNorm(), Weighted("given"), Weighted(""), Along(2), InnerProducts(), Squares(),
)  # fmt: skip


def leaf(name: str, axes: str, *sizes: int, form: OneHot | None = None) -> Leaf:
    sizes_of = (BATCH, *map(sympy.Integer, sizes))
    kind = Kind.COTANGENT if name == "ȳ" else Kind.ACTIVATION
    more = {} if form is None else {"form": form}
    return Leaf(name, (Source(kind, name),), name, tuple(axes), sizes_of, dtype=torch.float64, **more)


def linear(t: int) -> tuple[Network, tuple[int, ...]]:
    return Network((leaf("x", "bti", t, I), leaf("ȳ", "bto", t, O)), tuple("boi")), (O, I)


def bias(t: int) -> tuple[Network, tuple[int, ...]]:
    return Network((leaf("ȳ", "bto", t, O),), tuple("bo")), (O,)


def embedding(t: int) -> tuple[Network, tuple[int, ...]]:
    return Network((leaf("x", "btv", t, V, form=OneHot(V)), leaf("ȳ", "bto", t, O)), tuple("bvo")), (V, O)


def gradient(made: Callable[[int], tuple[Network, tuple[int, ...]]], t: int) -> ParameterGradient:
    network, shape = made(t)
    prefix = Prefix("w", ("w",), ("w",), {"w": "w"}, trivial=True, selects=True)
    term = Term(network, ("site",), "op", "rule", tuple(map(sympy.Integer, shape)), prefix)
    groups = Memberships({BATCH: Belonging.of_samples(Grouping("scattered", G, 3, B))}, GROUPS, G)
    return groups.gradient(ParameterGradient("w", shape, torch.float64, (term,)))


def values(t: int, shape: tuple[int, ...]) -> dict[Source, Tensor]:
    torch.manual_seed(0)
    made = {source: torch.randn(B, t, O if source.name == "ȳ" else I).double() for source in (
        Source(Kind.ACTIVATION, "x"), Source(Kind.COTANGENT, "ȳ"))}  # fmt: skip
    made[Source(Kind.GIVEN, "ids")] = IDS
    made[Source(Kind.WEIGHTS, "given")] = torch.randn(G).double()
    made[Source(Kind.GIVEN, "direction.w")] = torch.randn(2, *shape).double()
    return made


def concrete(size: sympy.Expr) -> int:
    return int(size.subs(dict.fromkeys(size.free_symbols, G)))


def evaluated(expr: Expr, env: dict[Source, Tensor], known: dict[int, Tensor]) -> Tensor:
    if expr.key not in known:
        if isinstance(expr, LeafExpr):
            known[expr.key] = expr.leaf.build(*(env[source] for source in expr.leaf.sources))
        else:
            known[expr.key] = compute(expr, [evaluated(child, env, known) for child in expr.children], G)
    return known[expr.key]


def whole(network: Network, env: dict[Source, Tensor]) -> Tensor:
    """The product of all operands, built."""
    letters = dict(zip(network.sizes, "abcdefghijklmnop", strict=False))
    operands = [evaluated(dense(LeafExpr(x.axes, {"b": G}, x.dtype, x)), env, {}) for x in network.leaves]
    spelled = ",".join("".join(letters[a] for a in x.axes) for x in network.leaves)
    return torch.einsum(f"{spelled}->{''.join(letters[a] for a in network.out)}", *operands)


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.key)
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("made", [linear, bias, embedding])
def test_every_tree(made: Callable[[int], tuple[Network, tuple[int, ...]]], t: int, ask: Ask) -> None:
    of_groups = gradient(made, t)
    env = values(t, of_groups.shape)
    if made is embedding:
        env[Source(Kind.ACTIVATION, "x")] = torch.randint(V, (B, t))
    (contraction,) = ask.contractions(of_groups)
    network = contraction.network
    assert any(isinstance(x.form, Members) for x in network.leaves)
    want, found = whole(network, env), trees(network, concrete)
    assert found
    known: dict[int, Tensor] = {}
    for tree in map(dense, found):
        got = permuted(evaluated(tree, env, known), tree.axes, network.out)
        assert torch.allclose(got, want, atol=1e-10), tree


@pytest.mark.parametrize("made", [linear, embedding])
def test_the_cheapest_is_found_among_few(
    made: Callable[[int], tuple[Network, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six leaves, of which all ways to contract some are followed, or the four cheapest of each."""
    (contraction,) = SquaredNorm().contractions(gradient(made, 3))

    def time(tree: Expr) -> float:
        return seconds(dense(tree), CPU)

    every = trees(contraction.network, concrete)
    monkeypatch.setattr("psg_fx.planner.trees._CHEAPEST", 4)
    few = trees(contraction.network, concrete, seconds=lambda node: node.seconds(CPU))
    assert len(few) < len(every)
    assert {tree.key for tree in few} < {tree.key for tree in every}
    assert min(map(time, few)) == min(map(time, every))


@pytest.mark.parametrize("ask", [Materialized(), SquaredNorm(), Along(2), InnerProducts()], ids=lambda ask: ask.key)
@pytest.mark.parametrize("made", [linear, bias])
def test_what_is_not_finite_stays_in_its_group(
    made: Callable[[int], tuple[Network, tuple[int, ...]]], ask: Ask
) -> None:
    """By every tree: sample 2 is of group 1, sample 3 of none."""
    of_groups = gradient(made, 1)
    env = values(1, of_groups.shape)
    for name, kind in (("x", Kind.ACTIVATION), ("ȳ", Kind.COTANGENT)):
        env[Source(kind, name)][2:4] = float("nan")
    (contraction,) = ask.contractions(of_groups)
    network, known = contraction.network, dict[int, Tensor]()
    for tree in map(dense, trees(network, concrete)):
        got = permuted(evaluated(tree, env, known), tree.axes, network.out)
        if ask.key == "gram":  # group 2 has no samples, and its product with a broken one may be 0 or NaN
            assert got[[0, 0, 2], [0, 2, 2]].isfinite().all(), tree
            assert got[[0, 1, 1], [1, 0, 1]].isnan().all(), tree
        else:
            assert got.reshape(G, -1).isnan().any(1).tolist() == [False, True, False], tree
