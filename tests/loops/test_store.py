"""Results in a folder: what is read is what was computed; a run that was interrupted goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

import psg_fx
from psg_fx import Grads, Norms
from psg_fx.errors import BadArgument
from support.batches import Stream, compare, loader, samples
from support.small import same_mlp, step
from support.stores import Broken, Stops, interrupted, own_step


def test_a_store_is_what_the_step_says(tmp_path: Path) -> None:
    own = own_step()
    out = psg_fx.over(loader(11, 4), own, store=tmp_path / "store", progress=False)
    assert isinstance(out, psg_fx.Store)
    assert out.complete
    compare(out, own(*samples(11)))
    again = psg_fx.Store(tmp_path / "store")
    compare(again, own(*samples(11)))
    assert again.joins == own(*samples(11)).joins
    assert repr(again).endswith("11 samples, complete, losses, projection, grads, clip_factors, norms, clipped_sum, "
                                "mean_grad, second_moment)")  # fmt: skip
    projections = own(*samples(11)).projection
    assert torch.equal(again.top(projections[:2], 3)[1], (projections[:2] @ projections.T).topk(3).indices)


def test_numpy_reads_the_files(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    own = own_step()
    psg_fx.over(loader(11, 4), own, store=tmp_path, progress=False)
    out = own(*samples(11))
    for file, value in (("losses", out.losses), ("grads/0.weight", out.grads["0.weight"])):
        found = numpy.load(tmp_path / f"{file}.npy", mmap_mode="r")
        assert found.shape == value.shape
        assert torch.allclose(torch.tensor(found), value, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    own = own_step([Grads()], same_mlp().to(dtype))
    out = psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False, prepare=lambda b: (b[0].to(dtype), b[1]))
    x, y = samples(5)
    compare(out, own(x.to(dtype), y))


def test_names_with_slashes_and_other_signs_are_files_of_their_own(tmp_path: Path) -> None:
    own = step(Product(), lambda out: out.sum(), quantities=Grads())
    out = psg_fx.over([samples(3)[0]], own, store=tmp_path / "s", progress=False)
    compare(out, own(samples(3)[0]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


class Product(nn.Module):
    """Parameters whose names are no names of files."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a/b", "a%2Fb", "ü"):
            self.register_parameter(name, nn.Parameter(torch.ones(4) * len(name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.parameters()
        return x * a * b * c


@pytest.mark.parametrize("kind", ["loader", "stream", "list"])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    own = own_step()
    interrupted(tmp_path, own)
    part = psg_fx.Store(tmp_path)
    assert not part.complete
    x, y = samples(11)
    compare(part, own(x[:6], y[:6]))
    data: Any = {
        "loader": loader(11, 3),
        "stream": DataLoader(Stream(11), 3),
        "list": [(x[i : i + 3], y[i : i + 3]) for i in range(0, 11, 3)],
    }[kind]
    calls: list[int] = []
    own.register_forward_hook(lambda *a: calls.append(1))
    out = psg_fx.over(data, own, store=tmp_path, progress=False)
    assert len(calls) == 2
    compare(out, own(x, y))
    assert sorted(p.name for p in tmp_path.glob("sums*")) == ["sums-4.pt"]


def test_batches_that_are_done_are_not_loaded(tmp_path: Path) -> None:
    own, x, y = own_step(), *samples(11)
    interrupted(tmp_path, own)

    class Looked(TensorDataset):
        seen: list[int] = []  # noqa: RUF012

        def __getitem__(self, index: Any) -> Any:
            self.seen.append(index)
            return super().__getitem__(index)

    psg_fx.over(DataLoader(Looked(x, y), 3), own, store=tmp_path, progress=False)
    assert Looked.seen == list(range(6, 11))


def test_a_complete_store_runs_nothing(tmp_path: Path) -> None:
    own = own_step()
    first = psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)
    own.register_forward_hook(lambda *a: pytest.fail("the step ran"))
    compare(psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False), first)


@pytest.mark.rest  # a process of its own; those that are interrupted are above
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    """No exception is raised in it: what had been written last counts, and rows beyond it do not."""
    program = textwrap.dedent(f"""
        import os, signal, sys
        sys.path[:0] = {sys.path!r}
        import psg_fx
        from support.batches import loader
        from support.small import same_mlp, step
        from psg_fx import ClippedSum, Grads, MeanGrad, Projection, SecondMoment
        from psg_fx.loops import store
        store._SECONDS = -1.0
        quantities = [Projection(rank=2), Grads(), ClippedSum(0.3), MeanGrad(), SecondMoment(centered=True)]
        own, put = step(same_mlp().float(), quantities=quantities), store.put
        def dying(path, start, rows):
            put(path, start, rows)
            if start >= 6 and path.name == "norms.npy":
                os.kill(os.getpid(), signal.SIGKILL)
        store.put = dying
        psg_fx.over(loader(11, 3), own, store={str(tmp_path)!r}, progress=False)
        """)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert found.returncode == -signal.SIGKILL, found.stderr
    part, own = psg_fx.Store(tmp_path), own_step()
    assert 0 < len(part) <= 6
    x, y = samples(11)
    compare(part, own(x[: len(part)], y[: len(part)]))
    compare(psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False), own(x, y))


def test_an_interruption_in_the_middle_of_a_batch_keeps_whole_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psg_fx.loops import store

    own, put = own_step(), store.put

    def torn(path: Path, start: int, rows: torch.Tensor) -> None:
        if start == 6 and path.name == "norms.npy":
            raise KeyboardInterrupt
        put(path, start, rows)

    monkeypatch.setattr(store, "_SECONDS", -1.0)
    monkeypatch.setattr(store, "put", torn)
    with pytest.raises(KeyboardInterrupt):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)
    monkeypatch.setattr(store, "put", put)
    part = psg_fx.Store(tmp_path)
    assert len(part) in (3, 6)
    compare(psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False), own(*samples(11)))


@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler", "in_order"])
def test_a_random_order_is_refused(tmp_path: Path, kind: str) -> None:
    data = TensorDataset(*samples(11))
    options: dict[str, Any] = {
        "shuffle": {"batch_size": 3, "shuffle": True},
        "in_order": {"batch_size": 3, "num_workers": 2, "in_order": False},
        "sampler": {"batch_size": 3, "sampler": torch.utils.data.WeightedRandomSampler([1.0] * 11, 11)},
        "batch_sampler": {"batch_sampler": torch.utils.data.BatchSampler(RandomSampler(data), 3, False)},
    }[kind]
    with pytest.raises(BadArgument, match=r"drawn at random[^\0]*shuffle=False[^\0]*indices="):
        psg_fx.over(DataLoader(data, **options), own_step(), store=tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


def test_a_shuffled_loader_goes_on_by_indices(tmp_path: Path) -> None:
    own, x, y = own_step(), *samples(11)
    data = TensorDataset(x, y, torch.arange(11))

    def shuffled(kind: type[DataLoader[Any]], seed: int) -> Any:
        return kind(data, 3, shuffle=True, generator=torch.Generator().manual_seed(seed))

    with pytest.raises(Stops):
        psg_fx.over(shuffled(Broken, 0), own, store=tmp_path, indices=2, progress=False)
    out = psg_fx.over(shuffled(DataLoader, 1), own, store=tmp_path, indices=2, progress=False)
    assert sorted(out.indices.tolist()) == list(range(11))
    whole = own(x, y)
    assert torch.allclose(out.norms, whole.norms[out.indices])
    assert all(torch.allclose(out.mean_grad[n], g, atol=1e-6) for n, g in whole.mean_grad.items())
    assert torch.equal(out.top(whole.projection[:2], 3)[1], (whole.projection[:2] @ whole.projection.T).topk(3)[1])


def test_samples_that_come_twice_are_refused(tmp_path: Path) -> None:
    data = TensorDataset(*samples(3), torch.arange(3))
    twice = DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=9))
    with pytest.raises(BadArgument, match=r"comes twice[^\0]*Subset\(data, drawn\)"):
        psg_fx.over(twice, own_step(), store=tmp_path, indices=2, progress=False)
    drawn = DataLoader(Subset(data, [0, 2, 2, 1, 0]), 2)
    assert len(psg_fx.over(drawn, own_step(), store=tmp_path / "s", prepare=lambda b: b[:2], progress=False)) == 5


def test_two_runs_do_not_fill_one_store(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    own = own_step()

    def meanwhile(batch: Any) -> Any:
        with pytest.raises(BadArgument, match="another run fills the store"):
            psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)
        return batch

    psg_fx.over(loader(5, 4), own, store=tmp_path, prepare=meanwhile, progress=False)


def test_a_folder_without_a_store_and_one_of_another_format(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="the folder is no store"):
        psg_fx.Store(tmp_path)
    (tmp_path / "store.json").write_text('{"format": 99}')
    with pytest.raises(BadArgument, match="of format 99"):
        psg_fx.Store(tmp_path)


@pytest.mark.parametrize("text", ["has lost rows", "is gone"])
def test_files_that_were_lost_are_noticed(tmp_path: Path, text: str) -> None:
    own = own_step()
    interrupted(tmp_path, own)
    file = tmp_path / "grads" / "0.weight.npy"
    if text == "is gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(BadArgument, match=rf"0\.weight\.npy {text}"):
        psg_fx.Store(tmp_path)
    with pytest.raises(BadArgument, match=rf"0\.weight\.npy {text}"):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)


def test_what_is_written_into_the_rows_stays_out_of_the_files(tmp_path: Path) -> None:
    out: Any = psg_fx.over(loader(5, 4), own_step(), store=tmp_path, progress=False)
    before = out.losses.clone()
    out.losses.zero_()
    assert torch.equal(psg_fx.Store(tmp_path).losses, before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stored", [True, False])
def test_a_row_of_another_dtype_is_refused(tmp_path: Path, stored: bool) -> None:
    own = own_step([Norms(), Grads()])

    def turning(batch: Any) -> Any:
        if len(batch[0]) == 1:
            own.model.double()
            return batch[0].double(), batch[1]
        return batch

    with pytest.raises(BadArgument, match=r"float64 \[\] now"):
        psg_fx.over(loader(5, 4), own, store=tmp_path if stored else None, prepare=turning, progress=False)
