"""torch.export, with what it would lose put back or refused, and its remarks kept from the user.

Export runs the code on fake tensors (`strict=False`).  Gradient-free regions (`torch.no_grad`) become detached values;
custom backward functions are refused, because export follows their forward only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from psg_fx.errors import CaptureFailed, NotYetSupported, PsgError
from psg_fx.torch_private import rnn_decompositions

from .losses import loss_decompositions

aten = torch.ops.aten


def functional_export(
    program: nn.Module, examples: Sequence[torch.Tensor], dynamic: list[dict[int, Any]]
) -> ExportedProgram:
    """`program(examples)` as functional ATen, differentiable, losses and recurrent layers written out."""
    with torch.enable_grad(), _refuse_custom_backward(), _quiet():
        exported = _export(program, examples, dynamic)
        detach_no_grad_regions(exported.graph_module)
        functional: ExportedProgram = exported.run_decompositions(rnn_decompositions() | loss_decompositions())
    return functional


def _export(program: nn.Module, examples: Sequence[torch.Tensor], dynamic: list[dict[int, Any]]) -> ExportedProgram:
    try:
        return torch.export.export(program, (list(examples),), dynamic_shapes=(dynamic,), strict=False)
    except PsgError:
        raise
    except Exception as error:
        raise capture_failed(error) from error


def capture_failed(error: Exception) -> CaptureFailed:
    """Export's failure in plain words, with the user's line."""
    text = str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user(f.filename)]
    where = (
        f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}: {frames[-1].line}"
        if frames
        else "the model or loss"
    )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        why = "the code branches on values of a tensor, so there is no one graph for all batches"
        fix = "replace the branch by torch.where, or decide it outside the model"
    elif "is invalid for input of size" in text or (
        "batch" in text and ("constant" in text or "specializ" in text or "Constraints violated" in text)
    ):
        why = "the code ties the batch size to a fixed number: " + first
        fix = "take sizes from the input (x.shape[0], -1) where the code has a number"
    else:
        why = f"{type(error).__name__}: {first}"
        fix = "make the forward pass and loss run under torch.export.export(strict=False)"
    return CaptureFailed("the model and loss could not be captured as one graph", where=where, why=why, fix=fix)


def _is_user(filename: str) -> bool:
    return not any(part in filename for part in ("/torch/", "/psg_fx/", "/passes/", "<eval_with_key>", "<frozen"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export's own remarks from the user: a failed export prints its graph, and recurrent layers make it warn of
    attributes that it restores.  What the model itself writes to stderr is kept, unless export fails.
    """
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, written = shapes.level, io.StringIO()
    shapes.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(written):
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
            yield
        sys.stderr.write(written.getvalue())
    finally:
        shapes.setLevel(level)


@contextlib.contextmanager
def _refuse_custom_backward() -> Iterator[None]:
    """Refuse custom autograd functions: export follows their forward and would silently drop their backward."""
    function = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] == "torch":
            return original.__get__(None, cls)(*args, **kwargs)
        raise NotYetSupported(
            f"{cls.__name__} has a backward of its own", where=f"{cls.__module__}.{cls.__qualname__}.apply",
            why="a captured graph holds what its forward computes, not its custom backward: gradients would be wrong",
            fix="write the function with ordinary differentiable ops",
        )  # fmt: skip

    function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        function.apply = original  # type: ignore[method-assign]


def detach_no_grad_regions(gm: GraphModule) -> None:
    """`with torch.no_grad():` regions arrive as sub-graphs that decomposition inlines.  Detach what leaves them, so
    that differentiation stops there as the user asked.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or "set_grad_enabled" not in str(node.target):
            continue
        enabled, region = node.args[0], getattr(gm, node.args[1].target)
        detach_no_grad_regions(region)
        if enabled:
            continue
        output = region.graph.output_node()
        with region.graph.inserting_before(output):
            values = pytree.tree_map_only(torch.fx.Node, partial(_detached, region.graph), output.args[0])
        output.args = (values,)
        region.recompile()


def _detached(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    if not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    node = graph.call_function(aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node
