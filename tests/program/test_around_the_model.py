"""State that lies around a model: in other modules of the user's, in hooks of all modules, in what forward makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

import psg_fx
from psg_fx import NotYetSupported

X = torch.randn(5, 4)
CODE = """
class Stats:
    n = 0
    last = None

class Kept:
    k = 0
    h = None

OBJ = Kept()
"""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> ModuleType:
    """Another module of the user's."""
    (tmp_path / "other_of_users.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_of_users", raising=False)
    import other_of_users

    globals()["other_of_users"] = other_of_users
    return other_of_users


class Model(nn.Module):
    def __init__(self, keep: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 3), keep

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        found = self.keep(h)
        return h if found is None else found


def by_class(h: Tensor) -> None:
    other_of_users.Stats.last = h.detach()  # type: ignore[name-defined]  # noqa: F821


def by_import(h: Tensor) -> None:
    from other_of_users import OBJ

    OBJ.h = h.detach()


def by_name(h: Tensor) -> None:
    sys.modules["other_of_users"].OBJ.h = h.detach()


@pytest.mark.parametrize("keep", [by_class, by_import, by_name])
def test_what_is_kept_there_is_that_of_the_call(keep: Callable[[Tensor], None], other: ModuleType) -> None:
    model = Model(keep)
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    for factor in (1, 2, 3):
        step(factor * X)
        held = other.Stats.last if keep is by_class else other.OBJ.h
        torch.testing.assert_close(held, model.layer(factor * X).detach())


def counts_by_class(h: Tensor) -> Tensor:
    other_of_users.Stats.n += 1  # type: ignore[name-defined]  # noqa: F821
    return h * other_of_users.Stats.n  # type: ignore[name-defined]  # noqa: F821


def counts_by_import(h: Tensor) -> Tensor:
    from other_of_users import OBJ

    OBJ.k += 1
    return h * OBJ.k


@pytest.mark.parametrize("keep", [counts_by_class, counts_by_import])
def test_counters_are_refused(keep: Callable[[Tensor], Tensor], other: ModuleType) -> None:
    with pytest.raises(NotYetSupported, match="it reads the number that it changes"):
        psg_fx.transform(Model(keep), lambda o: o.sum(), backend="eager")(X)
    assert other.Stats.n == other.OBJ.k == 0


@pytest.fixture
def hooked() -> Iterator[Callable[[Callable[..., Any]], None]]:
    handles: list[Any] = []
    yield lambda hook: handles.append(of_modules.register_module_forward_hook(hook))
    for handle in handles:
        handle.remove()


def test_a_hook_of_all_modules_runs_for_the_models_alone(hooked: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    hooked(lambda module, args, out: out * 1.5 if isinstance(out, Tensor) else None)
    for _ in range(2):
        torch.testing.assert_close(step(X).losses.sum(), model(X).sum())


def test_a_hook_of_all_modules_sees_none_of_psg_fx(hooked: Callable[..., None]) -> None:
    step = psg_fx.transform(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), lambda o: o.sum(), backend="eager")

    def looks(module: nn.Module, args: Any, out: Any) -> None:
        assert "GraphModule" not in type(module).__name__

    hooked(looks)
    for _ in range(2):
        step(X)


def test_a_hook_of_all_modules_that_counts_is_refused(hooked: Callable[..., None]) -> None:
    held = {"n": 0}

    def count(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(module, nn.Tanh):
            held["n"] += 1
            return out * held["n"]
        return None

    hooked(count)
    with pytest.raises(NotYetSupported, match="it reads the number that it changes"):
        psg_fx.transform(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), lambda o: o.sum(), backend="eager")(X)
    assert held == {"n": 0}


def make_a_parameter(model: Any) -> None:
    if not hasattr(model, "made"):
        model.made = nn.Parameter(torch.ones(3))


def make_a_module(model: Any) -> None:
    model.made = nn.CrossEntropyLoss(weight=torch.ones(3))


@pytest.mark.parametrize("make", [make_a_parameter, make_a_module])
def test_what_forward_makes_is_refused_and_taken_out(make: Callable[[Any], None]) -> None:
    model = Model(lambda h: make(model))
    with pytest.raises(NotYetSupported, match=r"the code makes Model.made as it runs[\s\S]*model.made = ") as caught:
        psg_fx.transform(model, lambda o: o.sum(), backend="eager")(X)
    assert "test_around_the_model.py" in str(caught.value)
    assert not hasattr(model, "made")
    assert type(model(X)) is Tensor


def test_numbers_of_a_call_in_a_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    """They are not known where the line is written, at the capture."""

    def log(h: Tensor) -> None:
        print(f"mean {h.mean().item():.3f} of {h.shape[0]:3d}")

    model = Model(log)
    out = psg_fx.transform(model, lambda o: o.sum(), backend="eager")(X)
    torch.testing.assert_close(out.losses, model.layer(X).sum(1))
    assert "mean" in capsys.readouterr().out
