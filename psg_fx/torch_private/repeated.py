"""What inductor does again for every op or index that it compiles, done once or without sympy's help.

In the first call of a clipped step of an LSTM (two cores of an AMD EPYC, torch 2.13) strides took 1.1 s of CPU time and
take 0.3; in that of a ResNet18 the rules of dtypes were set up 16,281 times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from psg_fx.torch_private.patching import patched_here, seen_here

Stride = Callable[[sympy.Expr, sympy.Expr, int | None], sympy.Expr]


@contextlib.contextmanager
def without_repetition() -> Iterator[None]:
    """While open, this thread compiles so."""
    with strides_by_difference(), _rules_of_dtypes_once():
        yield


@contextlib.contextmanager
def strides_by_difference() -> Iterator[None]:
    """Inductor asks for the stride of each index along each loop, and has sympy simplify the index at large for it,
    which loads the units of physics, too.  Most indices are sums of products, whose stride is a difference.
    """
    from torch._inductor.codegen import cpp  # slow to import, and only who compiles needs it

    original: Stride = seen_here(cpp, "stride_at_vec_range")

    def stride(index: sympy.Expr, var: sympy.Expr, vec_length: int | None = None) -> sympy.Expr:
        found = difference(index, var, vec_length)
        return original(index, var, vec_length) if found is None else found

    with patched_here(cpp, "stride_at_vec_range", stride):
        yield


def difference(index: sympy.Expr, var: sympy.Expr, width: int | None = None) -> sympy.Expr | None:
    """index(var + 1) - index(var), where that is the same everywhere; None: not known here.

    width: `var` counts from a multiple of it, and takes as many values.
    """
    if not isinstance(var, sympy.Symbol):
        return None
    parts = index.atoms(FloorDiv, ModularIndexing)
    fixed = {part: sympy.Dummy() for part in parts if var not in part.free_symbols}
    moving = {part: _within(part, var, width) for part in parts if part not in fixed}
    index = index.xreplace(fixed | {part: as_far for part, as_far in moving.items() if as_far is not None})
    if not all(
        isinstance(part, (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul))
        for part in sympy.preorder_traversal(index)
    ):
        return None
    found = sympy.expand(index.xreplace({var: var + 1}) - index)
    found = found.xreplace({symbol: part for part, symbol in fixed.items()})
    return None if var in found.free_symbols or found.atoms(sympy.Dummy) else found


def _within(part: sympy.Expr, var: sympy.Symbol, width: int | None) -> sympy.Expr | None:
    """A quotient or rest of `var` while that does not pass a multiple of `width`, up to what stays the same."""
    of, *others = part.args
    if width is None or of != var or not all(isinstance(number, sympy.Integer) for number in others):
        return None
    divisor, modulus = others[0], others[1] if isinstance(part, ModularIndexing) else None
    if divisor % width == 0:
        return sympy.Dummy()
    return var + sympy.Dummy() if divisor == 1 and modulus is not None and modulus % width == 0 else None


@contextlib.contextmanager
def _rules_of_dtypes_once() -> Iterator[None]:
    """The one object that knows which dtype each op gives collects its rules whenever it is asked for (before 2.15)."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Rules

    original: Any = Rules.__init__
    collected: list[Any] = []

    def once(self: Any) -> None:
        if not collected:
            original(self)
            collected.append(self)

    with patched_here(Rules, "__init__", once):
        yield
