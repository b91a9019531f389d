"""A complete store is not taken for what another loader gives: it goes on, or is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import psg_fx
from psg_fx.errors import BadArgument
from support.batches import Stream, compare, loader, samples
from support.stores import Stops, interrupted, own_step


def listed(count: int, size: int) -> list[Any]:
    x, y = samples(11)
    return [(x[i : min(i + size, count)], y[i : min(i + size, count)]) for i in range(0, count, size)]


def complete(folder: Path, own: Any, batches: Iterable[Any]) -> psg_fx.Store:
    out = psg_fx.over(batches, own, store=folder, progress=False)
    assert isinstance(out, psg_fx.Store)
    assert out.complete
    return out


@pytest.mark.parametrize("kind", ["loader", "list", "stream", "iterator"])
def test_a_try_with_some_batches_is_gone_on_with(tmp_path: Path, kind: str) -> None:
    own = own_step()
    assert len(complete(tmp_path, own, itertools.islice(loader(11, 3), 2))) == 6
    calls: list[int] = []
    own.register_forward_hook(lambda *a: calls.append(1))
    whole: Any = {
        "loader": loader(11, 3), "list": listed(11, 3), "stream": DataLoader(Stream(11), 3),
        "iterator": iter(loader(11, 3)),
    }[kind]  # fmt: skip
    out = complete(tmp_path, own, whole)
    assert len(calls) == 2
    compare(out, own(*samples(11)))


@pytest.mark.parametrize("kind", ["loader", "list", "stream"])
def test_what_is_complete_runs_nothing_again(tmp_path: Path, kind: str) -> None:
    own = own_step()
    whole: Any = {"loader": loader(11, 3), "list": listed(11, 3), "stream": DataLoader(Stream(11), 3)}[kind]
    first = complete(tmp_path, own, whole)
    written = (tmp_path / "store.json").read_bytes()
    own.register_forward_hook(lambda *a: pytest.fail("the step ran"))
    compare(complete(tmp_path, own, whole), first)
    assert (tmp_path / "store.json").read_bytes() == written


@pytest.mark.parametrize("kind", ["shorter list", "other batches", "shorter loader", "no batches"])
def test_other_batches_than_those_of_a_complete_store_are_refused(tmp_path: Path, kind: str) -> None:
    own = own_step()
    before = complete(tmp_path, own, listed(6, 3))
    other: Any = {
        "shorter list": listed(3, 3), "other batches": listed(11, 4), "shorter loader": listed(5, 3), "no batches": [],
    }[kind]  # fmt: skip
    with pytest.raises(BadArgument, match=r"the first 2 batches have \d samples\n.*\n  why    6 are in the store"):
        psg_fx.over(other, own, store=tmp_path, progress=False)
    again = psg_fx.Store(tmp_path)
    assert again.complete
    compare(again, before)


def test_a_loader_of_another_length_is_refused(tmp_path: Path) -> None:
    own = own_step()
    complete(tmp_path, own, loader(6, 3))
    with pytest.raises(BadArgument, match=r"another number of samples\n.*\n.*samples in all: 6 there, 11 here"):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)


def test_batches_that_end_before_the_loader_did_are_not_all(tmp_path: Path) -> None:
    """It was begun with a loader of 11 samples: an iterable with fewer does not make it complete."""
    own = own_step()
    interrupted(tmp_path, own)
    with pytest.raises(BadArgument, match=r"end after 9 samples\n.*\n.*was begun has 11"):
        psg_fx.over(listed(9, 3), own, store=tmp_path, progress=False)
    part = psg_fx.Store(tmp_path)
    assert (len(part), part.complete) == (9, False)
    compare(complete(tmp_path, own, listed(11, 3)), own(*samples(11)))
    assert json.loads((tmp_path / "store.json").read_text())["made of"]["samples in all"] == 11
    assert len(complete(tmp_path, own, [*listed(11, 3), listed(3, 3)[0]])) == 14
    with pytest.raises(BadArgument, match="the first 5 batches have 11 samples"):  # the longer one is not the loader's
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)


def numbered(*parts: Iterable[int]) -> list[Any]:
    x, y = samples(11)
    return [(x[torch.tensor(p)], y[torch.tensor(p)], torch.tensor(p)) for p in map(list, parts)]


@pytest.mark.parametrize("kind", ["list", "loader"])
def test_new_places_are_run(tmp_path: Path, kind: str) -> None:
    own, (x, y) = own_step(), samples(11)
    first: Any = numbered([3, 1, 2], [0, 4])
    rest: Any = numbered(range(6), range(6, 11))
    if kind == "loader":
        data = TensorDataset(x, y, torch.arange(11))
        first = DataLoader(torch.utils.data.Subset(data, range(5)), 3)
        rest = DataLoader(data, 3, shuffle=True)
    psg_fx.over(first, own, store=tmp_path, indices=2, progress=False)
    out: Any = psg_fx.over(rest, own, store=tmp_path, indices=2, progress=False)
    assert out.complete
    assert sorted(out.indices.tolist()) == list(range(11))
    whole = own(x, y)
    assert torch.allclose(out.norms, whole.norms[out.indices])
    assert all(torch.allclose(out.mean_grad[n], g, atol=1e-6) for n, g in whole.mean_grad.items())
    own.register_forward_hook(lambda *a: pytest.fail("the step ran"))
    assert len(psg_fx.over(rest, own, store=tmp_path, indices=2, progress=False)) == 11


def test_places_are_given_always_or_never(tmp_path: Path) -> None:
    own = own_step()
    psg_fx.over(numbered([0, 1]), own, store=tmp_path / "with", indices=2, progress=False)
    with pytest.raises(BadArgument, match=r"made with indices=\n.*\n.*indices= is given there alone"):
        psg_fx.over(listed(11, 3), own, store=tmp_path / "with", progress=False)
    complete(tmp_path / "without", own, listed(6, 3))
    with pytest.raises(BadArgument, match=r"made with no indices=\n.*\n.*indices= is given here alone"):
        psg_fx.over(numbered(range(11)), own, store=tmp_path / "without", indices=2, progress=False)


def test_a_complete_store_that_is_interrupted_later_is_not_complete(tmp_path: Path) -> None:
    own = own_step()
    complete(tmp_path, own, listed(3, 3))

    def stops() -> Any:
        yield from listed(9, 3)
        raise Stops

    with pytest.raises(Stops):
        psg_fx.over(stops(), own, store=tmp_path, progress=False)
    part = psg_fx.Store(tmp_path)
    assert (len(part), part.complete) == (9, False)
    compare(complete(tmp_path, own, loader(11, 3)), own(*samples(11)))
