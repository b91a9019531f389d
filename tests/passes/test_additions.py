"""Rows added by number are the same as `scatter_add`; what adds anything else is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.ops.added_rows import added_rows
from psg_fx.passes.compile.additions import add_rows_by_scatter

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor, Tensor], Tensor]

ADDED: dict[str, tuple[Function, list[int], tuple[int, ...]]] = {
    "index_add": (lambda x, ids, v: x.index_add(0, ids, v), [3, 0, 3], (3, 2, 4)),
    "numbers": (lambda x, ids, v: x[:, 0, 0].index_add(0, ids, v), [3, 0, 3], (3,)),
    "index_put": (lambda x, ids, v: x.index_put((ids,), v, accumulate=True), [-1, 0, 3], (3, 2, 4)),
    "narrow": (lambda x, ids, v: x.index_put((ids.int(),), v, accumulate=True), [-1, 0, 3], (3, 2, 4)),
    "tables": (lambda x, ids, v: x.index_put((ids.view(2, 2),), v, accumulate=True), [2, 0, -2, 2], (2, 2, 2, 4)),
}
LEFT: dict[str, tuple[Function, list[int], tuple[int, ...]]] = {
    "columns": (lambda x, ids, v: x.index_add(1, ids, v), [1, 0, 1], (5, 3, 4)),
    "scaled": (lambda x, ids, v: x.index_add(0, ids, v, alpha=2), [3, 0, 3], (3, 2, 4)),
    "written": (lambda x, ids, v: x.index_put((ids,), v), [1, 0, 3], (3, 2, 4)),
    "broadcast": (lambda x, ids, v: x.index_put((ids,), v, accumulate=True), [1, 0, 3], (4,)),
    "elements": (lambda x, ids, v: x.index_put((ids, ids), v, accumulate=True), [1, 0, 1], (3, 4)),
    "masked": (lambda x, ids, v: x.index_put((ids > 0,), v, accumulate=True), [1, 0, 1, 1, 0], (3, 2, 4)),
}


def rewritten(function: Function, ids: list[int], shape: tuple[int, ...]) -> tuple[set[object], Tensor, Tensor]:
    """The ops there are then, and the result before and after, of a graph for any sizes."""
    given = torch.randn(5, 2, 4), torch.tensor(ids), torch.randn(shape)
    gm = make_fx(function, tracing_mode="fake")(*given)
    before = gm(*given)
    add_rows_by_scatter(gm)
    gm.graph.lint()
    gm.recompile()
    return {node.target for node in gm.graph.nodes}, before, gm(*given)


@pytest.mark.parametrize("name", ADDED)
def test_rows_that_are_added(name: str) -> None:
    ops, before, after = rewritten(*ADDED[name])
    assert aten.scatter_add.default in ops
    assert not ops & {aten.index_add.default, aten.index_put.default}
    torch.testing.assert_close(after, before)


def test_zeros_are_made_where_rows_are_added() -> None:
    """And not where they are read elsewhere, too."""
    ids, shape = [3, 0, 3], (3, 2, 4)
    ops, before, after = rewritten(lambda x, ids, v: x.new_zeros(5, 2, 4).index_add(0, ids, v), ids, shape)
    assert ops >= {added_rows}
    assert not ops & {aten.new_zeros.default, aten.scatter_add.default}
    torch.testing.assert_close(after, before)

    def read(x: Tensor, ids: Tensor, v: Tensor) -> Tensor:
        zeros = x.new_zeros(5, 2, 4)
        return zeros.index_add(0, ids, v) + zeros.cos()

    ops, before, after = rewritten(read, ids, shape)
    assert aten.scatter_add.default in ops
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", LEFT)
def test_what_adds_anything_else(name: str) -> None:
    ops, before, after = rewritten(*LEFT[name])
    assert aten.scatter_add.default not in ops
    torch.testing.assert_close(after, before)
