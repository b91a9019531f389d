"""Quantities of the user's own with `groups=`: each has a row, and what is given for it is read by its number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import psg_fx
from psg_fx.algebra.asks import Materialized, SquaredNorm, Weighted
from psg_fx.quantities.base import Extra, Shapes
from psg_fx.reference.definitions import of_groups
from support import oracle
from support.small import same_mlp, step

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 2, 1, 0, 2])
IDS = [0, 1, 0, -1, 3, 1]


@dataclass(frozen=True)
class Places(psg_fx.Quantity):
    """The place of each group in the order of norms, and what is taken of all of them."""

    field: ClassVar[str] = "places"

    def asks(self) -> tuple[Any, ...]:
        return SquaredNorm(), Weighted("shares", after_norms=True)

    def weights(self, r: Any, extras: Any) -> dict[str, Mapping[str, Tensor]]:
        return {"shares": dict.fromkeys(r["sq_norms"], self._norms(r).softmax(0))}

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        norms = self._norms(r)
        return {"places": norms.argsort(stable=True), "mean": norms.mean(), "shared": dict(r["weighted:shares"])}

    @staticmethod
    def _norms(r: Any) -> Tensor:
        return torch.stack(list(r["sq_norms"].values())).sum(0).sqrt()


@dataclass(frozen=True)
class Trusted(psg_fx.Quantity):
    """Σ_u t_u c_u g_u: the trust in each group, [G, 2], both numbers of it multiplied."""

    name: str = "trust"
    field: ClassVar[str] = "trusted"
    reads: ClassVar[tuple[str, ...]] = ("trust",)

    def asks(self) -> tuple[Any, ...]:
        return (Weighted("trusted"),)

    def extras(self, gradients: Mapping[str, Any]) -> dict[str, Extra]:
        return {self.name: Extra((None, 2))}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return {self.name: given["trust"]}

    def weights(self, r: Any, extras: Any) -> dict[str, Mapping[str, Tensor]]:
        return {"trusted": defaultdict(lambda: extras[self.name].prod(1))}

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"trusted": dict(r["weighted:trusted"])}

    def joins(self) -> Any:
        return {"trusted": "sum"}


def grads_of(groups: list[int], count: int) -> dict[str, Tensor]:
    return dict(of_groups(oracle.loop_grads(same_mlp(), F.cross_entropy, X, Y)[1], groups, count))


@pytest.mark.parametrize("count", [4, 5, 40])
def test_groups_without_samples_have_rows(count: int) -> None:
    """Brought in order and scattered."""
    grads = grads_of(IDS, count)
    norms = oracle.norms(grads)
    out = step(same_mlp(), quantities=[Places(), psg_fx.Norms()])(X, Y, groups=IDS, num_groups=count)
    assert out.places.tolist() == norms.argsort(stable=True).tolist()
    torch.testing.assert_close((out.mean, out.norms), (norms.mean(), norms))
    torch.testing.assert_close(out.shared, oracle.weighted_sum(grads, norms.softmax(0)))


def test_no_groups() -> None:
    for given in ({"groups": [-1] * 6}, {"groups": [-1] * 6, "num_groups": 0}):
        with pytest.raises(psg_fx.BadArgument, match="there are no groups"):
            step(same_mlp(), quantities=Places())(X, Y, **given)


@pytest.mark.parametrize("name", ["trust", "weights"])
@pytest.mark.parametrize("count", [4, 5])
def test_what_is_given_for_groups(count: int, name: str) -> None:
    trust = torch.linspace(-1, 2, 2 * count).double().view(count, 2)
    out = step(same_mlp(), quantities=Trusted(name))(X, Y, groups=IDS, num_groups=count, trust=trust)
    torch.testing.assert_close(out.trusted, oracle.weighted_sum(grads_of(IDS, count), trust.prod(1)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trust": torch.ones(5, 2)}, r"trust have shape \(5, 2\)[^\0]*each of the 6 samples[^\0]*pass a \[B, 2\]"),
        ({"trust": torch.ones(6, 3)}, r"trust have shape \(6, 3\)"), ({"trust": 1.0}, r"trust have shape \(\)"),
        ({"trust": torch.ones(6, 2), "groups": IDS}, r"each of the 4 groups[^\0]*pass a \[num_groups, 2\]"),
    ],
    ids=["rows", "columns", "a number", "groups"],
)  # fmt: skip
def test_what_is_given_has_the_shape_that_extras_say(given: dict[str, Any], words: str) -> None:
    with pytest.raises(psg_fx.BadArgument, match=words):
        step(same_mlp(), quantities=Trusted())(X, Y, **given)


@dataclass(frozen=True)
class Largest(psg_fx.Quantity):
    """The largest entry of each gradient."""

    field: ClassVar[str] = "largest"

    def asks(self) -> tuple[Any, ...]:
        return (Materialized(),)

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"largest": torch.cat([g.flatten(1) for g in r["grads"].values()], 1).amax(1)}

    def joins(self) -> Any:
        return {"largest": "cat"}


class Sums(Trusted):
    linear = True


def in_parts(made: Any, groups: list[int], **given: Any) -> list[Callable[[], Any]]:
    """The batch in parts, and in batches."""
    ids, count = torch.tensor(groups), max(groups) + 1
    batches = [(X[:3], Y[:3], ids[:3]), (X[3:], Y[3:], ids[3:])]
    return [
        lambda: psg_fx.microbatch(made, 3)(X, Y, groups=ids, **given),
        lambda: psg_fx.over(batches, made, groups=2, num_groups=count, progress=False, **given),
    ]


def test_rows_of_parts_of_a_group_are_added_only_where_the_quantity_says_so() -> None:
    texts = (
        "group 0 has samples in several parts[^\0]*linear = True",
        "largest of groups do not follow[^\0]*linear = True",
    )
    for call, text in zip(in_parts(step(same_mlp(), quantities=Largest()), [0, 1, 1, 0, 2, 2]), texts, strict=True):
        with pytest.raises(psg_fx.BadArgument, match=text):
            call()
    whole = in_parts(step(same_mlp(), quantities=Largest()), [0, 1, 1, 2, 3, 3])[0]()
    grads = grads_of([0, 1, 1, 2, 3, 3], 4)
    torch.testing.assert_close(whole.largest, torch.cat([g.flatten(1) for g in grads.values()], 1).amax(1))
    trust = torch.linspace(-1, 2, 6).double().view(3, 2)
    for call in in_parts(step(same_mlp(), quantities=Sums()), [0, 1, 1, 0, 2, 2], trust=trust):
        want = oracle.weighted_sum(grads_of([0, 1, 1, 0, 2, 2], 3), trust.prod(1))
        torch.testing.assert_close(dict(call().trusted), want)
