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
from psg_fx.loops.about import ABOUT, FORMAT, Kept, kept_of, read_about, restored
from psg_fx.loops.differences import check_same
from psg_fx.loops.files import mapped, put, replaced, settle
from psg_fx.loops.results import Results
from psg_fx.loops.rows import row_changed
from psg_fx.loops.totals import Totals
from psg_fx.quantities.base import Joins
from psg_fx.step.leaves import Key, nested
from psg_fx.tensors import short_name

_SECONDS, _IN_ALL = 1.0, "samples in all"


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
                "the folder is no store", where=f"Store({str(path)!r})", why=f"there is no {ABOUT} in it",
                fix="psg_fx.over(loader, step, store=path) makes one",
            )  # fmt: skip
        self.about: dict[str, Any] = found["made of"]
        self.complete: bool = found["complete"]
        rows = {
            key: mapped(self.path / file, dtype, (found["samples"], *shape))
            for key, (file, dtype, shape) in kept_of(found, self.path).items()
        }
        totals = restored(Totals(found["joins"]), self.path, found["sums"], torch.device("cpu"))
        super().__init__({**nested(rows), **totals.fields()}, found["joins"])

    def __repr__(self) -> str:
        state = "complete" if self.complete else "not complete"
        return f"Store({str(self.path)!r}, {len(self)} samples, {state}, {', '.join(vars(self))})"


class Writer:
    """Fills the folder of a store, from where it stands.

    made: what the results are made of.  whole: what has been taken in is whole batches.  has_more: there are samples
    that were not in the folder before.
    """

    def __init__(self, path: Path, made: dict[str, Any], joins: Joins, device: torch.device) -> None:
        self.path, self._made, self._joins = path, made, joins
        self.totals = Totals(joins)
        self._kept: Kept = {}
        self.batches = self.count = 0
        self.complete, self._sums = False, ""
        self.whole, self.has_more, self._next = True, False, time.monotonic() + _SECONDS
        self._known_before: int | None = None
        found = read_about(path)
        if found is not None:
            check_same(found["made of"], json.loads(json.dumps(made)), path)
            self._kept, self.batches, self.count = kept_of(found, path), found["batches"], found["samples"]
            self.complete, self._sums = found["complete"], found["sums"]
            for file, dtype, shape in self._kept.values():
                mapped(path / file, dtype, (self.count, *shape))  # they are all there
            restored(self.totals, path, self._sums, device)
            self._known_before = found["made of"][_IN_ALL]

    def has_all(self) -> bool:
        """Whether nothing is to be run, as far as numbers of samples can say: those of a complete store are as many as
        the loader has, or has had when it was filled.
        """
        return self.complete and self._made[_IN_ALL] is not None and self._made[_IN_ALL] in (
            self.count, self._known_before
        )  # fmt: skip

    def check_end(self) -> None:
        """Refuse batches that end before the loader with which the store was begun did, where they do not say."""
        if self._made[_IN_ALL] is None and self._known_before is not None and self.count < self._known_before:
            raise BadArgument(
                f"the batches end after {self.count} samples", where=f"over(loader, step, store={str(self.path)!r})",
                why=f"the loader with which the store was begun has {self._known_before}",
                fix="give all batches, or choose another folder",
            )  # fmt: skip

    def add(self, rows: Mapping[Key, torch.Tensor], out: Any, count: int) -> None:
        """Take in a batch of `count` samples: its rows, and what the step's output has besides."""
        self.whole = False  # a run that is interrupted inside goes on from what is on the disk
        if count:
            for key, value in rows.items():
                put(self.path / self._file(key, value), self.count, value)
            self.totals.add(out)
            self.has_more, self.complete = True, False
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
            raise row_changed(key, rows, dtype, shape, f"the store {self.path}")
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
        replaced(self.path / ABOUT, json.dumps(self._about(), indent=1).encode())
        if old and old != self._sums:
            (self.path / old).unlink(missing_ok=True)
        now = time.monotonic()
        self._next = now + max(_SECONDS, 20 * (now - start))

    def _about(self) -> dict[str, Any]:
        rows = [
            {"field": field, "name": name, "file": file, "dtype": short_name(dtype), "shape": shape}
            for (field, name), (file, dtype, shape) in self._kept.items()
        ]
        in_all, before = self._made[_IN_ALL], self._known_before
        if in_all is None and before is not None and self.count <= before:
            in_all = before
        made = {**self._made, _IN_ALL: in_all}
        return {
            "format": FORMAT, "complete": self.complete, "batches": self.batches, "samples": self.count,
            "joins": dict(self._joins), "rows": rows, "sums": self._sums, "made of": made,
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
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(
            f"{path} cannot be made", where=f"over(loader, step, store={str(path)!r})", why=str(error),
            fix="pass the path of a folder that can be made and written",
        ) from error  # fmt: skip
    with _alone(path):
        writer = Writer(path, made, joins, device)
        try:
            yield writer
        except BaseException:
            if writer.whole and writer.has_more:
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
