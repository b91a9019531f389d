"""What inductor does again for every op or index that it compiles, done once or without sympy's help.

In the first call of a clipped step of an LSTM (two cores of an AMD EPYC, torch 2.13) strides took 1.1 s of CPU time and
take 0.3; in that of a ResNet18 the rules of dtypes were set up 16,281 times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy

from psg_fx.torch_private.patching import patched_here

Stride = Callable[[sympy.Expr, sympy.Expr, int | None], sympy.Expr]


@contextlib.contextmanager
def without_repetition() -> Iterator[None]:
    """While open, this thread compiles so."""
    with strides_by_difference(), _rules_of_dtypes_once():
        yield


@contextlib.contextmanager
def strides_by_difference() -> Iterator[None]:
    """Inductor asks for the stride of each index along each loop, and has sympy simplify the index at large for it.
    Most indices are sums of products, whose stride is a difference.
    """
    from torch._inductor.codegen import cpp  # slow to import, and only who compiles needs it

    original: Stride = vars(cpp)["stride_at_vec_range"]

    def stride(index: sympy.Expr, var: sympy.Expr, vec_length: int | None = None) -> sympy.Expr:
        found = difference(index, var)
        return original(index, var, vec_length) if found is None else found

    with patched_here(cpp, "stride_at_vec_range", stride):
        yield


def difference(index: sympy.Expr, var: sympy.Expr) -> sympy.Expr | None:
    """index(var + 1) - index(var), where that is the same everywhere; None: not known here."""
    if not isinstance(var, sympy.Symbol) or not all(
        isinstance(part, (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul))
        for part in sympy.preorder_traversal(index)
    ):
        return None
    found = sympy.expand(index.xreplace({var: var + 1}) - index)
    return None if var in found.free_symbols else found


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
