"""Small buffers that code decides by: `if self.initialised:`, `for _ in range(self.steps)`, `self.sizes.tolist()`,
`x[:, self.mask]`.

A captured graph has no values, but a model's own buffers have some, and the branch that they lead to is the model's as
long as the answer is the same: which the guard asks at every call, as it does of all values that Python has looked at.
So such questions are answered by what the buffer holds, until the code writes into one.  Numbers that are computed with
(`.item()` of an integer; of bool and uint8 it is a switch) stay in the graph, where they may be others at each call.
Tensors that the code makes of numbers (`torch.tensor([0, 2])`, `torch.arange(4) != 2`) have these for good.  Floats
decide as they are, or compared (`(self.times[1:] > self.times[:-1]).all()`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from psg_fx.program.decisions.draws import Draws
from psg_fx.program.decisions.questions import Question
from psg_fx.program.stand_ins import StandIns
from psg_fx.program.values import Same
from psg_fx.tensors import SYMBOLS
from psg_fx.torch_private.modes import is_transformed, no_modes, without_functions

_SMALL = 64
LARGE_MASK = 4096
"""Numbers of a mask that picks columns: an image's, say."""
_MOST_STEPS = 32
"""Of a question that is asked at every call."""
_SWITCHES = (torch.bool, torch.uint8)
_WHOLE = (*_SWITCHES, torch.int8, torch.int16, torch.int32, torch.int64)


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    found = [(owner, name) for owner in owners or (torch.Tensor,) for name in names.split()]
    return frozenset(getattr(owner, name) for owner, name in found if hasattr(owner, name))


_OF_FLOATS = _functions("__bool__ tolist equal allclose") | {torch.equal, torch.allclose}
"""Questions that are answered by floats, too."""
_DECIDING = _functions("__bool__ __index__ tolist __format__ __repr__") | _OF_FLOATS
_READING = _functions("item __int__ __float__")
_COMPUTING = _functions(
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __floordiv__ __rsub__ __rdiv__ __neg__ __and__ __or__ __xor__ __invert__"
) | _functions("__getitem__ to double float long int bool") | _functions(
    "eq ne lt le gt ge logical_not logical_and logical_or any all sum max min add sub mul div remainder neg abs ceil "
    "floor round diff flip cumsum cat stack unbind split chunk clone reshape unsqueeze squeeze tril triu roll rot90 "
    "view transpose t permute movedim swapaxes flatten expand repeat repeat_interleave tile diagonal select narrow "
    "where clamp square pow prod amax amin minimum maximum floor_divide fmod logical_xor isin masked_fill broadcast_to "
    "hstack vstack outer meshgrid cartesian_prod combinations isclose new_tensor "
    "sign sqrt exp log softplus", torch.Tensor, torch, torch.nn.functional,
)  # fmt: skip
"""What is computed of such buffers to decide by; nothing that writes, or draws."""

_MAKING = frozenset({
    torch.tensor, torch.arange, torch.linspace, torch.zeros, torch.ones, torch.full, torch.eye, torch.tril_indices,
    torch.triu_indices,
})  # fmt: skip
"""What makes tensors of numbers that the code has."""

IN_BULK = "_foreach_"
"""Functions that write into many tensors at once, and do not count it."""

Looks = list[tuple[Same, Question | None]]
"""What an answer follows from: tensors, and what was asked of each (None: all that it holds)."""


@dataclass(frozen=True)
class _Known:
    """The values of a tensor.  buffers: those that they follow from.  of: the same, of other values of the only one;
    it takes so many steps.
    """

    value: torch.Tensor
    buffers: frozenset[Same]
    of: Callable[[torch.Tensor], torch.Tensor]
    steps: int


class Flags:
    """What is known of small buffers, and of what is computed from them alone."""

    def __init__(self, stand_ins: StandIns) -> None:
        buffers = [(own, other) for own, other in stand_ins.pairs() if not own.requires_grad]
        small = [(own, other) for own, other in buffers if own.numel() <= LARGE_MASK]
        self._own = {id(own): own for own, _ in small}
        self._others = [(_memory(own), other) for own, other in buffers]
        self._versions = self._versions_now()
        self._made = WeakIdKeyDictionary()
        self._draws = Draws()
        self._numbers: dict[Any, torch.Tensor] = {}
        self._in_bulk = False

    def answer(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Any, Looks] | None:
        """What a question to one of them has for an answer, and what it follows from; None for others."""
        if func not in _DECIDING and func not in _READING:
            return None
        if not args or (found := self._filled((tuple(args), kwargs or {}))) is None:
            return None
        kinds = _SWITCHES if func in _READING else _WHOLE
        if func not in _OF_FLOATS and args[0].dtype not in kinds and (found.buffers or func not in _READING):
            return None
        with no_modes(), without_functions():
            answer = _called(func, found.tree)
        return answer, _looks(found, lambda buffer: _called(func, found.of(buffer)), answer)

    def read(self, func: Any, args: Sequence[Any], number: Any) -> None:
        """A number has been read out of a tensor, and computes on as this symbol."""
        if func in _READING and isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
            self._numbers[number.node.expr] = args[0]

    def decides(self, condition: Any) -> tuple[bool, Looks] | None:
        """What a condition on such numbers is, and what it follows from; None for others."""
        symbols = getattr(condition, "free_symbols", None)
        if not symbols or not symbols <= self._numbers.keys():
            return None
        found = self._filled(tuple(self._numbers[symbol] for symbol in symbols))
        if found is None or not found.buffers:
            return None

        def holds(values: Sequence[torch.Tensor]) -> bool:
            return bool(condition.xreplace({s: int(v) for s, v in zip(symbols, values, strict=True)}))

        with no_modes(), without_functions():
            answer = holds(found.tree)
        return answer, _looks(found, lambda buffer: holds(found.of(buffer)), answer)

    def values_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Looks] | None:
        """What is known of one that decides, and what it follows from; None for others."""
        known = self._known(tensor)
        return None if known is None else (known.value, _looks(known, known.of, known.value))

    def is_from_outside(self, tensor: Any) -> bool:
        """Whether it is a small tensor of the code's own that is no buffer; what writes into such a one is refused."""
        if type(tensor) is not torch.Tensor or is_transformed(tensor):
            return False
        with without_functions():
            has_values = not tensor.is_meta and tensor.layout is torch.strided and not tensor.requires_grad
            return has_values and tensor.numel() <= _SMALL

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the buffers."""
        return id(tensor) in self._own

    def computed(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """A function has been called on these, and has returned this."""
        self._in_bulk = self._in_bulk or IN_BULK in getattr(func, "__name__", "")
        if self._draws.drawn(func, result):
            return
        if (outcome := self._draws.outcome(func, args)) is not None:
            if not _follows_the_batch(tuple(result.shape)) and result.numel() <= _SMALL:
                with no_modes(), without_functions():
                    self._note(result, torch.full(result.shape, outcome))
            return
        if func not in _MAKING and (func not in _COMPUTING or not self._may_know(args)):
            return
        if "out" in kwargs:
            return  # it writes
        if _follows_the_batch((args, kwargs)):
            return
        if func in _MAKING and result.numel() > (LARGE_MASK if result.dtype in _WHOLE else _SMALL):
            return
        named = {name: value for name, value in kwargs.items() if name != "device"}
        if (found := self._filled((args, named))) is None:
            return
        with no_modes(), without_functions(), torch.no_grad():
            for i, (made, value) in enumerate(zip(_each(result), _each(_called(func, found.tree)), strict=True)):
                of = functools.partial(_part, func, found.of, i)
                self._made[made] = made._version, _Known(value.clone(), found.buffers, of, found.steps + 1)

    def _may_know(self, args: Any) -> bool:
        return bool(self._own or self._made or any(map(self.is_from_outside, args)))

    def writing(self, func: Any, args: Sequence[Any]) -> Callable[[], None] | None:
        """What notes that values which are known have been written into a tensor that the code has made, `t[-1] = x`;
        None for all other calls.
        """
        if func is not torch.Tensor.__setitem__ or not isinstance(args[0], torch.Tensor) or args[0] not in self._made:
            return None
        if _follows_the_batch(args) or (found := self._filled(tuple(args))) is None or found.buffers:
            return None
        with no_modes(), without_functions(), torch.no_grad():
            target, index, value = found.tree
            target = target.clone()
            target[index] = value

        return lambda: self._note(args[0], target, found.steps)

    def _note(self, made: torch.Tensor, value: torch.Tensor, steps: int = 0) -> None:
        """A tensor that the code has made has this value, whatever buffers hold."""
        self._made[made] = made._version, _Known(value, frozenset(), functools.partial(_itself, value), steps)

    def _filled(self, tree: Any) -> _Filled | None:
        """A tree with the values of its tensors; None if one is not known."""
        leaves, spec = pytree.tree_flatten(tree)
        known: list[_Known | None] = []
        for leaf in leaves:
            known.append(self._known(leaf) if isinstance(leaf, torch.Tensor) else None)
            if known[-1] is None and isinstance(leaf, torch.Tensor):
                return None

        def filled(value: Callable[[_Known], torch.Tensor]) -> Any:
            pairs = zip(leaves, known, strict=True)
            return pytree.tree_unflatten([leaf if k is None else value(k) for leaf, k in pairs], spec)

        tensors = [k for k in known if k is not None]
        buffers, steps = frozenset[Same]().union(*(k.buffers for k in tensors)), sum(k.steps for k in tensors)
        return _Filled(filled(lambda k: k.value), buffers, lambda buffer: filled(lambda k: k.of(buffer)), steps)

    def _known(self, tensor: torch.Tensor) -> _Known | None:
        is_own = id(tensor) in self._own or self.is_from_outside(tensor)
        if not is_own and tensor not in self._made:
            return None
        version, known = 0, _Known(tensor, frozenset([Same(tensor)]), lambda buffer: buffer, 0)
        if not is_own:
            version, known = self._made[tensor]
        if self._in_bulk or not self._written().isdisjoint(_memory(buffer.thing) for buffer in known.buffers):
            return None  # the code has written into such a buffer
        with without_functions():
            return known if is_own or version == tensor._version else None  # nor into this one

    def _written(self) -> set[Any]:
        """Where the buffers lie that the code has written into."""
        pairs = zip(self._others, self._versions, self._versions_now(), strict=True)
        return {memory for (memory, _), before, now in pairs if before != now}

    def _versions_now(self) -> list[int]:
        with without_functions():
            return [other._version for _, other in self._others]


def _memory(tensor: torch.Tensor) -> Any:
    """Where a tensor lies: several may share it."""
    with no_modes(), without_functions():
        strided = tensor.layout is torch.strided
        return tensor.device, tensor.untyped_storage().data_ptr() if strided else id(tensor)


@dataclass(frozen=True)
class _Filled:
    """Arguments with their values, as `_Known` is a tensor's."""

    tree: Any
    buffers: frozenset[Same]
    of: Callable[[torch.Tensor], Any]
    steps: int


def _looks(found: _Known | _Filled, ask: Callable[[torch.Tensor], Any], answer: Any) -> Looks:
    question = Question(ask, answer) if len(found.buffers) == 1 and found.steps <= _MOST_STEPS else None
    return [(buffer, question) for buffer in found.buffers]


def _follows_the_batch(arguments: Any) -> bool:
    """Whether sizes are among them that follow the batch."""
    leaves = pytree.tree_leaves(arguments)
    numbers = (bound for v in leaves for bound in ((v.start, v.stop, v.step) if isinstance(v, slice) else (v,)))
    return any(isinstance(v, SYMBOLS) for v in numbers)


def _itself(value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return value


def _part(func: Any, arguments: Callable[[torch.Tensor], Any], index: int, buffer: torch.Tensor) -> torch.Tensor:
    return _each(_called(func, arguments(buffer)))[index]


def _called(func: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    return func(*args, **kwargs)


def _each(result: Any) -> Sequence[torch.Tensor]:
    found: Sequence[torch.Tensor] = result if isinstance(result, (tuple, list)) else (result,)
    return found
