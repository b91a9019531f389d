"""Lines of the user's own code, for errors: whose a file is, and which line made a node."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import traceback
import warnings
from itertools import takewhile
from typing import Any

import torch
import torch.fx

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(\n(?! *File ")[ \t]*(?P<code>[^\n]+))?'
)


TORCH = os.path.join(os.path.dirname(torch.__file__), "")
"""Where the files of torch lie."""

_HERE = os.path.dirname(os.path.abspath(__file__))


_GENERATED = ("<eval_with_key>", "<frozen", "<string>")


_EXAMPLES = tuple(os.path.join(_HERE, name, "") for name in ("zoo", "demo"))


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file is torch's or psg_fx's rather than the user's: by where these lie, not by what they are called."""
    return file.startswith((TORCH, *_GENERATED)) or is_own(file)


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is psg_fx's, but for its examples."""
    return file.startswith(_own_folders()) and not file.startswith(_EXAMPLES)


@functools.cache
def _own_folders() -> tuple[str, ...]:
    passes = importlib.util.find_spec("psg_fx.passes")
    folders = (_HERE, *(passes.submodule_search_locations or () if passes is not None else ()))
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


def provenance(node: torch.fx.Node) -> dict[str, Any]:
    """What a node says of the code that it comes from, for one that is made in its place."""
    return {key: node.meta[key] for key in _PROVENANCE if key in node.meta}


_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom")


def source_line(node: torch.fx.Node) -> str:
    """`model.py:17: x = self.bn(x)`: the innermost line of the user's own code that made `node`, or "".

    Torch records the lines of `forward` methods only.  Without one: the module (`in encoder.0 (Linear)`), or the loss.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [f for f in frames if not is_library(f["file"])]
    if own:
        file, line, code = own[-1]["file"], own[-1]["line"], own[-1]["code"] or ""
        return f"{file.rsplit('/', 1)[-1]}:{line}: {code.strip()}".removesuffix(": ")
    if inside := _module(node):
        return inside
    return "in the loss" if any("self.loss_fn(" in (f["code"] or "") for f in frames) else ""


def _module(node: torch.fx.Node) -> str:
    stack = (node.meta.get("nn_module_stack") or {}).values()
    paths = [entry for entry in stack if isinstance(entry, tuple) and entry[0].startswith("model.")]
    if not paths:
        return ""
    path, kind = paths[-1]
    return f"in {path.removeprefix('model.')} ({getattr(kind, '__name__', str(kind)).rsplit('.', 1)[-1]})"


def warn(message: str) -> None:
    """A warning at the line of the user's code from which torch and psg_fx were reached."""
    frames = traceback.walk_stack(sys._getframe(1))
    between = sum(1 for _ in takewhile(lambda found: is_library(found[0].f_code.co_filename), frames))
    warnings.warn(message, stacklevel=between + 2)


def locate(node: torch.fx.Node, detail: str = "") -> str:
    """The `where` line of an error at `node`: its name, a detail, and the user's source line."""
    parts = [f"%{node.name}" + (f", {detail}" if detail else "")]
    if line := source_line(node):
        parts.append(line)
    return ";  ".join(parts)
