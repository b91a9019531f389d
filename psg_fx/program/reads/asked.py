"""What code asks of the world beside its arguments, by the function that it calls: the time, a file; and what
it does to the world, such as to set a seed.
"""

from __future__ import annotations

import os
import random
import time
from types import FrameType
from typing import Any

import torch

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import Origin, origin

RANDOM = "a random number of Python's"
_SEED, _HOOK, _SAVED = "the state of torch's random numbers", "a hook of a node", "hooks on what is saved"
_HOOKED = "a graph has no hooks, and one may change the gradient"
_SAID = {
    RANDOM: (
        f"the code asks for {RANDOM}", "a graph would hold the value of the first call for ever",
        "draw with torch.rand, torch.randn or torch.randint inside the code, or pass the number as an input",
    ),
    _SEED: (
        f"the code sets or asks for {_SEED}", "a graph draws from the generator as it is, and sets no seed",
        "seed before the step is called; numbers that are always the same can be drawn once, when the model is made",
    ),
    _HOOK: (
        "the code puts a hook on a node of autograd", _HOOKED,
        "remove it, or write what it does to the gradient as a custom autograd.Function",
    ),
    _SAVED: (
        "the code puts hooks on the tensors that autograd saves", _HOOKED,
        "leave them out: what is kept for the backward pass is decided in the graph",
    ),
}  # fmt: skip


def changing(asked: str, where: str) -> NotYetSupported:
    """The refusal of a value that is another one at every call, or of what a graph does not do."""
    what, why, fix = _SAID.get(asked) or (
        f"the code asks for {asked}", _SAID[RANDOM][1],
        "ask outside of the model and the loss, and pass what comes as a tensor",
    )  # fmt: skip
    return NotYetSupported(what, where=where, why=why, fix=fix)


_CLOCKS = {getattr(time, name) for name in dir(time) if name.endswith(("time", "time_ns", "counter", "counter_ns"))
           or name.startswith("monotonic")}  # fmt: skip
_ABOUT_FILES = {
    getattr(os, name)
    for name in ("stat", "lstat", "fstat", "statvfs", "access", "listdir", "scandir", "readlink")
    if hasattr(os, name)
}
_PATHS = ("genericpath", "posixpath", "ntpath", "pathlib", "pathlib._local", "glob")
_OF_PATHS = {
    "exists", "lexists", "isfile", "is_file", "isdir", "is_dir", "islink", "is_symlink", "ismount", "is_mount",
    "getsize", "getmtime", "getatime", "getctime", "samefile", "stat", "lstat", "iterdir", "glob", "iglob", "rglob",
}  # fmt: skip


def asked_of(what: Any) -> str:
    """What a built-in function asks of the world beside its arguments, or ""."""
    owner, name = getattr(what, "__self__", None), getattr(what, "__name__", "")
    if isinstance(owner, random.Random):
        return RANDOM if name not in ("seed", "setstate", "getstate") else ""
    try:
        if what in _CLOCKS:
            return "the time"
        if what in _ABOUT_FILES:
            return "a file"
    except TypeError:  # a method of something that cannot be hashed
        return ""
    if name in ("now", "utcnow", "today") and isinstance(owner, type) and owner.__module__ == "datetime":
        return "the time"
    if isinstance(owner, torch.Generator):
        return _SEED
    if name in ("register_hook", "register_prehook") and not isinstance(owner, torch.Tensor):
        return _HOOK
    if name == "open" and getattr(what, "__module__", "") in ("io", "_io"):
        return "a file"
    return "an input" if what is input else RANDOM if name == "urandom" else ""


def asked_of_python(frame: FrameType) -> str:
    """The same for functions of the standard library and of torch that are written in Python."""
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
    if module == "uuid":  # by which packages name things
        return "a new identifier" if name not in ("__init__", "__str__", "__eq__", "__hash__") else ""
    if module in ("random", "secrets"):
        return RANDOM if name not in ("seed", "__init__", "getstate", "setstate") else ""
    if module == "os" and name in ("getenv", "__getitem__"):
        return "the environment"
    if module == "pathlib" and name in ("open", "read_text", "read_bytes"):
        return "a file"
    if module in _PATHS and name in _OF_PATHS and frame.f_back is not None and not hands_on(frame.f_back):
        return "a file"  # and no log that looks for its own
    if name in ("load", "loadtxt", "genfromtxt") and (module == "torch.serialization" or "npyio" in str(module)):
        return "a file"
    if module == "torch.random":
        return _SEED
    if module == "torch.autograd.graph" and name == "__enter__":
        kind = type(frame.f_locals.get("self"))
        plain = kind is torch.autograd.graph.saved_tensors_hooks or not kind.__module__.startswith("torch.")
        return _SAVED if plain and issubclass(kind, torch.autograd.graph.saved_tensors_hooks) else ""
    return ""


def hands_on(frame: FrameType) -> bool:
    """Whether a function is called by one of the standard library, or by a decorator of torch, for somebody else."""
    name = str(frame.f_globals.get("__name__"))
    standard = origin(frame.f_code.co_filename) is Origin.STANDARD and not name.startswith(_CALCULATING)
    return standard or name in _DECORATORS


_CALCULATING = ("sympy", "mpmath")
"""What draws numbers for itself, and has the same results."""
_DECORATORS = ("torch._compile", "torch._dynamo.eval_frame")
