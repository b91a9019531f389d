"""A file is tried before it is put in place: what it gives is held against what the graph gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import InternalError
from psg_fx.graph import facts
from psg_fx.graph.facts import OutputSpec
from psg_fx.torch_private.packages import Runner

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_OF_HALF = 5e-2

Run = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Result:
    """One result of the graph.  dtype: the coarsest that it is computed in."""

    spec: OutputSpec
    dtype: torch.dtype


def try_out(gm: GraphModule, run: Run, runner: Runner, given: Sequence[tuple[Node, torch.Tensor]]) -> None:
    """Compare the file with the graph, on these arguments and on others: on their first sample, or where samples are
    rows, on all rows twice.

    run: the graph.  runner: the file.  Raises InternalError.
    """
    dtypes = coarsest(gm)
    results = [_Result(spec, dtypes[node]) for spec, node in facts.returned(gm) if node is not None]
    for other in (False, True):
        values = [_other(gm, node, value) if other else value for node, value in given]
        with torch.no_grad():
            expected, found = run(*values), runner(*values)
        _compare(results, found, expected, f"{'a part or more of ' * other}this batch")


def _compare(
    results: Sequence[_Result], found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tried: str
) -> None:
    largest: dict[str, float] = {}
    for result, value in zip(results, expected, strict=True):
        if facts.is_differentiable(value):
            largest[result.spec.label] = max(largest.get(result.spec.label, 0.0), _largest(value))
    for index, (result, a, b) in enumerate(zip(results, found, expected, strict=True)):
        spec = result.spec
        if not _close(a, b, result.dtype, largest.get(spec.label, 0.0), max(largest.values(), default=0.0)):
            raise InternalError(
                f"the file computes something else than the step, in output {index}, {spec.label} {spec.name}".rstrip(),
                where="step.export(path, inputs, targets)",
                why=f"it was tried on {tried}, and nothing was written{_difference(a, b)}",
                fix="please report this as a bug",
            )  # fmt: skip


def coarsest(gm: GraphModule) -> dict[Node, torch.dtype]:
    """For each value the coarsest dtype of those it is computed in, on the way from the inputs, which are as they are:
    what is compiled sums in another order than a graph that is run op by op, and then rounds to these.
    """
    found: dict[Node, torch.dtype] = {}
    for node in gm.graph.nodes:
        values = [] if node.op == "placeholder" else list(facts.tensors(node.meta.get("val")))
        dtypes = [value.dtype for value in values if facts.is_differentiable(value)]
        dtypes += [found[source] for source in node.all_input_nodes]
        found[node] = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    return found


def _other(gm: GraphModule, node: Node, value: torch.Tensor) -> torch.Tensor:
    """An argument for the first sample alone; or with all rows twice, of which none then points anywhere else."""
    known = facts.graph_facts(gm)
    for dim, size in enumerate(facts.shape(node.meta["val"])):
        if size in known.rows:
            value = torch.cat([value, value], dim)
        elif size.free_symbols and not known.rows:
            value = value.narrow(dim, 0, facts.at(size, known.batch, 1))
    return value.contiguous()


def _close(
    found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, of_its_field: float, of_all: float
) -> bool:  # fmt: skip
    """Whether they agree, as far as what is computed in this dtype does.

    A result that is zero but for rounding, such as the gradient of the bias of an attention's keys, rounds in
    proportion to what it is summed of: to the largest result of its field, and by its own dtype to the largest of all.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not facts.is_differentiable(expected):
        return torch.equal(found, expected)
    tolerance = _TOLERANCE.get(dtype.to_real(), _TOLERANCE_OF_HALF)
    rounding = torch.finfo(dtype).eps * of_its_field + torch.finfo(expected.dtype).eps * of_all
    return torch.allclose(
        found, expected, rtol=tolerance, atol=tolerance * _largest(expected) + rounding, equal_nan=True
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How far apart they are, in words."""
    if found.shape != expected.shape or not facts.is_differentiable(expected):
        return ""
    return f"; they differ by {_largest(found - expected):.1e}, and the largest is {_largest(expected):.1e}"


def _largest(value: torch.Tensor) -> float:
    """Its largest finite absolute value."""
    finite = value[value.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
