"""Rows of tensors in `.npy` files that grow, without numpy.

A file is a header of HEADER bytes, in which the number of rows is written anew at times, and the rows; numpy.load reads
it.  bfloat16, which numpy does not know, is there as two bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from psg_fx.digests import data_of
from psg_fx.errors import BadArgument
from psg_fx.tensors import product

HEADER = 256
_KINDS = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "|V2", torch.int64: "<i8",
    torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1", torch.uint8: "|u1", torch.bool: "|b1",
    torch.complex64: "<c8", torch.complex128: "<c16",
}  # fmt: skip


def header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The first HEADER bytes of a file."""
    text = repr({"descr": _KINDS[dtype], "fortran_order": False, "shape": shape})
    room = HEADER - 10
    return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1).encode() + b"\n"


def put(path: Path, start: int, rows: torch.Tensor) -> None:
    """Write rows from number `start` on."""
    with open(path, "r+b" if start or path.exists() else "w+b") as file:
        file.seek(HEADER + start * _width(rows.dtype, rows.shape[1:]))
        file.write(data_of(rows))


def settle(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Say how many rows there are, and wait until all is on the disk."""
    with open(path, "r+b") as file:
        file.write(header(dtype, shape))
        file.truncate(HEADER + shape[0] * _width(dtype, shape[1:]))
        file.flush()
        os.fsync(file.fileno())


def mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The rows, read when they are looked at; what is written into the tensor does not reach the file."""
    size = HEADER + shape[0] * _width(dtype, shape[1:])
    if not path.exists() or path.stat().st_size < size:
        raise BadArgument(
            f"{path.name} has lost rows" if path.exists() else f"{path.name} is gone", where=str(path),
            why=f"{shape[0]} rows were written to it", fix="restore the file, or fill another folder anew",
        )  # fmt: skip
    storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
    strides = [product(shape[i + 1 :]) for i in range(len(shape))]
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, HEADER // dtype.itemsize, shape, strides)


def _width(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a row."""
    return int(product(shape)) * dtype.itemsize


def replaced(path: Path, data: bytes) -> None:
    """Write a small file in one piece: whoever reads it finds the old or the new one."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
