"""What numbers of a program tell of its masks: `m.any()`, `m.sum() > 0`, how many rows `x[m]` has, and which experts
somebody has chosen (`m.sum((0, 1)) > 0`, `.nonzero()` of that).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from psg_fx.torch_private.symbols import size_of_values

_MANY = 1 << 20
"""A number of rows that nothing is likely to be compared with."""


@dataclass(frozen=True)
class Known:
    """A number, or a tensor of one, that says whether a mask picks anything; or one for each index of a dim of it.

    mask: the tensor.  version: how often it had been written to.  rest: the mask is all the others.  empty: the number
    if it picks nothing.  others: numbers that it may be if it picks something.  dim: of the mask, if each of several
    numbers is of an index of it.  index: which one is meant.  numbered: of a one-hot mask with the classes in that dim,
    the classes, and how often they had been written to.
    """

    mask: Tensor
    version: int
    rest: bool
    empty: Any
    others: tuple[Any, ...]
    dim: int | None = None
    index: int | None = None
    numbered: tuple[Tensor, int] | None = None

    @property
    def of_each(self) -> bool:
        return self.dim is not None and self.index is None

    def after(self, function: Callable[[Any], Any]) -> Known:
        return replace(self, empty=function(self.empty), others=tuple(map(function, self.others)))

    def outcome(self, picks: bool) -> bool | None:
        """What it is as a condition, where the mask picks something or nothing; None where it does not say which."""
        empty, others = bool(self.empty), set(map(bool, self.others))
        return (not empty if picks else empty) if others == {not empty} else None

    def says(self) -> tuple[Tensor, ...]:
        """Where it picks, a copy of its own; and other masks that pick nothing if it picks nothing."""
        if self.dim is None or self.index is None:
            return ((self.mask == 0 if self.rest else self.mask != 0).detach(),)
        mask = self.mask.select(self.dim, self.index)
        says = (mask == 0 if self.rest else mask != 0).detach()
        if self.numbered is None or self.rest or self.numbered[0]._version != self.numbered[1]:
            return (says,)
        return says, (self.numbered[0] == self.index).detach()


class Told:
    """Of the tensors of a run that have not been written to since.

    numbers: what tensors say.  masks: the mask that a tensor is as a number, which version of it, and whether it has
    that one's shape.
    symbols: numbers of rows.  lists: of the indexes at which a mask picks something.  classes: of one-hot masks, and
    the dim in which they are.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[Tensor, int, Known]] = {}
        self.masks: dict[int, tuple[Tensor, int, tuple[Tensor, int, bool]]] = {}
        self.symbols: dict[Any, Known] = {}
        self.lists: dict[int, tuple[Tensor, int, Known]] = {}
        self.classes: dict[int, tuple[Tensor, int, tuple[Tensor, int, int]]] = {}

    def known(self, tensor: Tensor) -> Known | None:
        """What a tensor of one number says, or a tensor of one for each index."""
        found: Known | None = self._found(self.numbers, tensor)
        return found

    def listed(self, tensor: Tensor) -> Known | None:
        """What the indexes that a tensor lists are picked by."""
        found: Known | None = self._found(self.lists, tensor)
        return found

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What a result tells of a mask."""
        if name not in _TOLD_BY or not args or not isinstance(args[0], Tensor):
            return
        tensor, rest = args[0], [*args[1:], *kwargs.values()]
        if name in _LISTING:
            self._note_rows(name, tensor, rest, result)
            self._note_list(name, tensor, rest, result)
        if isinstance(result, Tensor):
            self._note_classes(name, tensor, rest, result)
            self._note_mask(name, tensor, result)
            if name in _SAME_LIST and (listed := self.listed(tensor)) is not None and _lists_the_same(tensor, result):
                self.lists[id(result)] = result, result._version, listed
        known = self._told(name, tensor, args[1:], kwargs, result)
        if known is None:
            return
        if isinstance(result, Tensor):
            self.numbers[id(result)] = result, result._version, known
        elif not known.of_each and (node := getattr(result, "node", None)) is not None and node.expr.is_Symbol:
            self.symbols[node.expr] = known.after(int)

    def _found(self, kept: Mapping[int, tuple[Tensor, int, Any]], tensor: Tensor) -> Any:
        _, version, found = kept.get(id(tensor), (None, -1, None))
        return found if version == tensor._version else None

    def _note_classes(self, name: str, tensor: Tensor, rest: Sequence[Any], result: Tensor) -> None:
        """A one-hot mask, or one with its dims in another order."""
        if name == "one_hot":
            self.classes[id(result)] = result, result._version, (tensor, tensor._version, tensor.ndim)
        classes = self._found(self.classes, tensor)
        dims = rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest
        if name == "permute" and classes is not None:
            dim = [d % tensor.ndim for d in dims].index(classes[2])
            self.classes[id(result)] = result, result._version, (*classes[:2], dim)

    def _note_mask(self, name: str, tensor: Tensor, result: Tensor) -> None:
        """A mask in other numbers, in another shape, or with dims in another order."""
        if name == "one_hot":
            self.masks[id(result)] = result, result._version, (result, result._version, True)
        if not tensor.ndim:
            return
        cast = self._cast(tensor)
        if cast is None and tensor.dtype is not torch.bool:
            return
        mask, same = cast or (tensor, True)
        if name in _TURNED:
            self.masks[id(result)] = result, result._version, (result, result._version, True)
        elif name in _SAME:
            same = same and name in _OF_SAME_SHAPE
            self.masks[id(result)] = result, result._version, (mask, mask._version, same)

    def _cast(self, tensor: Tensor) -> tuple[Tensor, bool] | None:
        """The mask that a tensor is in other numbers, which has not been written to since, and whether it has its
        shape.
        """
        mask, version, same = self._found(self.masks, tensor) or (None, -1, False)
        return None if mask is None or mask._version != version else (mask, same)

    def _told(
        self, name: str, tensor: Tensor, rest: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Known | None:
        """What is known of what a function gives for a tensor."""
        known = self.known(tensor)
        if name in _ASKED_OF_MASKS and (known is None or known.of_each):
            return self._asked(name, tensor, rest, kwargs)
        if known is None:
            return None
        given = [*rest, *kwargs.values()]
        if name in COMPARED and len(given) == 1 and isinstance(given[0], (int, float)):
            return known.after(lambda number: COMPARED[name](number, given[0]))
        if name == "logical_not" or (name in _INVERTED and tensor.dtype is torch.bool):
            return known.after(operator.not_)
        if name == "__getitem__" and known.of_each and type(given[0]) is int:
            return replace(known, index=given[0])
        if isinstance(result, Tensor) and result.dtype in _NARROW and tensor.dtype is not torch.bool:
            return None  # 256 is 0
        return known if name in (_OF_SAME_SHAPE if known.of_each else _SAME) else None

    def _asked(self, name: str, tensor: Tensor, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Known | None:
        """What is known of `any`, `sum`, .. of a mask, of all of it or of each index of a dim."""
        cast = self._cast(tensor)
        mask, same = cast or (tensor, True)
        if cast is None and mask.dtype is not torch.bool and name in _OF_BOOLS:
            return None
        dim = _dim_that_stays(tensor.ndim, rest, kwargs) if (rest or kwargs) and same else None
        if (rest or kwargs) and dim is None:
            return None
        numbered, version, of_classes = self._found(self.classes, mask) or (None, 0, None)
        classes = (numbered, version) if numbered is not None and of_classes == dim else None
        return Known(mask, mask._version, name == "all", *_ASKED_OF_MASKS[name], dim, numbered=classes)

    def _note_rows(self, name: str, tensor: Tensor, rest: Sequence[Any], result: Any) -> None:
        """The number of rows that a mask picks has a symbol."""
        if (name == "where" and rest) or (name in _PICKS and not rest):
            return
        mask = rest[0] if name in _PICKS else tensor
        masks = [m for m in (mask if isinstance(mask, tuple) else (mask,)) if isinstance(m, Tensor)]
        first = _first(result)
        if len(masks) != 1 or not isinstance(first, Tensor) or (name in _PICKS and masks[0].dtype is not torch.bool):
            return
        before = {size_of_values(size) for given in (tensor, *masks) for size in given.shape}
        for symbol in {*map(size_of_values, first.shape)} - before - {None}:
            self.symbols.setdefault(symbol, Known(masks[0], masks[0]._version, False, 0, (1, _MANY)))

    def _note_list(self, name: str, tensor: Tensor, rest: Sequence[Any], result: Any) -> None:
        """The indexes of a dim of known size at which a mask picks something."""
        if name in _PICKS or (name == "where" and rest) or tensor.ndim != 1:
            return
        known = self.known(tensor)
        if known is None and tensor.dtype is torch.bool:
            known = Known(tensor, tensor._version, False, False, (True,), 0)
        if known is None or not known.of_each or known.outcome(True) is not True:
            return
        first = _first(result)
        self.lists[id(first)] = first, first._version, known


def _dim_that_stays(ndim: int, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The only dim over which is not reduced; None where there is no such one."""
    given = {**dict(zip(("dim",), rest, strict=False)), **kwargs}
    if len(rest) > 1 or set(given) != {"dim"}:
        return None
    dims = given["dim"] if isinstance(given["dim"], Sequence) else (given["dim"],)
    if not all(type(dim) is int for dim in dims):
        return None
    left = set(range(ndim)) - {dim % ndim for dim in dims}
    return left.pop() if len(left) == 1 else None


def _lists_the_same(tensor: Tensor, result: Tensor) -> bool:
    """Whether a result has all rows of a list: indexes in one dim, or in a column."""
    column = result.ndim == 1 or (result.ndim == 2 and type(result.shape[1]) is int and result.shape[1] == 1)
    return column and size_of_values(result.shape[0]) == size_of_values(tensor.shape[0])


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, (tuple, list)) else result


_ASKED_OF_MASKS = {
    "any": (False, (True,)), "all": (True, (False,)), "sum": (0, (1, _MANY)), "count_nonzero": (0, (1, _MANY)),
}  # fmt: skip
_OF_BOOLS = {"all", "sum"}
_PICKS = {"masked_select", "__getitem__"}
_LISTING = {*_PICKS, "nonzero", "argwhere", "where"}
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "__gt__": operator.gt, "__ge__": operator.ge, "__lt__": operator.lt, "__le__": operator.le,
    "__eq__": operator.eq, "__ne__": operator.ne, "greater": operator.gt, "less": operator.lt,
}  # fmt: skip
_NARROW = (torch.uint8, torch.int8, torch.int16)
_INVERTED = {"bitwise_not", "__invert__"}
_TURNED = {"permute", "transpose", "swapaxes", "movedim", "t"}
_OF_SAME_SHAPE = {"detach", "to", "float", "double", "long", "int", "bool", "cpu", "clone"}
_SAME = {*_OF_SAME_SHAPE, "item", "squeeze", "view", "reshape"}
_SAME_LIST = {*_OF_SAME_SHAPE, "squeeze", "view", "reshape", "flatten"}
_TOLD_BY = {
    *_ASKED_OF_MASKS, "logical_not", *_LISTING, *COMPARED, *_INVERTED, *_SAME, *_SAME_LIST, *_TURNED, "one_hot",
}  # fmt: skip
