"""`psg_fx::by_onednn`: a product of two matrices of float32 on a CPU by oneDNN, where that is faster than the BLAS.

torch's BLAS on x86-64, MKL, keeps to AVX2 on processors of others than Intel.  One that computes with whole vectors of
AVX-512 (AMD's Zen 5) multiplies twice as fast by oneDNN, one that does not has nothing to gain.
"""

from __future__ import annotations

from psg_fx.ops.products.matrix_product import define_product
from psg_fx.ops.products.trials import is_faster
from psg_fx.torch_private import onednn


def is_worth_it() -> bool:
    """Whether oneDNN multiplies clearly faster than the BLAS.

    With one thread, whatever number is set: it tells how wide vectors are as well as several do, which wait for each
    other where compilers run beside them, and not in both libraries alike.
    """
    return onednn.has_onednn() and is_faster("by_onednn", onednn.product, rows=128, rounds=12, threads=1)


by_onednn = define_product("by_onednn", onednn.product)
"""a[m, k] b[k, n] + bias[n]."""
