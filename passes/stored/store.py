"""Where lowered graphs lie on disk, and by which name each is found.

A graph is found by all that passes were told: the captured graph, node by node, what is asked of it, the versions and
flags of torch, and the files of psg_fx.  Capture runs in every process, so nothing is assumed of the Python around a
model (docs/design/stored.md).  What cannot be told by its bytes is not kept.
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from psg_fx import op_table, version
from psg_fx.graph.history import log
from psg_fx.graph.stages import Stage, verify
from psg_fx.planner.plan import PLAN
from psg_fx.torch_private import caches

from .written import Captured, Unwritable, digest, read, said_of, write

ENABLED = True
"""Tests run the passes."""

_OURS = ("psg_fx", "torch")
"""The packages whose functions the table of ops may hold: another's may be another in another process."""


@dataclass(frozen=True)
class Entry:
    """What passes make of one captured graph, on disk."""

    path: Path
    captured: Captured

    def read(self, captured: GraphModule) -> GraphModule | None:
        """The lowered graph; None where there is none, or its file is broken."""
        try:
            check, data = _apart(self.path.read_bytes())
            if check != hashlib.sha256(data).digest():
                raise ValueError("it is not as it was written")
            found = read(data, captured)
            verify(found, Stage.TIDIED)
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning("a lowered graph on disk cannot be read, and is made anew: %s (%s)", self.path, error)
            return None
        return found

    def write(self, gm: GraphModule) -> None:
        """Keep a lowered graph, if its bytes can tell it; one that no gradient is in is refused by who asked for it."""
        try:
            plan = PLAN.of(gm)
            if plan.need or not any(p.gradient.terms for p in plan.parameters):
                raise Unwritable("a plan within a budget, or of nothing")
            data = write(gm, self.captured)
            caches.write_whole(self.path, hashlib.sha256(data).digest() + data)
        except (Unwritable, OSError) as error:
            log.debug("this lowered graph is not kept on disk: %s", error)


def entry_of(captured: GraphModule, told: Any) -> Entry | None:
    """The place of what passes make of a captured graph and what they are told; None where nothing is kept."""
    folder = caches.folder()
    if not ENABLED or folder is None or caches.is_overridden() or not _table_is_ours():
        return None
    try:
        name = digest(_files_of_psg_fx(), caches.surroundings(), told, said_of(captured))
    except Unwritable as error:
        log.debug("lowered graphs of this program are not kept on disk: %s", error)
        return None
    return Entry(folder / "psg_fx" / name[:2] / f"{name}.graph", Captured.of(captured))


def _apart(data: bytes) -> tuple[bytes, bytes]:
    size = hashlib.sha256().digest_size
    return data[:size], data[size:]


def _table_is_ours() -> bool:
    """Whether all that is known of ops of torch is said by psg_fx, and not by somebody who uses it."""
    return all(
        not known.trusted and all(_is_ours(getattr(known, column.name)) for column in op_table.COLUMNS)
        for key, known in op_table.rows().items()
        if not (isinstance(key, str) and "::" in key and not key.startswith(("prims::", "psg_fx::")))
    )


def _is_ours(cell: Any) -> bool:
    function = op_table.function_of(cell)
    return not callable(function) or (getattr(function, "__module__", None) or "torch").partition(".")[0] in _OURS


_LOADED = time.time()


@functools.cache
def _files_of_psg_fx() -> str:
    """A digest of all files of this package.  Raises Unwritable where they are not those that this process runs."""
    found = hashlib.sha256()
    for root in (Path(version.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") and path.is_file():
                if path.stat().st_mtime > _LOADED:
                    raise Unwritable(f"{path} has changed since it was loaded")
                found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
