"""Capture, change what a function, a class, a cache or a module found by name holds: the new value, never the old."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.mutated import Row, Scaled, X, Y, scaled, seen

HERE = 1.0
OBJECTS = np.array([1.0, "a name"], dtype=object)


class Metaclass(type):
    gain = 1.0


class Settings(metaclass=Metaclass):
    @staticmethod
    def space(start: float = 1.0) -> None:
        """Is never called: a namespace, as functions are used at times."""


SPACE: Any = Settings.space
MODULE: Any = None


@pytest.fixture(autouse=True)
def unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a row changes is as at first."""
    global MODULE, HERE
    HERE = Metaclass.gain = OBJECTS[0] = 1.0
    vars(SPACE).clear()
    SPACE.gain, SPACE.table, SPACE.tensor, SPACE.__defaults__ = 1.0, {"a": 1.0}, ones(), (1.0,)
    (tmp_path / "module_by_name.py").write_text("GAIN = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    MODULE = importlib.import_module("module_by_name")
    yield
    del sys.modules["module_by_name"]


def ones() -> Tensor:
    return torch.ones(3, dtype=torch.float64)


def set_here(value: float) -> None:
    global HERE
    HERE = value


ROWS: dict[str, Row] = {
    "attribute of a function": (scaled(lambda _: SPACE.gain), lambda *_: setattr(SPACE, "gain", 3.0)),
    "one that was not there": (scaled(lambda _: getattr(SPACE, "new", 1.0)), lambda *_: setattr(SPACE, "new", 3.0)),
    "dict of a function": (scaled(lambda _: SPACE.table["a"]), lambda *_: SPACE.table.update(a=3.0)),
    "tensor of a function": (scaled(lambda _: SPACE.tensor), lambda *_: setattr(SPACE, "tensor", 3 * ones())),
    "defaults of a function": (
        scaled(lambda _: SPACE.__defaults__[0]), lambda *_: setattr(SPACE, "__defaults__", (3.0,))),
    "attribute of a metaclass": (scaled(lambda _: Settings.gain), lambda *_: setattr(Metaclass, "gain", 3.0)),
    "array of objects": (scaled(lambda _: OBJECTS[0]), lambda *_: OBJECTS.__setitem__(0, 3.0)),
    "module by name": (
        scaled(lambda _: importlib.import_module("module_by_name").GAIN), lambda *_: setattr(MODULE, "GAIN", 3.0)),
    "module by __import__": (
        scaled(lambda _: __import__("module_by_name").GAIN), lambda *_: setattr(MODULE, "GAIN", 3.0)),
    "the module itself": (scaled(lambda _: sys.modules[__name__].HERE), lambda *_: set_here(3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_seen(name: str) -> None:
    seen(ROWS[name])


KEYS, MADE = ["gain", "start"], types.ModuleType("made")


class Plain:
    gain, start = 1.0, 2.0


class Unset:
    __slots__ = ("gain",)


class Around:
    @staticmethod
    @functools.cache
    def table() -> dict[str, float]:
        return {"gain": 1.0}


BY_MADE_NAMES: dict[str, Row] = {
    "of a class": (scaled(lambda _: sum(getattr(Plain, k) for k in KEYS)), lambda *_: setattr(Plain, "gain", 3.0)),
    "of a function": (scaled(lambda _: getattr(SPACE, KEYS[0])), lambda *_: setattr(SPACE, "gain", 3.0)),
    "of a module": (scaled(lambda _: getattr(MADE, KEYS[0])), lambda *_: setattr(MADE, "gain", 3.0)),
    "of a module that is not imported": (scaled(lambda _: MADE.gain), lambda *_: setattr(MADE, "gain", 3.0)),
    "of globals": (scaled(lambda _: globals()["".join(["HE", "RE"])]), lambda *_: set_here(3.0)),
    "of a slot that was not set": (
        scaled(lambda _: getattr(UNSET, "gain", 1.0)), lambda *_: setattr(UNSET, "gain", 3.0)),
    "of a cache in a static method": (
        scaled(lambda _: Around.table()["gain"]), lambda *_: Around.table().update(gain=3.0)),
    "of an array of objects that has gaps": (
        scaled(lambda _: OBJECTS[::2][0]), lambda *_: OBJECTS.__setitem__(0, 3.0)),
}  # fmt: skip
UNSET = Unset()


@pytest.mark.parametrize("name", BY_MADE_NAMES)
def test_a_name_that_is_made_is_followed(name: str) -> None:
    Plain.gain = MADE.gain = 1.0  # type: ignore[attr-defined]
    if hasattr(UNSET, "gain"):
        del UNSET.gain
    Around.table.cache_clear()
    Around.table()
    seen(BY_MADE_NAMES[name])


def test_a_folder_without_an_init_file_is_a_package(tmp_path: Path) -> None:
    (tmp_path / "folder_alone").mkdir()
    (tmp_path / "folder_alone" / "part.py").write_text("GAIN = 1.0\n")
    part = importlib.import_module("folder_alone.part")
    folder = sys.modules["folder_alone"]
    try:
        seen((scaled(lambda _: folder.part.GAIN), lambda *_: setattr(part, "GAIN", 3.0)))
    finally:
        del sys.modules["folder_alone"], sys.modules["folder_alone.part"]


class Cached:
    """A function with a cache, and what it reads."""

    def __init__(self, kind: str, bounded: bool) -> None:
        self.table, self.kind = {"a": 1.0}, kind
        self.get = functools.lru_cache(maxsize=8 if bounded else None)(self.made)

    def made(self, size: int) -> Any:
        if self.kind == "number":
            return self.table["a"] * size
        if self.kind == "by another function":
            return self.helper() * size
        return types.SimpleNamespace(gain=float(size)) if self.kind == "object" else {"gain": float(size)}

    def helper(self) -> float:
        return self.table["a"]

    def factor(self) -> float:
        found = self.get(2)
        if self.kind == "object":
            return float(found.gain)
        return float(found["gain"] if self.kind == "dict" else found)

    def change(self) -> None:
        if self.kind == "object":
            self.get(2).gain = 5.0
        elif self.kind == "dict":
            self.get(2)["gain"] = 5.0
        else:
            self.table["a"] = 5.0
            self.get.cache_clear()


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", ["number", "by another function", "object", "dict"])
def test_a_cache_is_followed(kind: str, warm: bool) -> None:
    cached = Cached(kind, bounded=warm)
    if warm:
        cached.factor()
    seen((scaled(lambda _: cached.factor()), lambda *_: cached.change()))


def test_a_warm_cache_keeps_what_it_holds() -> None:
    """A model that is made once, behind a cache, is not made anew by a capture."""

    @functools.lru_cache
    def teacher() -> nn.Module:
        return nn.Linear(3, 3).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + (output - teacher()(output.detach()).detach()).square().mean()

    own, model = teacher(), Scaled()
    step = psg_fx.transform(model, loss, backend="eager")
    for _ in range(2):
        out = step(X, Y)
        assert oracle.worst_error(out.grads, oracle.loop_grads(model, loss, X, Y)[1]) < 1e-12
        with torch.no_grad():
            own.bias.add_(1.0)
    assert teacher() is own


class Link:
    def __init__(self, following: Link | None) -> None:
        self.following, self.gain = following, 0.001


def test_a_chain_of_objects() -> None:
    """It may be longer than Python's stack."""
    first: Link | None = None
    for _ in range(3000):
        first = Link(first)

    def walked(_: Any) -> float:
        link, total = first, 0.0
        while link is not None:
            total, link = total + link.gain, link.following
        return total

    def change(*_: Any) -> None:
        link = first
        for _ in range(2000):
            assert link is not None
            link = link.following
        assert link is not None
        link.gain = 3.0

    seen((scaled(walked), change))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:captured for the third time")
def test_one_search_for_functions_serves_all_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that are reached in no way that is followed are looked for among all objects, which takes a while."""
    from psg_fx.program import objects

    searches, counts = list[None](), list[int]()
    found: Callable[[], list[Any]] = objects._functions
    monkeypatch.setattr(objects, "_functions", lambda: (searches.append(None), found())[1])
    hidden: list[Any] = [iter([])]
    hidden[0] = (lambda: SPACE.gain,).__iter__  # a method in C that holds the function
    model = Scaled(lambda _: next(hidden[0]())())
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for gain in (1.0, 2.0, 3.0, 4.0, 5.0):
        SPACE.gain = gain
        searches.clear()
        out = step(X, Y)
        assert oracle.relative_error(out.losses, oracle.loop_grads(model, F.cross_entropy, X, Y)[0]) < 1e-12
        counts.append(len(searches))
    assert counts[3] == counts[4], "one more for each capture that is kept"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:captured for the third time")
@pytest.mark.parametrize("size", [None, 8])
def test_a_capture_leaves_what_a_cache_held(size: int | None) -> None:
    @functools.lru_cache(maxsize=size)
    def settings(name: str) -> dict[str, float]:
        return {"gain": 1.0}

    settings("a")["gain"] = 3.0
    held, model = settings("a"), Scaled(lambda _: settings("a")["gain"] * settings("b")["gain"])
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for gain in (3.0, 4.0):
        settings("a")["gain"] = gain
        out = step(X, Y)
        assert oracle.relative_error(out.losses, oracle.loop_grads(model, F.cross_entropy, X, Y)[0]) < 1e-12
        assert settings("a") is held
    captured = len(step.captures)
    settings("c")
    step(X, Y)
    assert len(step.captures) == captured, "what others put into a cache changes nothing"
    settings.cache_clear()
    out = step(X, Y)
    assert oracle.relative_error(out.losses, oracle.loop_grads(model, F.cross_entropy, X, Y)[0]) < 1e-12


@pytest.mark.filterwarnings("ignore:captured for the third time")
def test_a_number_in_a_cache_is_the_one_it_holds() -> None:
    """Also where what it was computed of has changed since; and anew, when the cache is emptied."""

    @functools.cache
    def gain() -> float:
        return HERE

    gain()
    model = Scaled(lambda _: gain())
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for change in (lambda: None, lambda: set_here(3.0), gain.cache_clear):
        change()
        out = step(X, Y)
        assert oracle.relative_error(out.losses, oracle.loop_grads(model, F.cross_entropy, X, Y)[0]) < 1e-12


def test_a_refused_call_leaves_nothing() -> None:
    """Though the code is run once more, to say what fails."""
    counts, tensor, array = list[int](), ones(), np.ones(2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        counts.append(1)
        np.add(array, 1.0, out=array)
        tensor.view(3, 1).add_(1.0)
        return F.cross_entropy(output, target) if output.sum() > 0 else output.sum()

    with pytest.raises(psg_fx.PsgError):
        psg_fx.transform(Scaled(), loss, backend="eager")(X, Y)
    assert counts == []
    assert torch.equal(tensor, ones())
    assert (array == 1).all()


class OwnList(list[float]):
    calls = 0


HELD, BEHIND = OwnList([1.0]), functools.cache(lambda: [1.0])


def in_a_module() -> float:
    MODULE.GAIN += 1
    return float(MODULE.GAIN)


def in_a_list_of_its_own() -> float:
    HELD.calls += 1
    return float(HELD.calls)


def behind_a_cache() -> float:
    BEHIND().append(1.0)
    return sum(BEHIND())


@pytest.mark.parametrize("count", [in_a_module, in_a_list_of_its_own, behind_a_cache])
def test_counting_is_refused(count: Callable[[], float]) -> None:
    """And what has counted is as it was."""
    BEHIND()
    before = MODULE.GAIN, HELD.calls, list(BEHIND())
    with pytest.raises(psg_fx.NotYetSupported, match="the code changes"):
        psg_fx.transform(Scaled(lambda _: count()), F.cross_entropy, backend="eager")(X, Y)
    assert (MODULE.GAIN, HELD.calls, list(BEHIND())) == before
