"""Measured beside predicted: what a tree costs on this machine, with random operands of the right shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.algebra.network import OneHot, Patches
from psg_fx.blocks import Memory
from psg_fx.generators import generators_kept
from psg_fx.graph.history import History
from psg_fx.measure.clock import time_rounds
from psg_fx.passes.compile.compile import compile_graph
from psg_fx.planner.evaluate import compute, keep
from psg_fx.planner.expr import Expr, LeafExpr
from psg_fx.planner.plan import Plan
from psg_fx.tensors import product

Values = dict[int, torch.Tensor]
"""Node key -> its tensor."""


def random_operand(expr: LeafExpr, device: str = "cpu") -> torch.Tensor:
    """A tensor as the leaf is stored: ids for one-hot operands, images for patches, values for dense ones."""
    sizes, form = [int(expr.sizes[axis]) for axis in expr.axes], expr.leaf.form
    if isinstance(form, OneHot):
        return torch.randint(sizes[-1], sizes[:-1], device=device)
    if isinstance(form, Patches):
        samples, positions, groups, rows = sizes
        folds = positions // product(form.out_space)
        sizes = [samples, folds, groups * rows // product(form.kernel), *form.space]
    return torch.randn(sizes, dtype=expr.dtype, device=device)


def random_operands(trees: Iterable[Expr], device: str = "cpu") -> Values:
    """A tensor for every leaf of the trees."""
    nodes = {key: node for tree in trees for key, node in tree.nodes.items()}
    with generators_kept(torch.device(device)):
        return {key: random_operand(node, device) for key, node in nodes.items() if isinstance(node, LeafExpr)}


def evaluate_tree(tree: Expr, values: Values) -> torch.Tensor:
    """The tree's tensor.  `values` holds the leaves, and may hold nodes that are known; it gets all the others."""
    if tree.key not in values:
        keep(values, tree, compute(tree, [evaluate_tree(child, values) for child in tree.children]))
    return values[tree.key]


def compiled(
    evaluate: Callable[[Values], Sequence[torch.Tensor]], given: Values, backend: str = "inductor"
) -> Callable[[], object]:
    """`evaluate` at the given values as a step would run it."""
    tensors = list(given.values())

    def evaluated(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(evaluate(dict(zip(given, inputs, strict=True))))

    gm = make_fx(evaluated, tracing_mode="fake")(*tensors)
    run = compile_graph(gm, backend, None, None, False, tensors[0].device.type, Memory(keep=False), History())

    def once() -> object:
        with torch.no_grad():
            return run(*tensors)

    return once


def seconds(runs: Mapping[str, Callable[[], object]], rounds: int = 5, total: float = 0.1) -> dict[str, float]:
    """The median time of each, in interleaved rounds of about `total` seconds each in all."""
    for run in runs.values():
        run()
    times = time_rounds(runs, rounds=rounds, min_run_time=total, note=lambda text: None)
    return {name: median(found) for name, found in times.items()}


def measured(plan: Plan, backend: str = "inductor") -> dict[tuple[str, int], float]:
    """(parameter, index of its part) -> measured seconds of what no earlier part of the parameter has computed."""
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    device = plan.device.name
    for parameter in plan.parameters:
        trees = [part.tree for part in parameter.parts]
        values = random_operands(trees, device)
        for index, tree in enumerate(trees):
            if tree.key not in values:
                run = compiled(partial(_only, tree), _starting_points(tree, values), backend)
                runs[parameter.gradient.name, index] = run
                evaluate_tree(tree, values)
    return dict(zip(runs, seconds({str(place): run for place, run in runs.items()}).values(), strict=True))


def _only(tree: Expr, values: Values) -> list[torch.Tensor]:
    return [evaluate_tree(tree, values)]


def _starting_points(tree: Expr, known: Values) -> Values:
    """The known values that the tree is computed from."""
    if isinstance(known.get(tree.key), torch.Tensor):  # a pair is computed again
        return {tree.key: known[tree.key]}
    return {key: value for child in tree.children for key, value in _starting_points(child, known).items()}
