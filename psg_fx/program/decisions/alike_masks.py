"""A mask that the code makes twice: `loss(o[y != -100], y[y != -100])`.

How many rows a mask picks has a symbol, the same for all that one tensor picks, and another one for each tensor.  Two
masks that are computed alike pick alike: while the program is captured, what the second one picks is picked by the
first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg_fx.torch_private.modes import is_transformed

_PICKING = {
    "__getitem__", "__setitem__", "masked_select", "masked_scatter", "masked_scatter_", "index_put", "index_put_",
}  # fmt: skip
"""What picks by masks from its first argument, which it may write into, or give a view of."""
_LISTING = {"nonzero", "argwhere", "where"}
_FIRST = ("self", "input")
_MADE_BY = {
    *(form for name in ("eq", "ne", "gt", "ge", "lt", "le") for form in (name, f"__{name}__")),
    "isnan", "isinf", "isfinite", "isin", "__and__", "__or__", "__xor__", "__invert__",
    *(f"logical_{name}" for name in ("and", "or", "xor", "not")),
    *(f"bitwise_{name}" for name in ("and", "or", "xor", "not")), "bool", "to", "view", "reshape", "flatten", "detach",
    "squeeze", "unsqueeze", "select", "narrow", "transpose", "t", "movedim", "permute", "contiguous", "expand_as",
    "__getitem__",
}  # fmt: skip
"""What masks are made by, and the views that these are made of: what they give follows from their arguments."""
_UNSEEN = (torch.Tensor.data.__get__, torch.Tensor.data.__set__, torch.Tensor.set_)  # type: ignore[attr-defined]
_PLAIN = (int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format)


class AlikeMasks(TorchFunctionMode):
    """While open, a mask that is made like an earlier one picks as that one.

    made: how tensors were made, by their ids.  first: the first one that was made so.  unseen: the code may write into
    tensors, and no count of theirs says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Tensor, int, Any]] = {}
        self.first: dict[Any, tuple[Tensor, int]] = {}
        self.unseen = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.unseen or func in _UNSEEN:
            self.unseen = True
            return func(*args, **kwargs)
        if name in _PICKING or name in _LISTING:
            kept = args[: name in _PICKING]
            args = (*kept, *map(self.earlier, args[len(kept) :]))
            kwargs = {k: v if k in _FIRST and name in _PICKING else self.earlier(v) for k, v in kwargs.items()}
        key = self.key((name, *args, *kwargs.items())) if name in _MADE_BY else None
        result = func(*args, **kwargs)
        if key is not None and isinstance(result, Tensor) and not is_transformed(result):  # it ends with its level
            self.made[id(result)] = result, result._version, key
            self.first.setdefault(key, (result, result._version))
        return result

    def earlier(self, value: Any) -> Any:
        """The first mask that was made like this one, where neither has been written to since."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.earlier, value)) if type(value) in (tuple, list) else value
        if not isinstance(value, Tensor) or value.dtype is not torch.bool:
            return value
        _, version, key = self.made.get(id(value), (None, -1, None))
        if version != value._version:
            return value
        first, version = self.first[key]
        return first if version == first._version else value

    def key(self, value: Any) -> Any:
        """What tells a value from others, and how it was made, if that is known; None where nothing does."""
        if isinstance(value, Tensor):
            _, version, key = self.made.get(id(value), (None, -1, None))
            self.made.setdefault(id(value), (value, -1, None))  # it lives as long as its id is looked for
            return key if version == value._version else (id(value), value._version)
        if isinstance(value, (tuple, list)):
            parts = tuple(map(self.key, value))
            return None if None in parts else (type(value), parts)
        if isinstance(value, slice):
            return self.key((slice, value.start, value.stop, value.step))
        if isinstance(value, torch.SymInt):
            return torch.SymInt, str(value)
        return (type(value), value) if isinstance(value, (*_PLAIN, type)) else None
