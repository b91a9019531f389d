"""A folder with the results of a step over a data set.

    store.json          what it was made of, the fields, how many batches and samples are done
    losses.npy, ...     rows of samples; grads/<parameter>.npy where a field has names
    sums-<batches>.pt   sums over the samples that are done

`store.json` is written last and in one piece: what it counts is on the disk.  Rows beyond are those of a run that was
interrupted, and are overwritten when it goes on.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from psg_fx.errors import BadArgument
from psg_fx.loops.files import mapped, put, replaced, settle
from psg_fx.loops.leaves import Key, nested
from psg_fx.loops.made_of import check_same
from psg_fx.loops.results import Results
from psg_fx.loops.totals import Totals
from psg_fx.quantities.base import Joins

_ABOUT, _FORMAT, _SECONDS = "store.json", 1, 1.0


class Store(Results):
    """The results in a folder that `over(..., store=path)` has filled, also of a run that was interrupted.

    Rows are memory-mapped: they are read when they are looked at.  `np.load(path / "losses.npy")` reads them too.

    path: the folder.  complete: whether all batches are in it.  about: what it was made of (quantities, names, shapes
    and fingerprints of parameters and buffers).

    Raises `BadArgument` where the folder is no store.
    """

    __slots__ = ("about", "complete", "path")

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        found = read_about(self.path)
        if found is None:
            raise BadArgument(
                "the folder is no store", where=f"Store({str(path)!r})", why=f"there is no {_ABOUT} in it",
                fix="psg_fx.over(loader, step, store=path) makes one",
            )  # fmt: skip
        self.about: dict[str, Any] = found["made of"]
        self.complete: bool = found["complete"]
        rows = {
            key: mapped(self.path / file, dtype, (found["samples"], *shape))
            for key, (file, dtype, shape) in _kept(found).items()
        }
        totals = Totals(found["joins"])
        if found["sums"]:
            totals.restore(torch.load(self.path / found["sums"], weights_only=True), torch.device("cpu"))
        super().__init__({**nested(rows), **totals.fields()}, found["joins"])

    def __repr__(self) -> str:
        state = "complete" if self.complete else "not complete"
        return f"Store({str(self.path)!r}, {len(self)} samples, {state}, {', '.join(vars(self))})"


def read_about(path: Path) -> dict[str, Any] | None:
    """What a folder says of itself, None where there is nothing."""
    if not (path / _ABOUT).exists():
        return None
    found: dict[str, Any] = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    if found.get("format") != _FORMAT:
        raise BadArgument(
            f"the store is of format {found.get('format')}", where=str(path), why=f"this psg_fx reads {_FORMAT}",
            fix="read it with the psg_fx that wrote it",
        )  # fmt: skip
    return found


def _kept(about: Mapping[str, Any]) -> dict[Key, tuple[str, torch.dtype, tuple[int, ...]]]:
    """File, dtype and shape of a row for every field."""
    rows = about["rows"]
    return {(r["field"], r["name"]): (r["file"], getattr(torch, r["dtype"]), tuple(r["shape"])) for r in rows}


class Writer:
    """Fills the folder of a store, from where it stands.

    made: what the results are made of.  whole: what has been taken in is whole batches.
    """

    def __init__(self, path: Path, made: dict[str, Any], joins: Joins, device: torch.device) -> None:
        self.path, self._made, self._joins = path, made, joins
        self.totals = Totals(joins)
        self._kept: dict[Key, tuple[str, torch.dtype, tuple[int, ...]]] = {}
        self.batches = self.count = 0
        self.complete, self._sums = False, ""
        self.whole, self._next = True, time.monotonic() + _SECONDS
        found = read_about(path)
        if found is not None:
            check_same(found["made of"], json.loads(json.dumps(made)), path)
            self._kept, self.batches, self.count = _kept(found), found["batches"], found["samples"]
            self.complete, self._sums = found["complete"], found["sums"]
            for file, dtype, shape in self._kept.values():
                mapped(path / file, dtype, (self.count, *shape))  # they are all there
            if self._sums:
                self.totals.restore(torch.load(path / self._sums, weights_only=True), device)

    def add(self, rows: Mapping[Key, torch.Tensor], out: Any, count: int) -> None:
        """Take in a batch of `count` samples: its rows, and what the step's output has besides."""
        self.whole = False  # a run that is interrupted inside goes on from what is on the disk
        if count:
            for key, value in rows.items():
                put(self.path / self._file(key, value), self.count, value)
            self.totals.add(out)
        self.count, self.batches = self.count + count, self.batches + 1
        self.whole = True
        if time.monotonic() > self._next:
            self.commit()

    def _file(self, key: Key, rows: torch.Tensor) -> str:
        """Where the rows of a field lie."""
        like = rows.dtype, tuple(rows.shape[1:])
        if key not in self._kept:
            name = quote(key[0], safe="") + ("" if key[1] is None else f"/{quote(key[1], safe='')}") + ".npy"
            self._kept[key] = (name, *like)
            (self.path / name).parent.mkdir(exist_ok=True)
        file, dtype, shape = self._kept[key]
        if (dtype, shape) != like:
            raise BadArgument(
                f"a row of {key[1] or key[0]} is {like[0]} {list(like[1])} now", where=f"the store {self.path}",
                why=f"it was {dtype} {list(shape)} before", fix="run all batches in the same way",
            )  # fmt: skip
        return file

    def commit(self, complete: bool = False) -> None:
        """Make what is done last."""
        start = time.monotonic()
        for file, dtype, shape in self._kept.values():
            settle(self.path / file, dtype, (self.count, *shape))
        old, self._sums, self.complete = self._sums, f"sums-{self.batches}.pt", complete
        buffer = io.BytesIO()
        torch.save(self.totals.state(), buffer)
        replaced(self.path / self._sums, buffer.getvalue())
        replaced(self.path / _ABOUT, json.dumps(self._about(), indent=1).encode())
        if old and old != self._sums:
            (self.path / old).unlink(missing_ok=True)
        now = time.monotonic()
        self._next = now + max(_SECONDS, 20 * (now - start))

    def _about(self) -> dict[str, Any]:
        rows = [
            {"field": field, "name": name, "file": file, "dtype": str(dtype).removeprefix("torch."), "shape": shape}
            for (field, name), (file, dtype, shape) in self._kept.items()
        ]
        return {
            "format": _FORMAT, "complete": self.complete, "batches": self.batches, "samples": self.count,
            "joins": dict(self._joins), "rows": rows, "sums": self._sums, "made of": self._made,
        }  # fmt: skip

    def places(self) -> set[int]:
        """The places in the data set of the samples that are done."""
        if not self.count or ("indices", None) not in self._kept:
            return set()
        file, dtype, _ = self._kept["indices", None]
        return set(mapped(self.path / file, dtype, (self.count,)).tolist())


@contextlib.contextmanager
def filling(path: Path, made: dict[str, Any], joins: Joins, device: torch.device) -> Iterator[Writer]:
    """The writer of a store, alone in its folder; what is done when the block ends, however it ends, is kept."""
    path.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        writer = Writer(path, made, joins, device)
        try:
            yield writer
        except BaseException:
            if writer.whole and writer.count:
                writer.commit()
            raise
        if not writer.complete:
            writer.commit(complete=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process fills the folder meanwhile, on systems that can say so."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadArgument(
                "another run fills the store", where=str(path), why="two would overwrite each other's rows",
                fix="wait for it, or choose another folder",
            ) from error  # fmt: skip
        yield
