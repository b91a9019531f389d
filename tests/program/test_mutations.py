"""Capture, change one thing of the Python around the model, call again: the new value, never the old one."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.mutated import Config, Row, Scaled, Slotted, X, scaled, seen
from support.selection import one_in

ARGS = argparse.Namespace(beta=1.0)
SPACE = types.SimpleNamespace(inner=types.SimpleNamespace(beta=1.0))
NUMBER = 1.0
HELPER_SCALE = 1.0


def helper() -> float:
    return HELPER_SCALE


class Trainer:
    """Holds the model, the loss and its weight, as training loops do."""

    def __init__(self) -> None:
        self.model, self.beta, self.settings = Scaled(), 1.0, {"alpha": 1.0}
        self.teacher = nn.Linear(3, 3).double()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.beta * self.settings["alpha"] * F.cross_entropy(output, target)

    def distilled(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - self.teacher(X[:1]).detach()).square().sum() + F.cross_entropy(output, target)


def with_trainer(make: Callable[[Trainer], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        trainer = Trainer()
        return trainer.model, make(trainer)

    return build


def two_deep() -> tuple[nn.Module, Any]:
    value = [1.0]

    def outer() -> Callable[[Tensor, Tensor], Tensor]:
        def inner(output: Tensor, target: Tensor) -> Tensor:
            return value[0] * F.cross_entropy(output, target)

        return lambda output, target: inner(output, target)

    loss = outer()
    loss.value = value  # type: ignore[attr-defined]
    return Scaled(), loss


def by_default(output: Tensor, target: Tensor, table: dict[str, list[float]] = {"w": [1.0]}) -> Tensor:  # noqa: B006
    return table["w"][0] * F.cross_entropy(output, target)


def double(output: Tensor, target: Tensor) -> Tensor:
    return 2 * F.cross_entropy(output, target)


def fresh(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def of_number(output: Tensor, target: Tensor) -> Tensor:
    return NUMBER * F.cross_entropy(output, target)


def of_args(output: Tensor, target: Tensor) -> Tensor:
    return ARGS.beta * F.cross_entropy(output, target)


def of_space(output: Tensor, target: Tensor) -> Tensor:
    return SPACE.inner.beta * F.cross_entropy(output, target)


def of_helper(output: Tensor, target: Tensor) -> Tensor:
    return helper() * F.cross_entropy(output, target)


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def closure_of(loss: Any) -> Any:
    return loss.__closure__[0].cell_contents


def teacher_loss() -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9)).double().eval()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * teacher[0](torch.ones(1, 3, dtype=torch.float64))).sum() + F.cross_entropy(output, target)

    return Scaled(), loss


def dropping_teacher() -> tuple[nn.Module, Any]:
    teacher = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)).double().eval()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * teacher(torch.ones(1, 3, dtype=torch.float64))).sum() + F.cross_entropy(output, target)

    return Scaled(), loss


class OwnDict(dict[str, float]):
    k = 1.0


class OwnTanh(nn.Tanh):
    """Has no forward of its own."""


class Distance:
    scale = 1.0


def by_distance(a: Tensor, b: Tensor) -> Tensor:
    return Distance.scale * (a - b).square().sum(-1)


def of_builtin(output: Tensor, target: Tensor) -> Tensor:
    return abs(-2) * F.cross_entropy(output, target)


def by_pattern(output: Tensor, target: Tensor) -> Tensor:
    match CASE:
        case Config(k=1.0):
            return F.cross_entropy(output, target)
        case _:
            return 2 * F.cross_entropy(output, target)


def by_asdict(output: Tensor, target: Tensor) -> Tensor:
    return dataclasses.asdict(CASE)["k"] * F.cross_entropy(output, target)


def of_triplets(output: Tensor, target: Tensor) -> Tensor:
    return F.triplet_margin_with_distance_loss(output, output.roll(1, 1), output.flip(1), distance_function=by_distance)


def decayed(m: Any) -> float:
    return 3.0 if getattr(m.layer.weight, "decays", False) else 1.0


CASE = Config()
KEPT = {"k": 1.0}
READ, GET, VIEW = types.MappingProxyType(KEPT), KEPT.get, KEPT.values()
BY_DEFAULT: Any = collections.defaultdict(float)
OWN_DICT = OwnDict(a=1.0)


ROWS: dict[str, Row] = {
    "attribute-of-a-parameter": (scaled(decayed), lambda m, _: setattr(m.layer.weight, "decays", True)),
    "attribute-of-a-dict": (scaled(lambda self: OWN_DICT.k), lambda *_: setattr(OWN_DICT, "k", 3.0)),
    "class-of-an-object": (
        scaled(lambda self: 3.0 if isinstance(self.slotted, OtherSlots) else 1.0),
        lambda m, _: setattr(m.slotted, "__class__", OtherSlots)),
    "view-of-a-mapping": (scaled(lambda self: READ["k"]), lambda *_: KEPT.update(k=3.0)),
    "method-of-a-dict": (scaled(lambda self: GET("k")), lambda *_: KEPT.update(k=3.0)),
    "values-of-a-dict": (scaled(lambda self: sum(VIEW)), lambda *_: KEPT.update(k=3.0)),
    "default-of-a-dict": (
        scaled(lambda self: 1.0 + dict(BY_DEFAULT).get("new", BY_DEFAULT.default_factory())),
        lambda *_: setattr(BY_DEFAULT, "default_factory", lambda: 2.0)),
    "forward-of-a-layer-that-had-none": (
        lambda: (nn.Sequential(Scaled(), OwnTanh()), F.cross_entropy),
        lambda *_: setattr(OwnTanh, "forward", lambda self, x: x.sin())),
    "function-that-torch-calls": (lambda: (Scaled(), of_triplets), lambda *_: setattr(Distance, "scale", 3.0)),
    "global-before-a-builtin": (lambda: (Scaled(), of_builtin), lambda *_: set_global("abs", lambda v: 7.0)),
    "pattern": (lambda: (Scaled(), by_pattern), lambda *_: setattr(CASE, "k", 3.0)),
    "asdict": (lambda: (Scaled(), by_asdict), lambda *_: setattr(CASE, "k", 3.0)),
    "attribute": (scaled(lambda self: self.gain), lambda m, _: setattr(m, "gain", 3.0)),
    "class-attribute": (scaled(lambda self: self.gain), lambda m, _: setattr(Scaled, "gain", 3.0)),
    "getattr-with-default": (
        scaled(lambda self: getattr(self, "later", 1.0)), lambda m, _: setattr(m, "later", 3.0)),
    "hasattr": (scaled(lambda self: 3.0 if hasattr(self, "later") else 1.0), lambda m, _: setattr(m, "later", 3.0)),
    "getattr-by-a-made-name": (
        scaled(lambda self: getattr(self.config, "k" + "")), lambda m, _: setattr(m.config, "k", 3.0)),
    "own-dict": (scaled(lambda self: self.__dict__.get("later", 1.0)), lambda m, _: setattr(m, "later", 3.0)),
    "vars": (scaled(lambda self: vars(self).get("later", 1.0)), lambda m, _: setattr(m, "later", 3.0)),
    "config": (scaled(lambda self: self.config.k), lambda m, _: setattr(m.config, "k", 3.0)),
    "property": (scaled(lambda self: self.doubled), lambda m, _: setattr(m.config, "k", 3.0)),
    "replaced-config": (scaled(lambda self: self.config.k), lambda m, _: setattr(m, "config", Config(k=3.0))),
    "slots": (scaled(lambda self: self.slotted.gain), lambda m, _: setattr(m.slotted, "gain", 3.0)),
    "dict": (scaled(lambda self: self.table["a"][0]), lambda m, _: m.table["a"].__setitem__(0, 3.0)),
    "depth-4": (
        scaled(lambda self: self.config.more["a"]["b"]["c"]["d"]),
        lambda m, _: m.config.more["a"]["b"]["c"].__setitem__("d", 3.0)),
    "list": (scaled(lambda self: sum(self.items)), lambda m, _: m.items.append(3.0)),
    "long-list": (scaled(lambda self: self.config.many[150]), lambda m, _: m.config.many.__setitem__(150, 3.0)),
    "array": (scaled(lambda self: float(self.array.sum())), lambda m, _: m.array.__setitem__(0, 3.0)),
    "tensor-in-place": (scaled(lambda self: self.plain), lambda m, _: m.plain.mul_(3.0)),
    "tensor-replaced": (scaled(lambda self: self.plain), lambda m, _: setattr(m, "plain", 3 * m.plain)),
    "tensor-of-another-shape": (
        scaled(lambda self: self.plain), lambda m, _: setattr(m, "plain", 3 * torch.ones(1, dtype=torch.float64))),
    "tensor-item": (scaled(lambda self: self.plain[:1].clone() if self.plain is None else float(m_item(self))),
                    lambda m, _: m.plain.mul_(3.0)),
    "method": (scaled(lambda self: 1.0), lambda m, _: setattr(m, "scaled", m.doubled_scaled)),
    "class-method": (scaled(lambda self: 1.0), lambda m, _: setattr(Scaled, "scaled", Scaled.doubled_scaled)),
    "forward": (scaled(lambda self: 1.0), lambda m, _: setattr(m, "forward", lambda x: 2 * m.layer(x))),
    "class-forward": (
        scaled(lambda self: 1.0), lambda m, _: setattr(Scaled, "forward", lambda self, x: 2 * self.layer(x))),
    "layer-forward": (
        scaled(lambda self: 1.0), lambda m, _: setattr(m.layer, "forward", lambda x: 2 * F.linear(x, m.layer.weight))),
    "hook": (scaled(lambda self: 1.0), lambda m, _: m.layer.register_forward_hook(lambda module, i, o: 2 * o)),
    "pre-hook": (scaled(lambda self: 1.0), lambda m, _: m.layer.register_forward_pre_hook(lambda module, i: 2 * i[0])),
    "another-class": (scaled(lambda self: 1.0), lambda m, _: setattr(m, "__class__", Other)),
    "global": (lambda: (Scaled(), of_number), lambda *_: set_global("NUMBER", 3.0)),
    "global-namespace": (lambda: (Scaled(), of_args), lambda *_: setattr(ARGS, "beta", 3.0)),
    "global-inner": (lambda: (Scaled(), of_space), lambda *_: setattr(SPACE.inner, "beta", 3.0)),
    "helper-global": (lambda: (Scaled(), of_helper), lambda *_: set_global("HELPER_SCALE", 3.0)),
    "helper-itself": (lambda: (Scaled(), of_helper), lambda *_: set_global("helper", lambda: 3.0)),
    "helper-code": (lambda: (Scaled(), of_helper), lambda *_: setattr(helper, "__code__", (lambda: 3.0).__code__)),
    "loss-code": (lambda: (Scaled(), fresh), lambda *_: setattr(fresh, "__code__", double.__code__)),
    "closure-two-deep": (two_deep, lambda _, loss: loss.value.__setitem__(0, 3.0)),
    "default": (lambda: (Scaled(), by_default), lambda *_: by_default.__defaults__[0]["w"].__setitem__(0, 3.0)),  # type: ignore[index]
    "bound-method": (with_trainer(lambda t: t.loss), lambda _, loss: setattr(loss.__self__, "beta", 3.0)),
    "bound-method-dict": (
        with_trainer(lambda t: t.loss), lambda _, loss: loss.__self__.settings.__setitem__("alpha", 3.0)),
    "lambda-of-self": (
        with_trainer(lambda t: lambda o, y: t.beta * F.cross_entropy(o, y)),
        lambda _, loss: setattr(closure_of(loss), "beta", 3.0)),
    "partial": (
        lambda: (Scaled(), functools.partial(by_default, table={"w": [1.0]})),
        lambda _, loss: loss.keywords["table"]["w"].__setitem__(0, 3.0)),
    "teacher-data": (
        teacher_loss, lambda _, loss: setattr(closure_of(loss)[0].weight, "data", 3 * closure_of(loss)[0].weight.data)),
    "teacher-parameter": (
        teacher_loss,
        lambda _, loss: setattr(closure_of(loss)[0], "weight", nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))),
    "teacher-module": (
        teacher_loss, lambda _, loss: closure_of(loss).__setitem__(0, nn.Linear(3, 3, dtype=torch.float64))),
    "teacher-in-place": (teacher_loss, lambda _, loss: closure_of(loss)[0].bias.data.add_(1.0)),
    "teacher-train": (dropping_teacher, lambda _, loss: closure_of(loss).train()),
    "teacher-of-a-trainer": (
        with_trainer(lambda t: t.distilled),
        lambda _, loss: setattr(loss.__self__.teacher.weight, "data", torch.ones(3, 3, dtype=torch.float64))),
    "teacher-of-a-trainer-replaced": (
        with_trainer(lambda t: t.distilled),
        lambda _, loss: setattr(loss.__self__, "teacher", nn.Linear(3, 3, dtype=torch.float64))),
    "default-dtype-read": (
        scaled(lambda self: 3.0 if torch.get_default_dtype() is torch.float64 else 1.0),
        lambda *_: torch.set_default_dtype(torch.float64)),
}  # fmt: skip


def m_item(self: Any) -> float:
    return sum(self.plain.tolist())


class OtherSlots(Slotted):
    __slots__ = ()


class Other(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return 5 * self.layer(x)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """What a row changes is put back."""
    known, classes = dict(globals()), {c: dict(vars(c)) for c in (Scaled,)}
    codes = {f: f.__code__ for f in (helper, fresh)}
    yield
    globals().update(known)
    for name in set(globals()) - set(known):
        del globals()[name]
    CASE.k = KEPT["k"] = Distance.scale = OWN_DICT.k = 1.0
    BY_DEFAULT.default_factory = float
    if "forward" in vars(OwnTanh):
        del OwnTanh.forward
    ARGS.beta = SPACE.inner.beta = 1.0
    by_default.__defaults__[0]["w"][0] = 1.0  # type: ignore[index]
    for kind, held in classes.items():
        for name in ("gain", "forward", "scaled"):
            setattr(kind, name, held[name])
    for function, code in codes.items():
        function.__code__ = code
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", one_in(6, ROWS))
def test_a_change_is_seen(name: str) -> None:
    seen(ROWS[name])
