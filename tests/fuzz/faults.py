"""Known faults, put into psg_fx for a while: what the fuzz must find.

Each names the instructions that can show it, so that a test need not run the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fuzz.program import Program
from psg_fx import op_table
from psg_fx.algebra import asks
from psg_fx.algebra.network import Leaf, Network
from psg_fx.graph import sample_axis
from psg_fx.graph.facts import SampleAxis
from psg_fx.passes.rules import conv

aten = torch.ops.aten


@dataclass(frozen=True)
class Fault:
    """proof: whether the proof alone shows it.  shows: whether a program may."""

    inject: Callable[[], contextlib.AbstractContextManager[Any]]
    shows: Callable[[Program], bool]
    proof: bool = False


@contextlib.contextmanager
def square_weights_transposed() -> Iterator[None]:
    """The rule of linear confuses input and output where that is possible."""
    rule = op_table.known(aten.linear.default).gradient
    assert rule is not None

    def wrong(site: Any) -> Mapping[str, Network | None]:
        found = dict(rule.function(site))
        weight = found.get("weight")
        if weight is not None and len({weight.sizes[a] for a in weight.out[1:]}) == 1:
            found["weight"] = dataclasses.replace(weight, out=(weight.out[0], *reversed(weight.out[1:])))
        return found

    with op_table.changed(aten.linear.default, gradient=dataclasses.replace(rule, function=wrong)):
        yield


@contextlib.contextmanager
def planes_moved() -> Iterator[None]:
    """The patches of a convolution are read one pixel too late."""
    right = conv.patches_leaf

    def wrong(*given: Any) -> Leaf:
        leaf = right(*given)
        return dataclasses.replace(leaf, build=lambda x: leaf.build(x).roll(1, -1))

    with mock.patch.object(conv, "patches_leaf", wrong):
        yield


@contextlib.contextmanager
def last_use_forgotten() -> Iterator[None]:
    """What is linear in the gradient reads all uses of a parameter but the last."""
    right = asks.Linear.contractions

    def wrong(self: Any, gradient: Any) -> Any:
        found = right(self, gradient)
        return found[:-1] if len(found) > 1 else found

    with mock.patch.object(asks.Linear, "contractions", wrong):
        yield


def called_a_view(name: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """An independence rule that says: the samples stay where they are."""
    rule = op_table.SampleRule(lambda op: op.need("self").axis, "view")
    return lambda: op_table.changed(name, samples=rule)


@contextlib.contextmanager
def folds_turned() -> Iterator[None]:
    """A view says that what is folded inside of the samples lies outside."""
    right = sample_axis.through_view

    def wrong(*given: Any) -> SampleAxis:
        found = right(*given)
        return SampleAxis(found.dim, found.inner, found.outer)

    with mock.patch.object(sample_axis, "through_view", wrong):
        yield


def using(*parts: str) -> Callable[[Program], bool]:
    """The programs whose text has all of these."""
    return lambda program: all(part in program.to_json() for part in parts)


FAULTS = {
    "linear's weight transposed": Fault(square_weights_transposed, using("attention.module")),
    "patches moved": Fault(planes_moved, using("layer.conv")),
    "last use forgotten": Fault(last_use_forgotten, using('"again"')),
    "flip is a view": Fault(called_a_view("flip"), using("mixing", "flip"), proof=True),
    "cumsum is a view": Fault(called_a_view("cumsum"), using("mixing", "cumsum"), proof=True),
    "softmax is a view": Fault(called_a_view("_softmax"), using("mixing", "softmax"), proof=True),
    "sort is a view": Fault(called_a_view("sort"), using("mixing", "sort"), proof=True),
    "folds turned": Fault(folds_turned, using("fold.merge"), proof=True),
}
