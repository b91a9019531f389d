"""Points of all samples at which one image is looked up, taken apart by sample.

    F.grid_sample(plane, points.view(1, -1, 1, 2))    # plane: [1, C, H, W], a parameter

Feature planes of radiance fields are looked up so.  The points of a sample are then a part of a dim of the grid; looked
up by themselves, they have an image of their own, which all samples share.
"""

from __future__ import annotations

import contextlib

from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.splicing import splice

from ..arguments import bound, op_name
from ..values import Result
from ..walk import Prover

_LOOKUPS = ("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")


def look_up_by_sample(gm: GraphModule) -> None:
    """Give each sample its points and an image, where all samples have one grid."""
    while left := [n for n in gm.graph.nodes if _is_of_all(n)]:
        prover = Prover(gm)
        with contextlib.suppress(PsgError):  # of what other rewritings are for; what is known by then is known
            prover.walk(skip=facts.descendants(left))
        known = {n: prover.known.get(bound(n)["grid"], Result()).axes for n in left}
        axes = {n: axis for n, axis in known.items() if isinstance(axis, SampleAxis)}
        if not axes:
            return
        for node, axis in axes.items():
            _take_apart(gm, node, axis)


def _is_of_all(node: Node) -> bool:
    """Whether an image without samples is looked up by a grid that has them in another dim than the first."""
    if node.op != "call_function" or op_name(node) not in _LOOKUPS:
        return False
    image, grid = (facts.shape(bound(node)[name].meta["val"]) for name in ("input", "grid"))
    return not any(size.free_symbols for size in (*image, grid[0])) and any(size.free_symbols for size in grid)


def _take_apart(gm: GraphModule, node: Node, axis: SampleAxis) -> None:
    """`[P, C, .., rows, ..]` of an image `[P, C, ..]` and a grid `[P, .., rows, .., 2]`."""
    dim = axis.dim

    def run(image: Tensor, grid: Tensor) -> Tensor:
        parts = grid.unflatten(dim, (axis.outer, -1, axis.inner)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
        images = image.expand(parts.shape[0], *image.shape).flatten(0, 1)
        found = node.target(images, parts.flatten(0, 1), *node.args[2:])  # type: ignore[operator]
        found = (
            found.unflatten(0, (-1, image.shape[0])).unflatten(dim + 2, (axis.outer, axis.inner)).movedim(0, dim + 2)
        )
        return found.flatten(dim + 1, dim + 3)  # type: ignore[no-any-return]

    given = bound(node)
    looked_up: Node = splice(gm, node, run, [given["input"], given["grid"]])
    node.replace_all_uses_with(looked_up)
    gm.graph.erase_node(node)
