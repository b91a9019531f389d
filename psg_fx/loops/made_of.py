"""What results were made of, so that others are not put beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from psg_fx.digests import fingerprint
from psg_fx.loops.written import Texts
from psg_fx.program.ambient import ambient_key
from psg_fx.step.with_loss import LossModule
from psg_fx.tensors import short_name

RECORD = 4
"""How it is written down here: what was written otherwise cannot be compared."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def made_of(
    step: LossModule, given: Mapping[str, Any], expected: int | None, indices: bool, device: str, prepare: Any = None
) -> dict[str, Any]:
    """The step, its parameters and what every call is given, as JSON has it.

    expected: number of samples.  indices: whether samples have places.  device: the type of the step's.  prepare: what
    makes calls of batches.
    """
    s, owners = step.settings, [("", step.model)]
    if isinstance(step.loss_fn, nn.Module):
        owners.append(("loss.", step.loss_fn))
    modules = [((p + name).removesuffix("."), m) for p, owner in owners for name, m in owner.named_modules()]
    texts = Texts({m: name or "the model" for name, m in reversed(modules)})
    for _, module in modules:
        texts.text(type(module))  # notes its code
    printed = _ADDRESS.sub("", repr(step.loss_fn)) if isinstance(step.loss_fn, nn.Module) else texts.text(step.loss_fn)
    return {
        "record": RECORD,
        "quantities": [texts.text(q) for q in s.quantities],
        "model": _ADDRESS.sub("", repr(step.model)),
        "loss": printed,
        "settings": {
            f"{name}.{n}".removeprefix("."): v for name, m in modules for n, v in texts.attributes(m, name).items()
        },
        "batch_dim": texts.text(s.batch_dim),
        "asked": list(step._tracked().names),
        "training": [name for name, m in modules if m.training],
        "prepare": "nothing" if prepare is None else texts.text(prepare),
        "given": {name: _given(value, texts) for name, value in given.items()},
        "code": texts.code,
        "arithmetic": _arithmetic(device),
        "indices": indices,
        "samples in all": expected,
        "parameters": {p + name: _tensor(t) for p, owner in owners for name, t in owner.named_parameters()},
        "buffers": {p + name: _tensor(t) for p, owner in owners for name, t in owner.named_buffers()},
    }


def _arithmetic(device: str) -> dict[str, str]:
    """What of the modes around a call changes its numbers."""
    autocast, dtype, *_ = ambient_key(device)
    return {
        "autocast": "off" if autocast is None else short_name(autocast),
        "default dtype": short_name(dtype),
        "float32 products": _precision(device),
    }  # fmt: skip


def _precision(device: str) -> str:
    """In which arithmetic products of float32 are taken there, by either of torch's ways to say so; asking for
    `torch.get_float32_matmul_precision()` fails where both are in use.
    """
    backends: Any = torch.backends
    asked = (backends.cuda.matmul, getattr(backends.cudnn, "conv", None)) if device == "cuda" else (
        getattr(backends.mkldnn, "matmul", None),
    )  # fmt: skip
    found = [getattr(one, "fp32_precision", "none") for one in asked]
    return ", ".join("ieee" if one == "none" else one for one in found)


def _given(value: Any, texts: Texts) -> Any:
    """A keyword: of a mapping each entry for itself."""
    if isinstance(value, torch.Tensor):
        return {"": _tensor(value)}
    if isinstance(value, Mapping):
        return {str(name): _tensor(v) if isinstance(v, torch.Tensor) else texts.text(v) for name, v in value.items()}
    return texts.text(value)


def _tensor(t: torch.Tensor) -> list[Any]:
    """Shape, dtype, and a fingerprint of the values."""
    return [list(t.shape), short_name(t.dtype), fingerprint(t)]
