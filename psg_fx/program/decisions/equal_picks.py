"""Masks of the call that pick as many places of each sample: `x[~mask].reshape(B, -1, C)`, as masked autoencoders do.

How many a mask picks is said by its values, and a graph has sizes.  The masks of the call that is captured are there;
if they pick as many places of each of its samples, the graph holds that number, and a step looks at every call whether
it is still the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg_fx.graph.facts import PICKS
from psg_fx.program.code import users_line
from psg_fx.program.decisions.assumptions import Assumption, asking
from psg_fx.tensors import picked_first
from psg_fx.torch_private.modes import no_modes, without_functions
from psg_fx.torch_private.symbols import depends_on_values


@dataclass(frozen=True)
class _Picked:
    """Rows `x[mask]` of `x` `[B, .., *rest]` by a mask `[B, ..]`, of which each sample has so many.

    taken: the rows.  state: how often all three had been written to, and whether gradients were enabled.
    """

    x: Tensor
    mask: Tensor
    each: int
    taken: Tensor
    state: tuple[Any, ...] = ()

    def now(self) -> tuple[Any, ...]:
        return (*(t._version for t in (self.x, self.mask, self.taken)), torch.is_grad_enabled())

    def rows(self) -> Tensor:
        """`[B·each, *rest]`, in their order."""
        x = self.x.flatten(1, self.mask.ndim - 1)
        places = picked_first(self.mask.flatten(1))[:, : self.each]
        index = places.reshape(*places.shape, *[1] * (x.ndim - 2)).expand(*places.shape, *x.shape[2:])
        return x.gather(1, index).flatten(0, 1)

    def violated(self) -> Tensor:
        return (self.mask.detach().flatten(1).sum(1) != self.each).any()


class EqualPicks(TorchFunctionMode):
    """While open, rows that such a mask picks are as many as in the call, where they are put into samples again.

    found: what is assumed.  tensors, given: of the program, and of the call.  put: whether there were such rows.
    """

    def __init__(self, found: list[Assumption], tensors: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        super().__init__()
        self.found, self.put = found, False
        self.masks: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.picked: dict[int, _Picked] = {}
        self.counted: set[int] = set()
        with without_functions():  # those that trace would take a tensor of the call for a constant
            for tensor, own in zip(tensors, given, strict=False):
                kind = own.dtype in (torch.bool, torch.int64, torch.uint8)
                if type(own) is Tensor and kind and own.ndim > 1 and own.numel():
                    self.masks[id(tensor)] = tensor, tensor._version, own

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not self.masks or kwargs or not args or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        if name in _PUT and (picked := self.picked.get(id(args[0]))) is not None and picked.now() == picked.state:
            sizes = _sizes(name, args)
            if len(sizes) > args[0].ndim and str(sizes[0]) == str(picked.x.shape[0]):
                return self.rows(picked).reshape([-1 if depends_on_values(size) else size for size in sizes])
        result = func(*args)
        if name in _OF_MASKS and all(type(arg) in (int, float, bool) for arg in args[1:]):
            if (mask := self.mask(args[0])) is not None:
                with without_functions(), no_modes():
                    self.masks[id(result)] = result, result._version, func(mask, *args[1:])
        elif name == "__getitem__" and (mask := self.mask(args[1])) is not None and args[1].dtype is torch.bool:
            self.note(args[0], args[1], mask, result)
        return result

    def mask(self, tensor: Any) -> Tensor | None:
        """The values of a mask in the call that is captured."""
        found, version, own = self.masks.get(id(tensor), (None, -1, None))
        return own if found is not None and version == tensor._version else None

    def note(self, x: Tensor, mask: Tensor, own: Tensor, result: Tensor) -> None:
        if own.ndim < 2:  # of all samples one after the other
            return
        with without_functions(), no_modes():
            counts = own.flatten(1).sum(1).tolist()
        if x.ndim > mask.ndim and all(map(_are_equal, x.shape, mask.shape)) and set(counts) == {counts[0]} != {0}:
            picked = _Picked(x, mask, counts[0], result)
            self.picked[id(result)] = replace(picked, state=picked.now())

    def rows(self, picked: _Picked) -> Tensor:
        self.put = True
        if id(picked.mask) not in self.counted:
            self.counted.add(id(picked.mask))
            line = users_line(asking(sys._getframe(2)))
            self.found.append(Assumption(picked.violated(), line, PICKS))
        return picked.rows()


def _sizes(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """What a tensor is put into."""
    if name == "unflatten":
        return (*args[2], *args[0].shape[1:]) if args[1] == 0 else ()
    sizes: Sequence[Any] = args[1:] if len(args) > 2 or not isinstance(args[1], Sequence) else args[1]
    return sizes


def _are_equal(one: Any, other: Any) -> bool:
    return str(one) == str(other)


_PUT = {"reshape", "view", "unflatten"}
_OF_MASKS = {
    "bitwise_not", "__invert__", "logical_not", "bool", "flatten", "detach", "clone",
    *("eq", "ne", "gt", "ge", "lt", "le", "__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__"),
}  # fmt: skip
