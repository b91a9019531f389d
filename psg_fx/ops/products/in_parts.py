"""`psg_fx::in_parts`: a product of two matrices of float32 on a CPU by a unit that multiplies numbers of bfloat16.

A number of float32 has 24 bits, one of bfloat16 has 8, so the first is the sum of three of the second, its parts.  Of
the nine products of the parts of two numbers the six larger ones are added up, in float32; the others are at most 2^-23
of the product, and mostly less than a sixteenth of that (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial
Intelligence Datatype For Higher-Precision Computations, ARITH 2019).  The unit rounds sums over places less often
than vectors do, so errors are smaller than the BLAS's (docs/design/rounding.md).  Intel's AMX multiplies bfloat16 at
sixteen times the rate at which vectors multiply float32.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from psg_fx.ops.products.matrix_product import by_torch, define_product
from psg_fx.ops.products.trials import is_faster
from psg_fx.torch_private.compiler import allocated
from psg_fx.torch_private.matrix_unit import has_matrix_unit
from psg_fx.torch_private.native import finished, library, passed, source, threads

LIBRARY = "in_parts"


def _in_parts(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    compiled = library(LIBRARY) if a.device.type == "cpu" and has_matrix_unit() else None
    (m, k), n = a.shape, b.shape[1]
    if compiled is None or 0 in (m, k, n):
        return by_torch(a, b, bias)
    product = allocated((m, n), (n, 1), a.dtype)
    strides = (ctypes.c_int64 * 4)(*a.stride(), *b.stride())
    usual = compiled.in_parts(*map(passed, (a, b, bias, product, m, k, n)), strides, threads())
    # Parts of what is not finite, or rounded to it, are not numbers; those of what is tiny are taken for zero.
    return product if usual else by_torch(a, b, bias)


def is_worth_it() -> bool:
    """Whether a unit multiplies clearly faster than the BLAS, which vectors do.

    With all threads, and longer than oneDNN is tried: two of a virtual machine's processors may be one core that has
    one unit, now and then or always, and nothing in the system says so.
    """
    if not has_matrix_unit() or finished(LIBRARY) is None:
        return False
    code, set_now = source(LIBRARY), torch.get_num_threads()
    return is_faster(LIBRARY, _without_bias, rows=512, rounds=40, threads=set_now, code=code)


def _without_bias(a: Tensor, b: Tensor) -> Tensor:
    return _in_parts(a, b, None)


in_parts = define_product("in_parts", _in_parts, LIBRARY)
"""a[m, k] b[k, n] + bias[n]."""
