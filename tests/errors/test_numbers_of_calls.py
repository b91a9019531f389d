"""What calls are given as numbers: what is none is refused in words, and those of NumPy are numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import psg_fx
from psg_fx import BadArgument, ClippedSum, Grads, Norms, WeightedSum
from psg_fx.algebra.asks import SquaredNorm, Weighted
from psg_fx.quantities.base import Extra, Shapes
from support.small import step

X, Y, W = torch.zeros(3, 4), torch.tensor([0, 1, 2]), torch.ones(3)


@dataclass(frozen=True)
class Trusting(psg_fx.Quantity):
    """Reads a keyword of its own."""

    field: ClassVar[str] = "trusting"
    reads: ClassVar[tuple[str, ...]] = ("trust",)

    def asks(self) -> tuple[Any, ...]:
        return SquaredNorm(), Weighted("trust", after_norms=True)

    def extras(self, gradients: Mapping[str, Any]) -> dict[str, Extra]:
        return {"trust": Extra(())}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"trust": given["trust"]["value"]}

    def weights(self, r: Any, extras: Any) -> dict[str, Mapping[str, torch.Tensor]]:
        return {"trust": {name: n * extras["trust"] for name, n in r["sq_norms"].items()}}

    def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
        return {"trusting": dict(r["weighted:trust"])}


def weighted(weights: Any) -> Any:
    return step(quantities=WeightedSum())(X, Y, weights=weights)


def in_parts(weights: Any) -> Any:
    return psg_fx.microbatch(step(quantities=WeightedSum()), 2)(X, Y, weights=weights)


def trusting(**given: Any) -> Any:
    return step(quantities=Trusting())(X, Y, **given)


def grouped(groups: Any, **given: Any) -> Any:
    return step(quantities=Norms())(X, Y, groups=groups, **given)


def over(**given: Any) -> Any:
    return psg_fx.over([(X, Y, Y)], step(quantities=Grads()), progress=False, **given)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: in_parts("abc"), "weights is a str"),
    "a set": (lambda: in_parts({1.0, 2.0}), "weights is a set"),
    "rows of several lengths": (lambda: in_parts([[1.0], [1.0, 2.0]]), "weights is a list"),
    "sparse weights": (lambda: in_parts(W.to_sparse()), "weights is sparse_coo"),
    "tensors of several shapes": (lambda: weighted([W[:1], W[:2], W[0]]), "weights is a list of tensors of several"),
    "nested weights": (lambda: weighted(torch.nested.nested_tensor([W[:1]] * 3)), "weights is nested"),
    "a keyword left out": (lambda: trusting(), r"Trusting needs trust\n *where  step\(inputs, targets, trust=...\)"),
    "a keyword of another kind": (lambda: trusting(trust=[1.0]), "Trusting.values fails on what .*\n.*\n.*TypeError"),
    "names of several kinds": (
        lambda: step(quantities=ClippedSum({0: 1.0, "bias": 2.0}, per="parameter"))(X, Y), "its names are not those of",
    ),
    "sparse groups": (lambda: grouped(Y.to_sparse()), "groups is sparse_coo"),
    "groups without values": (lambda: grouped(Y.to("meta")), "groups is on the meta device"),
    "groups beyond memory": (lambda: grouped(Y[[0, 2, 1]], num_groups=10**15), "no memory for 1000000000000000 groups"),
    "no function": (lambda: over(prepare=3), "prepare is a int"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(BadArgument, match=text):
        call()


def test_numbers_of_numpy() -> None:
    for budget in (np.int64(10**6), np.float32(0.5), np.float64(0.5)):
        assert step(quantities=Norms(), memory_budget=budget)(X, Y).norms.shape == (3,)
    for budget in (np.float32(1.5), np.int64(0), True):
        with pytest.raises(BadArgument, match="neither bytes nor a fraction"):
            step(quantities=Norms(), memory_budget=budget)
    assert over(groups=2, num_groups=np.int64(3)).grads["0.weight"].shape == (3, 5, 4)
    for count in (np.float64(3), True):
        with pytest.raises(BadArgument, match="is not a number of groups"):
            over(groups=2, num_groups=count)
