"""What the C library keeps of freed memory once a compiled step runs: enough for the next call, not all."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from support.selection import one_in

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")

PROGRAM = """
import ctypes, resource, sys
import torch
from psg_fx import blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

libc = ctypes.CDLL(None)  # torch's tensors would leave small pieces between the large ones
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def kept(count):
    before = resident()
    pieces = [libc.malloc(16 << 20) for _ in range(count)]
    for piece in pieces:
        libc.memset(piece, 1, 16 << 20)
    for piece in pieces:
        libc.free(piece)
    return resident() - before

print(kept(12))
with blocks.Memory(keep=False).serving(blocks.Places()):  # as around each call
    pass
print(kept(12), kept(60))
"""


def kept(**environment: str) -> list[int]:
    """MiB that a process holds more than before when 192 have been freed in pieces below 32, before a step runs and
    then; and when 960 have been.
    """
    told = {**clean(os.environ), **environment}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=told, capture_output=True, text=True, check=True)
    return [int(number) for number in found.stdout.split()]


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what users may have told glibc."""
    return {k: v for k, v in environment.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}


@pytest.mark.slow
def test_what_a_step_frees_stays() -> None:
    alone, some, more = kept()
    assert alone < 100
    assert some > 150
    assert some + more < 550  # of 960: more than 512 at the top goes back


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    one_in(2, [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"}]),
)
def test_who_has_set_it_is_left_alone(said: dict[str, str]) -> None:
    assert kept(**said)[1] < 100
