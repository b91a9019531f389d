"""Arguments and folders that mean nothing are refused in words, and other default devices are fine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psg_fx
from psg_fx import Dots, Grads, MeanGrad, Norms, Projection, WeightedSum
from psg_fx.errors import BadArgument
from support.batches import compare, loader, samples
from support.small import mlp, same_mlp, step
from support.stores import own_step


@pytest.mark.parametrize("ids", [torch.tensor([0.7, 1.9]), torch.tensor([float("nan")] * 2), [0.0, 1.0], [True, False]])
def test_groups_and_indices_are_ints(ids: Any) -> None:
    batch = [(*samples(2), ids)]
    kind = str(torch.as_tensor(ids).dtype).removeprefix("torch.")
    with pytest.raises(BadArgument, match=rf"groups of a batch are of {kind}\n[^\0]*\[B\] ints"):
        psg_fx.over(batch, step(quantities=Grads()), groups=2, num_groups=3, progress=False)
    with pytest.raises(BadArgument, match=rf"indices of a batch are of {kind}\n[^\0]*\[B\] ints"):
        psg_fx.over(batch, step(), indices=2, progress=False)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, list])
def test_ints_of_other_kinds_are_fine(kind: Any) -> None:
    ids = [1, 0] if kind is list else torch.tensor([1, 0], dtype=kind)
    out: Any = psg_fx.over([(*samples(2), ids), (*samples(0), [])], step(), indices=2, progress=False)
    assert out.indices.tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["list", "tuple", "tensor", "array"])
def test_weights_of_a_part_of_a_batch_lose_no_digits(tmp_path: Path, kind: str) -> None:
    x, y = samples(8, torch.float64)
    weights = torch.rand(8, dtype=torch.float64) * 3
    own = step(same_mlp(), quantities=WeightedSum())

    def prepared(batch: Any) -> Any:
        if kind == "array":
            pytest.importorskip("numpy")
        w = {"list": batch[2].tolist, "tuple": lambda: tuple(batch[2].tolist()), "tensor": lambda: batch[2],
             "array": lambda: batch[2].numpy()}[kind]()  # fmt: skip
        return batch[0], batch[1], {"weights": w}

    rows = torch.arange(0, 8, 2)
    options: dict[str, Any] = {"prepare": prepared, "indices": 3, "store": tmp_path, "progress": False}
    psg_fx.over([(x[rows], y[rows], weights[rows], rows)], own, **options)
    out = psg_fx.over([(x, y, weights, torch.arange(8))], own, **options)
    for name, total in own(x, y, weights=weights).weighted_sum.items():
        assert torch.allclose(out.weighted_sum[name], total, rtol=1e-13, atol=1e-14)


def test_a_store_under_another_default_device(tmp_path: Path) -> None:
    """It stands for a device that computes: what is on disk is on the CPU."""
    own = own_step()
    first = psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)
    with torch.device("meta"):
        again = psg_fx.Store(tmp_path)
        assert len(psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)) == 5
        scores, places = again.top(again.projection[:2], 2)
    compare(again, first)
    assert scores.device == places.device == torch.device("cpu")
    assert again.losses.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        ("store.json", "{bad", r"store\.json cannot be read"),
        ("store.json", "\udcff", r"store\.json cannot be read"),
        ("store.json", "[]", r"store\.json is not that of a store\n.*\n  why    it holds a list"),
        ("store.json", '{"format": 1}', r"'complete' is missing in it"),
        ("store.json", '{"format": 1, "complete": true, "batches": "2"}', r"'batches' is wrong in it"),
        ("store.json", '{"format": 1, "complete": true, "batches": 1, "samples": 1, "joins": {}, "sums": "", "made of":'
         ' {}, "rows": [{"field": "a", "name": null, "file": "a", "dtype": "nn", "shape": []}]}',
         "a field is not described"),
        ("sums-2.pt", None, r"sums-2\.pt is gone"),
        ("sums-2.pt", "nothing", r"sums-2\.pt cannot be read"),
        ("sums-2.pt", "", r"sums-2\.pt cannot be read"),
    ],
)  # fmt: skip
def test_damaged_stores_are_refused(tmp_path: Path, file: str, text: str | None, what: str) -> None:
    own = own_step([Norms(), MeanGrad()])
    psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_bytes(text.encode(errors="surrogateescape"))
    for use in (lambda: psg_fx.Store(tmp_path), lambda: psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)):
        with pytest.raises(BadArgument, match=rf"{what}[^\0]*fix    restore the file, or fill another folder anew"):
            use()


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "inside"):
        with pytest.raises(BadArgument, match=r"file is a file[^\0]*path of a folder"):
            psg_fx.over(loader(4, 2), step(), store=path, progress=False)
    with pytest.raises(BadArgument, match="the store is a int"):
        psg_fx.over(loader(4, 2), step(), store=3, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loader": None}, "the loader is a NoneType"),
        ({"loader": torch.ones(4, 3)}, r"the loader is a tensor of shape \(4, 3\)[^\0]*each of its rows"),
        ({"device": "nowhere"}, "the device 'nowhere' cannot be used"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, r"the device 'cuda:\d' cannot be used"),
        ({"device": 1.5}, r"the device 1\.5 cannot be used"),
    ],
)
def test_arguments_that_mean_nothing(given: dict[str, Any], text: str) -> None:
    data = given.pop("loader", loader(4, 2))
    with pytest.raises(BadArgument, match=text):
        psg_fx.over(data, step(), progress=False, **given)


def test_a_model_without_parameters_is_refused_by_the_step(tmp_path: Path) -> None:
    own = step(nn.Identity())
    for store in (None, tmp_path):
        with pytest.raises(BadArgument, match="no parameter is asked for"):
            psg_fx.over(loader(4, 2), own, store=store, progress=False)


def test_queries_that_have_no_answer() -> None:
    out = psg_fx.over(loader(5, 4), step(quantities=Projection(rank=2)), progress=False)
    for block in (None, 0, 2.5, "all"):
        with pytest.raises(BadArgument, match=r"block=.* is not a number of rows"):
            out.top(out.projection, 2, block=block)
    with pytest.raises(BadArgument, match=r"inner products are complex[^\0]*no order"):
        out.top(out.projection.to(torch.complex64), 2)


def test_the_keyword_that_differs_is_named(tmp_path: Path) -> None:
    own = step(quantities=Dots())
    given = {name: torch.randn(2, *p.shape) for name, p in own.model.named_parameters()}
    psg_fx.over(loader(4, 2), own, store=tmp_path, directions=given, progress=False)
    cases: list[tuple[Any, str]] = [
        ({**given, "2.bias": given["2.bias"] + 1}, r"other values of directions=\n.*\n.*\['2\.bias'\]: values differ"),
        ({**given, "2.bias": given["2.bias"].double()}, r"dtype differs: float32 there, float64 here"),
        ({n: d[:1] for n, d in given.items()}, r"\['0\.weight'\] and 3 more: shape differs: \[2, 5, 4\] there"),
        ({n: given[n] for n in list(given)[:3]}, r"\['2\.bias'\]: a tensor there, nothing here"),
    ]
    for other, text in cases:
        with pytest.raises(BadArgument, match=text):
            psg_fx.over(loader(4, 2), own, store=tmp_path, directions=other, progress=False)
    with pytest.raises(BadArgument, match=r"made with directions=\n.*\n.*directions= is given there alone"):
        psg_fx.over(loader(4, 2), own, store=tmp_path, progress=False)


class Freezing:
    """A loader after whose first batch something is done."""

    def __init__(self, then: Callable[[], Any]) -> None:
        self._then = then

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(loader(6, 2)):
            if number == 1:
                self._then()
            yield batch


@pytest.mark.parametrize("quantity", [Grads(), MeanGrad(), Norms()])
@pytest.mark.parametrize("kind", ["frozen", "unfrozen", "predicate"])
@pytest.mark.parametrize("stored", [False, True])
def test_other_parameters_in_later_batches_are_refused(tmp_path: Path, quantity: Any, kind: str, stored: bool) -> None:
    model, options, wanted = mlp(), dict[str, Any](), ["0.*"]
    if kind == "predicate":
        options["params"] = lambda name, p: name.startswith("0.") or wanted == ["0.*"]
        batches = Freezing(wanted.clear)
    else:
        model[0].requires_grad_(kind == "frozen")
        batches = Freezing(lambda: model[0].requires_grad_(kind != "frozen"))
    odd = r"2\.bias, 2\.weight" if kind == "predicate" else r"0\.bias, 0\.weight"
    with pytest.raises(
        BadArgument, match=rf"^{odd} are asked for in some batches only\n[^\0]*call it once for each set"
    ):
        psg_fx.over(batches, step(model, quantities=quantity, **options), store=tmp_path if stored else None)
    if stored:
        assert len(psg_fx.Store(tmp_path)) == 2
