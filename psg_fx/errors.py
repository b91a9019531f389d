"""Every refusal of psg_fx: what is wrong, where, why, and the way out.

Three kinds: *never* (per-sample gradients do not exist), *not yet* (they exist, psg_fx cannot compute them), and
*our bug*.  The first two are `ValueError`s.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re

import torch
import torch.fx


class PsgError(Exception):
    """Base of all errors of psg_fx.  Its text always has the lines `where`, `why` and `fix`."""

    def __init__(self, what: str, *, where: str, why: str, fix: str) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(f"{what}\n  where  {where}\n  why    {why}\n  fix    {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.why, self.fix))


def _rebuild(kind: type[PsgError], what: str, where: str, why: str, fix: str) -> PsgError:
    return kind(what, where=where, why=why, fix=fix)


class SamplesMixed(PsgError, ValueError):
    """Never: a sample's loss depends on other samples, so per-sample gradients do not exist."""


class NotYetSupported(PsgError, ValueError):
    """Not yet: per-sample gradients exist here, but psg_fx cannot compute them exactly."""


class CaptureFailed(PsgError, ValueError):
    """The model and loss could not be captured as one graph."""


class BadArgument(PsgError, ValueError):
    """An argument of the public interface does not mean anything: unknown name, wrong shape, wrong kind."""


class InternalError(PsgError, RuntimeError):
    """Our bug: a pass left a graph that its stage does not allow."""


_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(\n(?! *File ")[ \t]*(?P<code>[^\n]+))?'
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__))
_GENERATED = ("<eval_with_key>", "<frozen", "<string>")
_EXAMPLES = tuple(os.path.join(_HERE, name, "") for name in ("zoo", "demo"))


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file is torch's or psg_fx's rather than the user's: by where these lie, not by what they are called."""
    if file.startswith((_TORCH, *_GENERATED)):
        return True
    return file.startswith(_own_folders()) and not file.startswith(_EXAMPLES)


@functools.cache
def _own_folders() -> tuple[str, ...]:
    passes = importlib.util.find_spec("psg_fx.passes")
    folders = (_HERE, *(passes.submodule_search_locations or () if passes is not None else ()))
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


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


def locate(node: torch.fx.Node, detail: str = "") -> str:
    """The `where` line of an error at `node`: its name, a detail, and the user's source line."""
    parts = [f"%{node.name}" + (f", {detail}" if detail else "")]
    if line := source_line(node):
        parts.append(line)
    return ";  ".join(parts)
