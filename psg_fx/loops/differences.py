"""How what a store was made of differs from what it would go on with, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psg_fx.errors import BadArgument
from psg_fx.loops.made_of import RECORD

_NAMES = {
    "quantities": "other quantities", "loss": "another loss", "prepare": "another prepare=",
    "batch_dim": "another batch_dim", "asked": "other parameters asked for",
    "samples in all": "another number of samples", "arithmetic": "another arithmetic",
}  # fmt: skip
_SHOWN = 3


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Refuse to go on with what differs, by name."""
    where = f"over(loader, step, store={str(path)!r})"
    if before.get("record") != RECORD:
        raise BadArgument(
            "the store was begun by another version of psg_fx", where=where,
            why="what it was made of is written down otherwise, and cannot be compared",
            fix="read it by psg_fx.Store(path), or choose another folder",
        )  # fmt: skip
    for what, why in _differences(before, now):
        raise BadArgument(
            f"the store was made with {what}", where=where, why=why,
            fix="call with what it was made of, or choose another folder",
        )  # fmt: skip


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for part, old in before.items():
        new = now.get(part)
        if old == new or (part == "samples in all" and None in (old, new)):  # a stream does not say
            continue
        if part in ("parameters", "buffers"):
            yield _of_tensors(part, old, new or {})
        elif part == "training":
            odd = ", ".join(name or "the model" for name in sorted(set(old) ^ set(new or [])))
            yield "another train or evaluation mode", f"{odd}: .training differs"
        elif part == "model":
            yield "another model", "what the model prints is not what it was"
        elif part == "code":
            yield "other code", f"the code of {_listed(_odd(old, new or {}))} is not what it was"
        elif part == "settings":
            names = _odd(old, new or {})
            why = "; ".join(_both(name, old, new or {}) for name in names[:_SHOWN])
            yield f"other settings of {_listed(names)}", why
        elif part == "given":
            yield _of_keywords(old, new or {})
        elif part == "indices":
            yield f"{'' if old else 'no '}indices=", f"indices= is given {'there' if old else 'here'} alone"
        else:
            yield _NAMES.get(part, f"another {part}"), _of_values(part, old, new)


def _of_values(part: str, old: Any, new: Any) -> str:
    """What of a value, of a list or of a mapping differs."""
    if isinstance(old, Mapping):
        return "; ".join(_both(name, old, new or {}) for name in _odd(old, new or {}))
    if isinstance(old, list) and isinstance(new, list):
        old, new = [v for v in old if v not in new] or old, [v for v in new if v not in old] or new
    return f"{part}: {_shown(old)} there, {_shown(new)} here"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _odd(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names whose values differ."""
    return [name for name in (*old, *(n for n in new if n not in old)) if old.get(name) != new.get(name)]


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return ", ".join(names[:_SHOWN]) + more


def _both(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{name}: {old.get(name, 'nothing')} there, {new.get(name, 'nothing')} here"


def _of_keywords(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    """The first keyword of all calls that differs."""
    name = _odd(old, new)[0]
    if name not in old or name not in new:
        return (
            f"{'no ' if name not in old else ''}{name}=",
            f"{name}= is given {'here' if name in new else 'there'} alone",
        )
    was, now = old[name], new[name]
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        return f"other values of {name}=", f"{name}: {_kind(was)} there, {_kind(now)} here"
    odd = _odd(was, now)
    first = f"{name}[{odd[0]!r}]" if odd[0] else name
    return f"other values of {name}=", f"{first}{_more(odd)}: {_how(was.get(odd[0]), now.get(odd[0]))}"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a tensor" if set(value) == {""} else "a mapping"
    return str(value)


def _of_tensors(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    odd = _odd(old, new)
    name = odd[0]
    if name not in old or name not in new:
        return f"other {part}", f"{name}{_more(odd)} is {'not there' if name not in old else 'there alone'}"
    reason = "; forward writes buffers, unless the model is in evaluation mode" * (part == "buffers")
    return f"other values of {name}{_more(odd)}", f"its {_how(old[name], new[name])}{reason}"


def _more(odd: Sequence[str]) -> str:
    return f" and {len(odd) - 1} more" * (len(odd) > 1)


def _how(old: Any, new: Any) -> str:
    """In what two tensors differ: shape, dtype and fingerprint of each."""
    if not isinstance(old, list) or not isinstance(new, list):
        return f"{_one(old)} there, {_one(new)} here"
    for kind, was, now in zip(("shape", "dtype"), old, new, strict=False):
        if was != now:
            return f"{kind} differs: {was} there, {now} here"
    return "values differ"


def _one(value: Any) -> str:
    return "nothing" if value is None else "a tensor" if isinstance(value, list) else str(value)
