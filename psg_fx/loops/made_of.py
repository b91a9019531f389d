"""What results were made of, so that others are not put beside them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from psg_fx.errors import BadArgument
from psg_fx.loops.leaves import leaves
from psg_fx.program.objects import functions_of
from psg_fx.step.with_loss import LossModule

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def made_of(step: LossModule, given: Mapping[str, Any], expected: int | None) -> dict[str, Any]:
    """The step, its parameters and what every call is given, as JSON has it.  expected: number of samples."""
    s, owners = step.settings, [("", step.model)]
    if isinstance(step.loss_fn, nn.Module):
        owners.append(("loss.", step.loss_fn))
    return {
        "quantities": [_written(q) for q in s.quantities],
        "model": _ADDRESS.sub("", repr(step.model)),
        "loss": _name(step.loss_fn),
        "code": _code_of(step.loss_fn, (type(m) for _, owner in owners for m in owner.modules())),
        "batch_dim": repr(s.batch_dim),
        "asked": list(step._tracked().names),
        "training": [p + name for p, owner in owners for name, m in owner.named_modules() if m.training],
        "given": {name: _given(value) for name, value in given.items()},
        "samples in all": expected,
        "parameters": {p + name: _tensor(t) for p, owner in owners for name, t in owner.named_parameters()},
        "buffers": {p + name: _tensor(t) for p, owner in owners for name, t in owner.named_buffers()},
    }


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Refuse to go on with what differs, by name."""
    for what, why in _differences(before, now):
        raise BadArgument(
            f"the store was made with {what}", where=f"over(loader, step, store={str(path)!r})", why=why,
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
        elif part in ("model", "code"):
            why = "the code of the loss, or of a class of the model" if part == "code" else "what the model prints"
            yield f"{'other' if part == 'code' else 'another'} {part}", f"{why} is not what it was"
        else:
            yield f"another {part}" if part != "given" else "other keywords", f"{part}: {old} there, {new} here"


def _of_tensors(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    odd = [name for name in (*old, *(n for n in new if n not in old)) if old.get(name) != new.get(name)]
    name, more = odd[0], f" and {len(odd) - 1} more" * (len(odd) > 1)
    if name not in old or name not in new:
        return f"other {part}", f"{name}{more} is {'not there' if name not in old else 'there alone'}"
    kind = ("shape", "dtype", "values")[[a == b for a, b in zip(old[name], new[name], strict=True)].index(False)]
    reason = "; forward writes buffers, unless the model is in evaluation mode" * (part == "buffers")
    return f"other values of {name}{more}", f"its {kind} {'differ' if kind == 'values' else 'differs'}{reason}"


def _tensor(t: torch.Tensor) -> list[Any]:
    """Shape, dtype, and a fingerprint of the values."""
    return [list(t.shape), str(t.dtype).removeprefix("torch."), fingerprint(t)]


def fingerprint(t: torch.Tensor) -> str:
    """128 bits of the bytes of a tensor."""
    return hashlib.blake2b(data_of(t), digest_size=16).hexdigest()


def data_of(t: torch.Tensor) -> Any:
    """The bytes of a tensor, row after row, as a buffer."""
    own = t.detach().to("cpu").contiguous()
    if not own.numel():
        return b""
    buffer = (ctypes.c_char * (own.numel() * own.element_size())).from_address(own.data_ptr())
    buffer._tensor = own  # type: ignore[attr-defined]  # keeps the memory
    return memoryview(buffer).cast("B")


def _given(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, Mapping)):
        named = {str(name): t for (_, name), t in leaves({"": value})}
        return {name: _tensor(t) for name, t in named.items()}
    return _ADDRESS.sub("", repr(value))


def _written(quantity: Any) -> str:
    """A quantity with the values of its tensors."""
    if not dataclasses.is_dataclass(quantity):
        return _ADDRESS.sub("", repr(quantity))
    fields = [(f.name, getattr(quantity, f.name)) for f in dataclasses.fields(quantity)]
    return f"{type(quantity).__name__}({', '.join(f'{name}={_plain(value)!r}' for name, value in fields)})"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in value.items()}
    return value


def _code_of(loss_fn: Any, kinds: Iterable[type]) -> str:
    """A fingerprint of the code of a loss, or of its class, and of classes: of what is not torch's."""
    function = getattr(loss_fn, "func", loss_fn)  # of a partial
    function = getattr(function, "__func__", function)  # of a method
    classes = [k for k in dict.fromkeys((*kinds, type(function))) if not k.__module__.startswith("torch.")]
    found = [f for kind in classes for value in vars(kind).values() for f in functions_of(value)]
    if isinstance(function, FunctionType) and not function.__module__.startswith("torch."):
        found.append(function)
    text = "".join(_written_code(f.__code__) for f in found)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _written_code(code: CodeType) -> str:
    return repr((code.co_name, code.co_code, code.co_names, [_constant(c) for c in code.co_consts]))


def _constant(value: Any) -> str:
    """A constant of code, alike in every process: sets have an order of their own in each."""
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(v) for v in value]
        return repr(parts if isinstance(value, tuple) else sorted(parts))
    return _written_code(value) if isinstance(value, CodeType) else repr(value)


def _name(function: Any) -> str:
    """What a loss is called in its module."""
    if isinstance(function, functools.partial):
        return f"partial of {_name(function.func)} with {_ADDRESS.sub('', repr((function.args, function.keywords)))}"
    if isinstance(function, nn.Module):
        return _ADDRESS.sub("", repr(function))
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"
