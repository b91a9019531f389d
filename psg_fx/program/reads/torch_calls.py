"""Calls of torch while code is captured: what they are given, and the values of tensors that they say."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import Origin, origin, source, users_line
from psg_fx.program.decisions.flags import LARGE_MASK, Flags, Looks
from psg_fx.program.decisions.questions import Question
from psg_fx.program.reads.observed import Observed
from psg_fx.program.reads.sparse_matrices import sparse
from psg_fx.program.stand_ins import StandIns
from psg_fx.program.values import Same
from psg_fx.torch_private.fakes import LIST_OF_FAKE, FakeTensor
from psg_fx.torch_private.modes import GRAD_OF_TENSOR, no_modes, without_functions
from psg_fx.torch_private.tensor_parallel import computes_with_a_slice, size_of_whole


class TorchCalls(TorchFunctionMode):
    """Nothing is observed inside torch's own functions, which saves most of the time; reads of values are noted, of
    tensors that the code holds and of what is computed from them.
    """

    def __init__(self, profile: Any, found: Observed, stand_ins: StandIns) -> None:
        super().__init__()
        self.profile, self.found, self.stand_ins = profile, found, stand_ins
        self.made_of = WeakIdKeyDictionary()
        self.flags = Flags(stand_ins)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == GRAD_OF_TENSOR and origin(sys._getframe(1).f_code.co_filename) is Origin.USER:
            self._refuse_gradient(args[0], sys._getframe(1))
        if not any(isinstance(v, _CALLED) for v in (*args, *kwargs.values())):
            sys.setprofile(None)  # else it calls a function of the user's, as a loss does with a distance
        try:
            if (decided := self.flags.answer(func, args, kwargs)) is not None:
                return self._followed(decided)
            if (places := self._places(func, args, kwargs)) is not None:
                return places
            if (size := size_of_whole(func, args, kwargs)) is not None:
                return size
            if (found := sparse(func, args, kwargs)) is not None:
                return self._of_sparse(*found)
            if computes_with_a_slice(func, args, kwargs):
                self._refuse_slice(func, sys._getframe(1))
            if func is torch.Tensor.__iter__ and args[0].ndim and self.flags.values_of(args[0]) is not None:
                return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
            if func in _INDEXING and len(args) > 1:
                args = (args[0], self._indexed(args[1], args[0].shape), *args[2:])
            own, written = (args, kwargs), self.flags.writing(func, args)
            args, kwargs = self.stand_ins.given(tuple(args)), self.stand_ins.given(kwargs)
            held = self._held((*args, *kwargs.values()))
            if func in _LOOKS or (func in _MADE_OF_NUMBERS and args and not isinstance(args[0], torch.Tensor)):
                for tensor in held:
                    self.found.looks(tensor)
            result = func(*args, **kwargs)
            if held:
                for made in result if isinstance(result, (tuple, list)) else (result,):
                    if isinstance(made, torch.Tensor):
                        self.made_of[made] = held
            self.flags.computed(func, *own, result)
            self.flags.read(func, own[0], result)
            if written is not None:
                written()
            return self.stand_ins.own(result)
        finally:
            sys.setprofile(self.profile)

    def as_list(self, tensor: FakeTensor) -> Any:
        """`tensor.tolist()`, which a fake tensor answers by itself, number by number."""
        decided = self.flags.answer(torch.Tensor.tolist, (tensor,))
        return LIST_OF_FAKE(tensor) if decided is None else self._followed(decided)

    def decides(self, condition: Any, frame: FrameType) -> bool | None:
        """What a condition on numbers that were read out of small buffers is; None for others."""
        decided = self.flags.decides(condition)
        return None if decided is None else bool(self._followed(decided))

    def read_number(self, tensor: torch.Tensor) -> None:
        """Torch reads a number out of a tensor."""
        for held in self._held((tensor,)):
            self.found.looks(held)

    def _of_sparse(self, fixed: Sequence[torch.Tensor], compute: Callable[[], Any]) -> Any:
        """A function of sparse tensors, of which the numbers of some are those of this capture."""
        held = self._held(fixed)
        for tensor in held:
            self.found.looks(tensor)
        result = compute()
        if isinstance(result, torch.Tensor):
            self.made_of[result] = held
        return result

    def _followed(self, decided: tuple[Any, Looks]) -> Any:
        """An answer, for which the code has looked at tensors."""
        answer, looks = decided
        for tensor, question in looks:
            self.found.looks(tensor, question)
        return answer

    def _indexed(self, index: Any, shape: Sequence[Any] = ()) -> Any:
        """An index whose slices are bounded by numbers: torch reads those of tensors unseen; and, where no samples lie,
        the places that masks of the code's own pick.

        shape: of what is indexed.
        """
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and shape:
            found = self._indexed((index,), shape)
            return index if found[0] is index else found
        if isinstance(index, tuple):
            begins = _begins(index, len(shape))
            fixed = bool(shape) and type(shape[0]) is int
            parts = (self._picked(part, shape[begin:]) if k or fixed else (self._indexed(part),)
                     for k, (part, begin) in enumerate(zip(index, begins, strict=True)))  # fmt: skip
            return tuple(part for several in parts for part in several)
        if isinstance(index, slice):
            return slice(*(self._bound(bound) for bound in (index.start, index.stop, index.step)))
        return index

    def _picked(self, part: Any, shape: Sequence[Any]) -> tuple[Any, ...]:
        """A part of an index; the places that a mask of this shape picks, dim for dim, where its values are known."""
        if not isinstance(part, torch.Tensor) or part.dtype is not torch.bool or not part.ndim:
            return (self._indexed(part),)
        known = self._mask(part)
        if known is None or any(size != own for size, own in zip(shape, part.shape, strict=False) if type(size) is int):
            return (part,)
        mask = self._followed(known)
        with no_modes(), without_functions():
            return tuple(places.tolist() for places in mask.nonzero(as_tuple=True))

    def _mask(self, part: torch.Tensor) -> tuple[Any, Looks] | None:
        """The values of a mask of the code's own."""
        known = self.flags.values_of(part)
        if known is None and type(part) in _FROM_OUTSIDE and not self.flags.has(part) and part.numel() <= LARGE_MASK:
            known = part, [(Same(part), None)]
        return known

    def _places(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`mask.nonzero()` as a tensor of numbers, where the mask's values are known; None for everything else."""
        if func not in _NONZERO or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not args[0].ndim:
            return None
        if kwargs.keys() - ({"as_tuple"} if func is not torch.where else ()):
            return None
        if (known := self._mask(args[0])) is None:
            return None
        mask = self._followed(known)
        with no_modes(), without_functions():
            found = mask.nonzero()
            columns, rows, shape = found.T.tolist(), found.tolist(), found.shape
        if func is torch.where or kwargs.get("as_tuple"):
            return tuple(self._numbers(column, args[0]) for column in columns)
        return self._numbers(rows, args[0]).reshape(shape)

    def _numbers(self, numbers: list[Any], like: torch.Tensor) -> torch.Tensor:
        made = torch.tensor(numbers, dtype=torch.int64, device=like.device)
        self.flags.computed(torch.tensor, (numbers,), {"dtype": torch.int64}, made)
        return made

    def _bound(self, bound: Any) -> Any:
        if not isinstance(bound, torch.Tensor):
            return bound
        decided = self.flags.answer(torch.Tensor.__index__, (bound,))
        if decided is None and type(bound) in _FROM_OUTSIDE and not self.flags.has(bound):
            with no_modes(), without_functions():
                decided = int(bound), [(Same(bound), None)]
        return self.stand_ins.given(bound) if decided is None else self._followed(decided)

    def _refuse_gradient(self, tensor: Any, frame: FrameType) -> None:
        """What lies in `.grad` of a tensor from outside is the value of one call; there is none for what needs none."""
        held = self._held((tensor,))
        with no_modes(), without_functions():
            none = not tensor.requires_grad and _has_no_gradient(tensor)
        if none:
            for each in held:
                self.found.looks(each, Question(_has_no_gradient, True))
        elif held and tensor.is_leaf and self.found.refusal is None:
            self.found.refusal = NotYetSupported(
                "the code reads .grad of a tensor", where=source(frame.f_code.co_filename, frame.f_lineno),
                why="what lies there changes with every backward pass, and a graph would hold it for ever",
                fix="pass it as an input, or keep a copy in a buffer",
            )  # fmt: skip

    def _refuse_slice(self, func: Any, frame: FrameType) -> None:
        """What follows from a slice of a parameter, its sizes too, is another thing in each process."""
        if self.found.refusal is None:
            self.found.refusal = NotYetSupported(
                f"the code calls {getattr(func, '__name__', func)} of a parameter that parallelize_module has sliced",
                where=users_line(frame), why="this process has a slice of it, and layers alone are known to add up",
                fix="ask the parameter itself for its shape, size() or numel(); or leave its layer out of the plan",
            )  # fmt: skip

    def _held(self, arguments: Iterable[Any]) -> dict[Same, None]:
        """The tensors that the code holds among the arguments, and those that the others were computed from."""
        found: dict[Same, None] = {}
        for value in arguments:
            if type(value) in _FROM_OUTSIDE:
                found[Same(value)] = None
            if isinstance(value, torch.Tensor):
                found.update(self.made_of.get(value, {}))
            elif isinstance(value, (tuple, list)):
                found.update(self._held(value))
        return found


def _has_no_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is None


_FROM_OUTSIDE = (torch.Tensor, nn.Parameter)
"""What tensors are that no capture has made."""
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_NONZERO = frozenset({torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.where})
_CALLED = (FunctionType, MethodType, functools.partial, nn.Module)
_LOOKS = {
    getattr(torch.Tensor, name)
    for name in (
        "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__complex__",
        "__repr__", "__str__", "__format__", "__dlpack__",
    )
}  # fmt: skip
_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that read the numbers of tensors in a list."""


def _begins(index: Sequence[Any], ndim: int) -> list[int]:
    """The dim of a tensor that each part of an index begins at."""
    taken = [_dims(part) for part in index]
    open_end = next((k for k, part in enumerate(index) if part is ...), len(index))
    return [sum(taken[:k]) if k <= open_end else ndim - sum(taken[k:]) for k in range(len(index))]


def _dims(part: Any) -> int:
    """How many dims of a tensor a part of an index is for."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1
