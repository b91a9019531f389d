"""Where one tree becomes faster than another as a size grows, and how much memory a tree holds at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy

from psg_fx.algebra.network import Network, Patches
from psg_fx.planner.cost import Device
from psg_fx.planner.expr import ContractExpr, Expr, seconds

_LARGEST = 2**20
"""The size beyond which no border is looked for."""


def crossover(
    network: Network, a: Expr, b: Expr, axis: str, batch: sympy.Symbol, size: int, device: Device
) -> int | None:
    """The size of `axis` nearest to the present one from which on the order of the two trees is another; all other
    sizes stay.  None if it never changes, or the axis is bound to others (positions of a convolution).
    """
    present = int(sympy.sympify(network.sizes[axis]).subs(batch, size))
    if present == 1 or any(isinstance(leaf.form, Patches) and axis in leaf.axes[1:] for leaf in network.leaves):
        return None

    def gap(n: int) -> float:
        return seconds(resized(a, axis, n), device) - seconds(resized(b, axis, n), device)

    side = gap(present) < 0
    below = _changed(lambda n: (gap(n) < 0) != side, present, 0.5)
    above = _changed(lambda n: (gap(n) < 0) != side, present, 2.0)
    return below if below is not None else above


def _changed(other_side: Callable[[int], bool], start: int, factor: float) -> int | None:
    """The border nearest to `start`, by doubling or halving and then bisection: the least size on its upper side."""
    near, far = start, max(int(start * factor), 2)  # an axis of one element has no role in a contraction
    while not other_side(far):
        near, far = far, max(int(far * factor), 2)
        if far == near or far > _LARGEST:
            return None
    while abs(far - near) > 1:
        middle = (near + far) // 2
        near, far = (near, middle) if other_side(middle) else (middle, far)
    return max(near, far)


def resized(tree: Expr, axis: str, size: Any) -> Expr:
    """The same tree where `axis`, primed or not, has another size."""
    sizes = {name: size if name.rstrip("'") == axis else old for name, old in tree.sizes.items()}
    own = {"pair": replace(tree.pair, sizes=sizes)} if isinstance(tree, ContractExpr) else {}
    return tree.over(*(resized(child, axis, size) for child in tree.children), sizes=sizes, **own)
