"""Bytes of tensors, and fingerprints of these and of texts."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch


def digest(data: Any) -> str:
    """128 bits of a text or of bytes."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=16).hexdigest()


def fingerprint(t: torch.Tensor) -> str:
    """128 bits of the bytes of a tensor; of one that has none in a row (sparse, on the meta device) what it is."""
    if t.layout is not torch.strided or t.is_meta or t.is_quantized or t.is_nested:
        return f"{type(t).__name__} of {t.layout} on {t.device.type}"
    return digest(data_of(t))


def data_of(t: torch.Tensor) -> Any:
    """The bytes of a tensor, row after row, as a buffer."""
    own = t.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if not own.numel():
        return b""
    buffer = (ctypes.c_char * (own.numel() * own.element_size())).from_address(own.data_ptr())
    buffer._tensor = own  # type: ignore[attr-defined]  # keeps the memory
    return memoryview(buffer).cast("B")
