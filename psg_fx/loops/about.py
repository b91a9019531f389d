"""What a store says of itself, as it lies in its folder; a folder that is damaged is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from psg_fx.errors import BadArgument, first_line
from psg_fx.loops.totals import Totals
from psg_fx.step.leaves import Key

ABOUT, FORMAT = "store.json", 1
_PARTS = {"complete": bool, "batches": int, "samples": int, "joins": dict, "rows": list, "sums": str, "made of": dict}

Kept = dict[Key, tuple[str, torch.dtype, tuple[int, ...]]]
"""File, dtype and shape of a row for every field."""


def read_about(path: Path) -> dict[str, Any] | None:
    """What a folder says of itself, None where there is nothing."""
    file = path / ABOUT
    if not file.exists():
        return None
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _damaged(file, "cannot be read", f"{type(error).__name__}: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise _damaged(file, "is not that of a store", f"it holds a {type(found).__name__}")
    if found.get("format") != FORMAT:
        raise BadArgument(
            f"the store is of format {found.get('format')}", where=str(path), why=f"this psg_fx reads {FORMAT}",
            fix="read it with the psg_fx that wrote it",
        )  # fmt: skip
    for part in (part for part, kind in _PARTS.items() if not isinstance(found.get(part), kind)):
        raise _damaged(file, "is not that of a store", f"{part!r} is {'wrong' if part in found else 'missing'} in it")
    kept_of(found, path)
    return found


def kept_of(about: Mapping[str, Any], path: Path) -> Kept:
    """The rows that it names."""
    try:
        return {
            (r["field"], r["name"]): (str(r["file"]), _dtype(r["dtype"]), tuple(map(int, r["shape"])))
            for r in about["rows"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"a field is not described as it should be ({type(error).__name__}: {first_line(error)})"
        raise _damaged(path / ABOUT, "is not that of a store", why) from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def restored(totals: Totals, path: Path, sums: str, device: torch.device) -> Totals:
    """The sums over the samples that are done, on a device.  sums: their file; "" for none."""
    if not sums:
        return totals
    file = path / sums
    if not file.exists():
        raise _damaged(file, "is gone", "the sums over the samples that are done were written to it")
    try:
        totals.restore(torch.load(file, map_location="cpu", weights_only=True), device)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError,
            pickle.UnpicklingError) as error:  # fmt: skip
        raise _damaged(file, "cannot be read", f"{type(error).__name__}: {first_line(error)}") from error
    return totals


def _damaged(file: Path, what: str, why: str) -> BadArgument:
    return BadArgument(
        f"{file.name} {what}", where=str(file), why=why, fix="restore the file, or fill another folder anew"
    )
