"""Quantities of the user's own beside others: names that both use, and what they return."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported
from psg_fx.algebra.asks import Along, SquaredNorm, Weighted, direction
from psg_fx.quantities.base import Extra, Shapes
from support import oracle
from support.small import same_mlp

X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])


def weighing(filled: str, name: str, weight: Callable[[Tensor], Tensor]) -> psg_fx.Quantity:
    """A sum whose weights, of this name, follow from the norms."""

    @dataclass(frozen=True)
    class Sum(psg_fx.Quantity):
        def asks(self) -> tuple[Any, ...]:
            return SquaredNorm(), Weighted(name, after_norms=True)

        def weights(self, r: Any, extras: Any) -> dict[str, Mapping[str, Tensor]]:
            norms = torch.stack(list(r["sq_norms"].values())).sum(0).sqrt()
            return {name: dict.fromkeys(r["sq_norms"], weight(norms))}

        def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
            return {filled: dict(r[f"weighted:{name}"])}

    Sum.field = filled
    return Sum()


@dataclass(frozen=True)
class Entries(psg_fx.Quantity):
    """The sum of the entries of each sample's gradient."""

    field = "entries"

    def asks(self) -> tuple[Any, ...]:
        return (Along(),)

    def extras(self, gradients: Mapping[str, Any]) -> dict[str, Extra]:
        return {direction(name).name: Extra(g.shape, g.dtype) for name, g in gradients.items()}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return {direction(name).name: torch.ones(shape) for name, shape in shapes.items()}

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"entries": torch.stack(list(r["dots"].values())).sum(0)}


class Surplus(Entries):
    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return super().values(shapes, given) | {"more": 1.0}


class Unnamed(Entries):
    """Names no extras."""

    def extras(self, gradients: Mapping[str, Any]) -> dict[str, Extra]:
        return {}


class Elsewhere(Entries):
    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"sums": r["dots"]["bias"]}


class Misnamed(Entries):
    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"entries": r["products"]["bias"]}


PARAMETERS = ("weight", "bias")


def weighs(made: Callable[[Tensor], Any]) -> psg_fx.Quantity:
    """A weighted sum whose weights are made of the norms as `made` says."""

    @dataclass(frozen=True)
    class Own(psg_fx.Quantity):
        field: ClassVar[str] = "own"

        def asks(self) -> tuple[Any, ...]:
            return (SquaredNorm(), Weighted("mine", after_norms=True))

        def weights(self, r: Any, extras: Any) -> Any:
            return made(r["sq_norms"]["bias"].sqrt())

        def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
            return {"own": dict(r["weighted:mine"])}

    return Own()


def named(name: str) -> psg_fx.Quantity:
    """A quantity that fills a field of this name."""

    @dataclass(frozen=True)
    class Own(psg_fx.Quantity):
        field: ClassVar[str] = name

        def asks(self) -> tuple[Any, ...]:
            return (SquaredNorm(),)

        def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
            return {name: r["sq_norms"]["bias"]}

    return Own()


HALF, NONE = weighing("half", "half", lambda norms: 0.5 + 0 * norms), weighing("none", "none", lambda norms: 0 * norms)
AS_CLIP, AS_HALF = weighing("one", "clip", torch.ones_like), weighing("one", "half", torch.ones_like)
REFUSED: dict[str, tuple[list[psg_fx.Quantity], str]] = {
    "weights of a clipped sum": ([psg_fx.ClippedSum(0.1), AS_CLIP], "Sum.weights names 'clip'.*one_clip"),
    "a clipped sum of these weights": ([AS_CLIP, psg_fx.ClippedSum(0.1)], "ClippedSum.weights names 'clip'"),
    "weights of two": ([HALF, AS_HALF], "Sum.weights names 'half', which another quantity"),
    "directions": ([psg_fx.Dots(), Entries()], "Entries.extras names 'direction.bias', which another quantity"),
    "directions first": ([Entries(), psg_fx.Dots()], "Dots.extras names 'direction.bias', which another quantity"),
    "no extras": ([Unnamed()], "an ask reads 'direction.weight', and no quantity of the step names it"),
    "values of another's extras": ([Surplus()], "Surplus.values gives 'more', which its extras do not name"),
    "another field": ([Elsewhere()], "Elsewhere.finish cannot be part.*it fills 'sums', and its field is 'entries'"),
    "weights for no parameter": ([weighs(lambda n: {"mine": n})], "Own.weights .*gives .* for 'mine', and every"),
    "weights for one parameter": ([weighs(lambda n: {"mine": {"weight": n}})], "Own.weights .*gives None for 'mine'"),
    "weights for more rows": (
        [weighs(lambda n: {"mine": dict.fromkeys(PARAMETERS, torch.cat([n, n[:1]]))})],
        "Own.weights .* for each row",
    ),
    "a number as weights": ([weighs(lambda n: {"mine": dict.fromkeys(PARAMETERS, 0.5)})], "Own.weights .*gives 0.5"),
    "weights of no name": ([weighs(lambda n: {"main": dict.fromkeys(PARAMETERS, n)})], "weights 'mine', and no quant"),
    "no weights": ([weighs(lambda n: None)], "Own.weights .*gives None"),
    "a field of results": ([named("indices")], "Own fills the field 'indices'"),
    "another result": ([Misnamed()], "KeyError: 'products'; there are 'dots'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    quantities, text = REFUSED[name]
    directions = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    given = {"directions": directions} if any(isinstance(q, psg_fx.Dots) for q in quantities) else {}
    with pytest.raises(psg_fx.BadArgument, match=f"(?s){text}"):
        psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=quantities, backend="eager")(X, Y, **given)


def test_beside_others() -> None:
    quantities = [HALF, psg_fx.ClippedSum(0.1), NONE, Entries(), psg_fx.Grads()]
    out = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=quantities, backend="eager")(X, Y)
    sums = {name: grads.sum(0) for name, grads in out.grads.items()}
    for name in sums:
        torch.testing.assert_close(out.half[name], 0.5 * sums[name])
        assert not out.none[name].any()
    torch.testing.assert_close(out.entries, sum(grads.flatten(1).sum(1) for grads in out.grads.values()))
    assert torch.cat([g.flatten() for g in out.clipped_sum.values()]).norm() <= 0.1 * 5


FACTOR = 2.0


def doubled(value: Tensor) -> Tensor:
    return value * FACTOR


@dataclass(frozen=True)
class Scaled(psg_fx.Quantity):
    """Squared norms times numbers that lie in different places."""

    kind: str
    own: float = 2.0
    around: Any = field(default=None, compare=False)
    field = "scaled"

    def asks(self) -> tuple[Any, ...]:
        return (SquaredNorm(),)

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        found = torch.stack(list(r["sq_norms"].values())).sum(0)
        of = {
            "attribute": lambda: found * self.own,
            "global": lambda: doubled(found),
            "held": lambda: self.around(found),
        }
        return {"scaled": of[self.kind]()}


@pytest.mark.parametrize("kind", ["attribute", "global", "held"])
def test_what_it_reads_is_compared_at_every_call(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    factors = {"factor": 2.0}
    quantity = Scaled(kind, around=lambda found: found * factors["factor"])
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=quantity, backend="eager")
    before = step(X, Y).scaled

    def changed(to: float) -> None:
        if kind == "attribute":
            object.__setattr__(quantity, "own", to)
        elif kind == "global":
            monkeypatch.setitem(globals(), "FACTOR", to)
        else:
            factors["factor"] = to

    for factor, captures in ((6.0, 2), (2.0, 2)):
        changed(factor)
        assert torch.allclose(step(X, Y).scaled, before * factor / 2)
        assert len(step.captures) == captures
    changed(6.0)
    assert step.validate(X, Y).ok


def test_what_is_another_number_at_every_call_is_refused() -> None:
    drawn = Scaled("held", around=lambda found: found * random.random())
    with pytest.raises(NotYetSupported, match=r"random"):
        psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=drawn, backend="eager")(X, Y)


AS_ANY_NUMBER: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "larger": lambda n, batch: n.sum() / max(batch, 1), "shape": lambda n, batch: n.sum() / n.shape[0] ** 0.5,
    "some": lambda n, batch: n.sort().values[:4].mean(), "half": lambda n, batch: n[: batch // 2].sum(),
    "made": lambda n, batch: n * torch.arange(batch), "chosen": lambda n, batch: n.median() + n.var(),
}  # fmt: skip
AS_ONE_NUMBER: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "branch": lambda n, batch: n.mean() if batch <= 3 else n.var(),
    "large": lambda n, batch: n.mean() if batch > 50 else n.var(),
    "shape": lambda n, batch: n.mean() if n.shape[0] > 1 else n.sum(),
    "length": lambda n, batch: n.sum() / len(n), "float": lambda n, batch: n.sum() / float(batch),
    "loop": lambda n, batch: sum(n, torch.zeros(())),
}  # fmt: skip


@dataclass(frozen=True)
class OfNorms(psg_fx.Quantity):
    """What a function makes of squared norms and their number."""

    made: Callable[[Tensor, Any], Tensor]
    field: ClassVar[str] = "own"

    def asks(self) -> tuple[Any, ...]:
        return (SquaredNorm(),)

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"own": self.made(torch.stack(list(r["sq_norms"].values())).sum(0), batch)}


@pytest.mark.parametrize("kind", AS_ANY_NUMBER)
def test_one_graph_for_every_number_of_samples(kind: str) -> None:
    model, made = nn.Linear(4, 3), AS_ANY_NUMBER[kind]
    step = psg_fx.transform(model, F.cross_entropy, quantities=OfNorms(made), backend="eager")
    for size in (5, 2, 3):
        norms = oracle.norms(oracle.loop_grads(model, F.cross_entropy, X[:size], Y[:size])[1])
        torch.testing.assert_close(step(X[:size], Y[:size]).own, made(norms.square(), size).float())
    assert len(step.captures) == 1


@pytest.mark.parametrize("kind", AS_ONE_NUMBER)
def test_what_goes_by_the_number_of_samples_is_refused(kind: str) -> None:
    quantity = OfNorms(AS_ONE_NUMBER[kind])
    for dynamic in (None, False):
        step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=quantity, backend="eager", dynamic=dynamic)
        with pytest.raises(psg_fx.PsgError, match=r"test_own.py:\d+: .*lambda n, batch|as a loop over them") as refused:
            step(X, Y)
        assert not isinstance(refused.value, psg_fx.InternalError)


@pytest.mark.parametrize("name", ["counted", "groups", "ids", "members", "members.0"])
def test_names_of_inputs_that_graphs_have_anyway(name: str) -> None:
    class Named(Entries):
        def extras(self, gradients: Mapping[str, Any]) -> dict[str, Extra]:
            return super().extras(gradients) | {name: Extra(())}

    with pytest.raises(psg_fx.BadArgument, match=f"Named.extras names '{name}'[^\0]*such as entries_{name}"):
        psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=Named(), backend="eager")(X, Y)


def test_a_clipped_sum_derived_from_that_of_psg_fx() -> None:
    class Own(psg_fx.ClippedSum):
        pass

    out = [psg_fx.transform(same_mlp(), F.cross_entropy, quantities=kind(0.1), backend="eager")(X.double(), Y)
           for kind in (Own, psg_fx.ClippedSum)]  # fmt: skip
    torch.testing.assert_close(dict(out[0].clipped_sum), dict(out[1].clipped_sum))


class Norms(psg_fx.Norms):
    """Derived from one of psg_fx: it fills what that fills."""


def test_a_field_of_another_quantity_is_refused() -> None:
    class Both(Scaled):
        def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
            found = super().finish(r, weights, batch)
            return found | {"norms": found["scaled"]}

    for quantities in ([Both("attribute")], [psg_fx.ClippedSum(1.0), Both("attribute")]):
        step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=quantities, backend="eager")
        with pytest.raises(psg_fx.BadArgument, match=r"it fills 'norms' as well[^\0]*give the field another name"):
            step(X, Y)
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=Norms(), backend="eager")
    assert step(X, Y).norms.shape == (5,)
