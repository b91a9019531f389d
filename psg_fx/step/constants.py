"""What a step is given as numbers, as tensors: those of the last call, where this one gives the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psg_fx.errors import BadArgument, first_line
from psg_fx.tensors import short_name, written_out

_NUMBERS = (int, float)


class Constants:
    """Tensors by name, each with the numbers that it was made of.  Graphs read them and never write."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, torch.Tensor, Any]] = {}

    def tensor(self, name: str, value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The value, a number, a tensor or a list of those, as a tensor."""
        known = self._made.get(name)
        if known is not None and known[2] is value and type(value) in _NUMBERS and known[0][1:] == (dtype, device):
            return known[1]  # the same number, so no text is made of it
        if isinstance(value, torch.Tensor):
            return as_tensor(name, value, dtype, device)
        if type(value) not in _NUMBERS and not (isinstance(value, list) and all(type(v) in _NUMBERS for v in value)):
            return as_tensor(name, value, dtype, device)
        return self._last(name, (repr(value), dtype, device), lambda: as_tensor(name, value, dtype, device), value)

    def ones(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`[count]` ones."""
        return self._last(name, (count, dtype, device), lambda: torch.ones(count, dtype=dtype, device=device))

    def unread(self, name: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """`[rows, columns]` whole numbers, column by column, of which the shape alone is read."""

        def make() -> torch.Tensor:
            return torch.empty(columns, rows, dtype=torch.int64, device=device).t()

        return self._last(name, (rows, columns, device), make)

    def _last(self, name: str, key: Any, make: Callable[[], torch.Tensor], value: Any = None) -> torch.Tensor:
        found = self._made.get(name)
        if found is not None and found[0] == key:
            return found[1]
        with torch.inference_mode(False):  # it may serve a call outside of it
            made = make()
        if type(made) is torch.Tensor:  # and none that a mode has made its own
            self._made[name] = key, made, value
        return made


def as_tensor(name: str, value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is given under a name, of this dtype and on this device.

    Numbers are sent without waiting for the device; a tensor may change as soon as the step has returned.

    Raises:
        BadArgument: it is no number and no strided tensor of numbers, or complex where real ones are asked for.
    """
    if isinstance(value, torch.Tensor):
        if kind := no_plain_numbers(value):
            raise _no_numbers(name, kind, "a graph reads strided tensors that have values")
        if value.is_complex() and not dtype.is_complex:
            raise _no_numbers(name, "complex", f"it multiplies numbers of {short_name(dtype)}")
        return written_out(value.to(device, dtype)).contiguous()
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        each = [as_tensor(name, v, dtype, device) for v in value]
        if len({v.shape for v in each}) > 1:
            raise _no_numbers(name, "a list of tensors of several shapes", "they are put into one")
        return torch.stack(each)
    try:
        found = torch.as_tensor(value, device="cpu")
        found = found if found.is_complex() else torch.as_tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_numbers(name, f"a {type(value).__name__}", first_line(error)) from error
    if found.is_complex():
        return as_tensor(name, found, dtype, device)
    return found.to(device, non_blocking=True).contiguous()


def no_plain_numbers(value: torch.Tensor) -> str:
    """How a tensor differs from one of numbers that lie in memory, "" where it does not."""
    if value.is_meta:
        return "on the meta device"
    if value.is_nested or value.is_quantized:
        return "nested" if value.is_nested else "quantised"
    return "" if value.layout is torch.strided else short_name(value.layout)


def _no_numbers(name: str, kind: str, why: str) -> BadArgument:
    place, _, parameter = name.partition("direction.")
    what = f"the direction of {parameter}" if parameter else place
    return BadArgument(
        f"{what} is {kind}", where=f"step(inputs, targets, {'directions' if parameter else name}=...)", why=why,
        fix="pass a tensor of real numbers, or numbers",
    )  # fmt: skip
