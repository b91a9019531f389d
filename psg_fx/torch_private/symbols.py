"""Symbols of export: sizes that follow the batch, numbers that code reads out of tensors; and what is asked of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from torch._export import non_strict_utils
from torch.fx.experimental import sym_node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from psg_fx.source import is_own
from psg_fx.torch_private.patching import patched_here

_MADE_PLAIN = (
    (torch.SymBool, ("__bool__", "__int__")), (torch.SymInt, ("__bool__", "__int__", "__index__")),
    (torch.SymFloat, ("__bool__", "__int__", "__float__")),
)  # fmt: skip
_EXTREMES = {"__sym_max__": max, "__sym_min__": min}


@contextlib.contextmanager
def watching_symbols(
    seen: Callable[[Any, Any, FrameType], None], unlike: Callable[[FrameType], None]
) -> Iterator[None]:
    """Call `seen(expression, result, frame)` whenever code makes a symbolic size or condition a plain one, but for
    those that depend on values; and `unlike(frame)` where torch leaves out what the larger or smaller of two is where
    all symbols are 1, since it knows that they are at least 2.

    These methods have no hook; `frame` is that of the code that asked.
    """
    with contextlib.ExitStack() as patches:
        for kind, names in _MADE_PLAIN:
            for name in names:
                patches.enter_context(patched_here(kind, name, _made_plain(getattr(kind, name), seen)))
        for kind in (torch.SymInt, torch.SymFloat):
            for name, of in _EXTREMES.items():
                patches.enter_context(patched_here(kind, name, _extreme(getattr(kind, name), of, unlike)))
        for name in ("guard_int", "guard_float"):
            patches.enter_context(patched_here(SymNode, name, _made_plain_in_cpp(getattr(SymNode, name), seen)))
        yield


def _made_plain(original: Callable[[Any], Any], seen: Callable[[Any, Any, FrameType], None]) -> Callable[[Any], Any]:
    """A method of symbols that gives a plain number."""

    def read(self: Any) -> Any:
        expression = self.node.expr
        result = original(self)
        if getattr(expression, "free_symbols", None) and self.node.has_hint():
            seen(expression, result, _asking())
        return result

    return read


def _made_plain_in_cpp(original: Callable[..., Any], seen: Callable[[Any, Any, FrameType], None]) -> Callable[..., Any]:
    """What torch's functions in C++ call to have one."""

    def guard(self: Any, file: str, line: int) -> Any:
        result = original(self, file, line)
        asking = sys._getframe(1)
        if getattr(self.expr, "free_symbols", None) and self.has_hint() and not _is_of_symbols(asking):
            seen(self.expr, result, _calling(asking))
        return result

    return guard


def _extreme(
    original: Callable[[Any, Any], Any], of: Callable[..., Any], unlike: Callable[[FrameType], None]
) -> Callable[[Any, Any], Any]:
    """The larger or the smaller of two."""

    def choose(self: Any, other: Any) -> Any:
        result = original(self, other)
        alone = [_at_one(each) for each in (self, other, result)]
        if None not in alone and of(alone[:2]) != alone[2]:
            unlike(_asking())
        return result

    return choose


def _at_one(value: Any) -> Any:
    """A number where all symbols are 1; None where it depends on values."""
    node = getattr(value, "node", None)
    if node is None:
        return value
    found = node.expr.subs(dict.fromkeys(node.expr.free_symbols, 1)) if node.has_hint() else None
    return found if found is not None and found.is_number else None


@contextlib.contextmanager
def answering_symbols(answer: Callable[[Any, FrameType], bool | None]) -> Iterator[None]:
    """Let `answer(expression, frame)` say what a symbolic condition is, where it can (else None): torch would have to
    know its values.
    """
    with _answered(lambda condition: answer(condition.expr, _asking())):
        yield


@contextlib.contextmanager
def rows_for_ops() -> Iterator[None]:
    """While open, torch's own code of an op that asks whether a size that depends on values is zero is told that it is
    not: it gives nothing for nothing, either way.  And such a size is never a number that it cannot be.
    """
    with _answered(_of_sizes):
        yield


def _answered(answer: Callable[[Any], bool | None]) -> contextlib.AbstractContextManager[None]:
    """While open, this says what a symbolic condition is, where it can."""

    def answered(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def ask(self: Any) -> bool:
            found = answer(self.node)
            return original(self) if found is None else found

        return ask

    return patched_here(torch.SymBool, "__bool__", answered(torch.SymBool.__bool__))


_OF_OPS = ("torch._refs", "torch._prims", "torch._decomp", "torch._meta_registrations", "torch._subclasses")
"""Where torch computes the sizes of what ops give."""


def _of_sizes(condition: Any) -> bool | None:
    """What a comparison is that has sizes which depend on values in it, where that is known."""
    expression = condition.expr
    if not isinstance(expression, (sympy.Eq, sympy.Ne)) or not (symbols := free_unbacked_symbols(expression)):
        return None
    if not symbols <= getattr(condition.shape_env, "size_like", set()):
        return None
    of_op = _asking().f_globals.get("__name__", "").startswith(_OF_OPS)
    never = (of_op and 0 in expression.args) or _is_never(expression)
    return isinstance(expression, sympy.Ne) if never else None


def _is_never(expression: Any) -> bool:
    """Whether no size makes both sides equal: it is a whole number, and not negative."""
    difference = sympy.expand(expression.lhs - expression.rhs)
    (symbol,) = expression.free_symbols if len(expression.free_symbols) == 1 else (None,)
    if symbol is None or not (slope := difference.diff(symbol)).is_number:
        return False
    asked = -difference.subs(symbol, 0) / slope
    return not asked.is_integer or bool(asked.is_negative)


def _asking() -> FrameType:
    """The frame that asked, which is none of those here or of the methods of symbols."""
    frame: FrameType = sys._getframe(1)
    while _is_of_symbols(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


_OF_SYMBOLS = (__file__, torch.__file__, sym_node.__file__, non_strict_utils.__file__)
"""Where symbols are computed with; export calls them where code says `max` and `min`."""


def _is_of_symbols(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _OF_SYMBOLS


def _calling(frame: FrameType) -> FrameType:
    """The frame that has called a function of torch's which is written in C++: not those that watch such calls."""
    while frame.f_back is not None and _watches(frame):
        frame = frame.f_back
    return frame


def _watches(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "__torch_function__" or is_own(code.co_filename) or _is_of_symbols(frame)


def size_of_values(size: Any) -> Any:
    """The symbol of a size that depends on values, such as the number of rows that a mask picks; None for others."""
    node = getattr(size, "node", None)
    return node.expr if node is not None and node.expr.is_Symbol and not node.has_hint() else None


def depends_on_values(size: Any) -> bool:
    """Whether a size is computed from one that depends on values."""
    node = getattr(size, "node", None)
    return node is not None and bool(node.expr.free_symbols) and not node.has_hint()


def known_by(fake: torch.Tensor) -> Callable[[Any], Any]:
    """Says a size by the symbols that are left: of inputs whose sizes a capture has found to be one, one is."""
    env = fake.fake_mode.shape_env  # type: ignore[attr-defined]
    return (lambda size: size) if env is None else env.replace


def computed_of(expression: Any, values: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
    """A symbolic condition, of tensors in the places of its symbols; None where it has others, or is not computed."""
    symbols = getattr(expression, "free_symbols", None)
    if not symbols or not symbols <= set(values):
        return None
    try:
        found = sympy_interp(_OfTensors, dict(values), expression)
    except (TypeError, NotImplementedError, AttributeError, KeyError):
        return None
    return found if isinstance(found, torch.Tensor) else None


class _OfTensors(PythonReferenceAnalysis):
    """Python's operators, which are those of tensors, too."""

    @staticmethod
    def constant(c: Any, dtype: torch.dtype) -> Any:
        return bool(c) if c in (sympy.true, sympy.false) else int(c) if dtype is torch.int64 else float(c)

    @staticmethod
    def not_(a: Any) -> Any:
        return a.logical_not()

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else float(x)

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return torch.true_divide(*(v.to(torch.float64) for v in _both(a, b)))

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(*_both(a, b))

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(*_both(a, b))


def make_one(sizes: Sequence[int | torch.SymInt]) -> None:
    """Let sizes that are known to be equal have one symbol.  Torch replaces one by the other where it is asked whether
    these two are equal, and not where that follows from another question (is a + b = 2a?).
    """
    first, *others = [size.node for size in sizes if isinstance(size, torch.SymInt)] or [None]
    for node in others:
        one, other = first.expr, node.expr
        if one != other and one.is_Symbol and other.is_Symbol and first.shape_env.evaluate_expr(sympy.Eq(one, other)):
            first.shape_env._set_replacement(other, one, "both count the samples")


def _both(*values: Any) -> list[torch.Tensor]:
    """Tensors, of one dtype."""
    like = next(v for v in values if isinstance(v, torch.Tensor))
    dtype = torch.float64 if any(_is_float(v) for v in values) else like.dtype
    return [v.to(dtype) if isinstance(v, torch.Tensor) else torch.full_like(like, v, dtype=dtype) for v in values]


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
