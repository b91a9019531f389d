"""Inductor asks for the stride of every index along every loop, and has sympy simplify the index at large for it.  Most
indices are sums of products, whose stride is a difference.  In the first call of a clipped step of an LSTM (1,106
questions; two cores of an AMD EPYC) that was 1.1 s of CPU time, and is 0.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import sympy

from psg_fx.torch_private.patching import patched_here

Stride = Callable[[sympy.Expr, sympy.Expr, int | None], sympy.Expr]


@contextlib.contextmanager
def strides_by_difference() -> Iterator[None]:
    """While open, what this thread compiles for a CPU has its strides found so."""
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
