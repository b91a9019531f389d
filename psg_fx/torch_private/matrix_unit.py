"""Whether this processor multiplies small matrices of bfloat16 by a unit of its own (AMX, on Intel's Xeons since 2023).

torch asks the system for it (`torch.cpu._init_amx`), as it does before it uses it itself; a process may use it then.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_matrix_unit() -> bool:
    """Whether it is there, the system lets this process use it, and torch may use vectors of 512 bits."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # ATEN_CPU_CAPABILITY may forbid them
        return False
    if not (torch.cpu._is_amx_tile_supported() and _multiplies_bfloat16()):
        return False
    return torch.cpu._init_amx()


def _multiplies_bfloat16() -> bool:
    """As all units so far, but a virtual machine may say otherwise; torch 2.11 does not tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is None or bool(capabilities().get("amx_bf16", False))
