"""A lowered graph becomes a file: exported with a dynamic batch, compiled ahead of time, tried, and put in place."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from psg_fx.errors import BadArgument, PsgError
from psg_fx.graph import facts
from psg_fx.ops.define import of_torch_alone
from psg_fx.passes.compile.compile import CPU_OPTIONS
from psg_fx.passes.compile.prepared import written_out
from psg_fx.saved.refusals import OWN, check_of_torch_alone, not_exported
from psg_fx.saved.spec import Spec, is_passed, names_of_sizes
from psg_fx.saved.trial import coarsest, try_out
from psg_fx.tensors import HALF
from psg_fx.torch_private.export import own_builtins
from psg_fx.torch_private.packages import compiled_files, load_compiled, pack
from psg_fx.torch_private.quiet import quiet
from psg_fx.torch_private.tracer import traced_quickly

SPEC = "psg_fx.json"
_MOST_SAMPLES = 2**20


class Lowered(nn.Module):
    """(passed inputs..) -> results: the graph with what code and loss hold filled in."""

    _run: GraphModule

    def __init__(self, gm: GraphModule, held: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "_run", _of_torch_alone(written_out(gm)))  # its modules are none of the file's
        self._places = sorted(held)
        shapes = [facts.shape(node.meta["val"]) for node in facts.placeholders(gm)]
        self._ones = [next((dim for dim, size in enumerate(shape) if size == 1), None) for shape in shapes]
        for place, tensor in held.items():
            self.register_buffer(f"held_{place}", tensor.detach().clone(memory_format=torch.contiguous_format))

    def forward(self, *passed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All results, in the order of the graph."""
        rest = iter(passed)
        values = [
            getattr(self, f"held_{i}") if i in self._places else _laid_out(next(rest), one)
            for i, one in enumerate(self._ones)
        ]
        return tuple(value for value in self._run(*values) if value is not None)


def _laid_out(value: torch.Tensor, one: int | None) -> torch.Tensor:
    """The value with the strides that a contiguous tensor has when it is new.  one: a dim of one element, if there is
    one: contiguous tensors have any strides there, and kernels of torch that compiled code calls take them for a memory
    format (an image of one channel for channels-last), and lay their results out otherwise than was compiled for.

    A flip of such a dim changes nothing, and is a copy that inductor leaves in place, where a kernel reads it.
    """
    return value if one is None or value.ndim < _OF_A_FORMAT else value.flip([one])


_OF_A_FORMAT = 3
"""Dims of a tensor that kernels ask for its memory format, at least: sequences are convolved as images of one row."""


def _of_torch_alone(gm: GraphModule) -> GraphModule:
    """Ops of psg_fx are traced into torch's own: the functions that compute them are called instead."""
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace in OWN:
            node.target = of_torch_alone(node.target)
    gm.recompile()
    return gm


def write(path: str | os.PathLike[str], gm: GraphModule, spec: Spec, arguments: Sequence[torch.Tensor]) -> Path:
    """Write the file, or leave what is there: it is put in place when it has given, for these arguments and for others,
    what the graph gives.

    arguments: of all inputs of the graph.  Raises NotYetSupported, or InternalError where the file is wrong.
    """
    target = Path(path)
    nodes = facts.placeholders(gm)
    passes = [is_passed(facts.input_spec(node)) for node in nodes]
    held = {i: a for i, (a, passed) in enumerate(zip(arguments, passes, strict=True)) if not passed}
    lowered = Lowered(gm, held)
    given = [(n, a.detach().contiguous()) for n, a, passed in zip(nodes, arguments, passes, strict=True) if passed]
    with _beside(target) as folder:
        draft = str(Path(folder) / "step.pt2")
        try:
            with quiet(), torch.no_grad():
                program = _exported(gm, lowered, [node for node, _ in given])
                check_of_torch_alone(program.graph)
                pack(draft, program, compiled_files(program, _options(gm, spec)), {SPEC: spec.to_json()})
                runner = load_compiled(draft)
        except PsgError:
            raise
        except Exception as error:
            raise not_exported(error) from error
        try_out(gm, lowered, runner, given)
        os.replace(draft, target)
    return target


def _beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for a while, from which a file can be put in its place at once."""
    try:
        return tempfile.TemporaryDirectory(dir=target.parent, prefix=".psg_fx-")
    except OSError as error:
        raise BadArgument(
            f"path={str(target)!r} is no place for a package", where="step.export(path, inputs, targets)",
            why=f"{target.parent} cannot be written: {error}", fix="pass a path in a folder that can be written",
        ) from error  # fmt: skip


def _options(gm: GraphModule, spec: Spec) -> dict[str, Any]:
    """Half precision is rounded to where the graph does, as it is when it runs op by op: rounded elsewhere, a value
    near zero changes its sign before a ReLU, and whole gradients differ, so that a trial could not tell rounding from
    an error.
    """
    own = dict(CPU_OPTIONS) if spec.device == "cpu" else {}
    half = any(dtype in HALF for dtype in coarsest(gm).values())
    return own | {"emulate_precision_casts": True} if half else own


def _exported(gm: GraphModule, lowered: Lowered, nodes: Sequence[Node]) -> ExportedProgram:
    """The graph as a program for any number of samples, and of rows along each axis."""
    known = facts.graph_facts(gm)
    symbols = (known.batch, *known.rows)
    names = zip(symbols, names_of_sizes(len(known.rows)), strict=True)
    dims = {s: Dim(name, min=1, max=_MOST_SAMPLES) for s, name in names}
    shapes = [facts.shape(node.meta["val"]) for node in nodes]
    dynamic = [
        {dim: _written(size, dims) for dim, size in enumerate(shape) if size.free_symbols} or None for shape in shapes
    ]
    example_sizes = _sizes_of_their_own(symbols, [s for shape in shapes for s in shape if not s.free_symbols])
    example = [
        torch.zeros([int(s.subs(example_sizes)) for s in shape], dtype=n.meta["val"].dtype,
                    device=n.meta["val"].device)
        for n, shape in zip(nodes, shapes, strict=True)
    ]  # fmt: skip
    with own_builtins(), traced_quickly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # of torch, up to 2.11
        return torch.export.export(lowered, tuple(example), dynamic_shapes=(tuple(dynamic),), strict=False)


def _written(size: sympy.Expr, dims: Mapping[sympy.Symbol, Any]) -> Any:
    """a·n + b of a symbol n, as torch.export writes it."""
    (symbol,) = size.free_symbols
    factor, more = int(size.coeff(symbol)), int(size.subs(symbol, 0))
    found = dims[symbol] if factor == 1 else factor * dims[symbol]
    return found + more if more else found


def _sizes_of_their_own(symbols: Sequence[sympy.Symbol], sizes: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Numbers of samples and of rows that no other size equals."""
    free = (size for size in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61) if size not in sizes)
    return dict(zip(symbols, free, strict=False))
