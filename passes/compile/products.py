"""Products of float32 on a CPU by a matrix unit, or by oneDNN and in C++, where these are faster than the BLAS.

Which of them is, `ops/products/elsewhere.py` says; it is the same for forward, backward and gradients of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.history import copy_graph
from psg_fx.graph.nodes import call, output, value_of
from psg_fx.ops.define import begin_libraries
from psg_fx.ops.products import by_onednn, in_parts
from psg_fx.tensors import hint, product

aten = torch.ops.aten

LEAST = {by_onednn.by_onednn: (8e6, 0), in_parts.in_parts: (64e6, 170)}
"""Flops of a product, and flops for each number that is read or written: for fewer, calling an op, or packing what a
matrix unit multiplies, takes longer than it saves (docs/design/cpu.md).
"""

_TILE = (8, 32)
"""Rows and columns of a tile in C++: of a smaller matrix, most of a tile would be computed for nothing."""

Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class _Product:
    """bias + left · right, of matrices or of samples' matrices."""

    left: Node
    right: Node
    bias: Node | None = None

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        return value_of(self.left), value_of(self.right)

    def flops(self, sizes: Sizes) -> int:
        left, right = self.operands
        shape = (*facts.shape(left), facts.shape(right)[-1])
        return 2 * int(product(shape).subs(sizes))

    def numbers(self, sizes: Sizes) -> int:
        """Of its operands and of what it makes; a matrix that samples share counts once."""
        left, right = (facts.shape(value) for value in self.operands)
        read = product(left) + product(right[1:] if self.of_samples and self.shares_right else right)
        return int((read + product([*left[:-1], right[-1]])).subs(sizes))

    @property
    def of_samples(self) -> bool:
        return value_of(self.left).ndim == 3

    @property
    def shares_right(self) -> bool:
        """Whether all samples' left matrices are multiplied by one of known size, so that they are rows of a matrix."""
        left, right = self.operands
        known = any(size.is_number for size in facts.shape(left)[:2]) and all(
            size.is_number for size in facts.shape(right)[1:]
        )
        return known and facts.expr(right.stride(0)) == 0

    def fills_tiles(self) -> bool:
        """Whether each sample's matrix has as many rows and columns as a tile, or more."""
        left, right = self.operands
        sides = facts.shape(left)[1], facts.shape(right)[2]
        return all(not side.is_number or side >= least for side, least in zip(sides, _TILE, strict=True))

    def written(self, gm: GraphModule, by: OpOverload) -> Node:
        """What computes it elsewhere, where the graph inserts."""
        if not self.of_samples:
            return _of_matrices(gm, self, by)
        return _of_rows(gm, self, by) if self.shares_right else _of_samples(gm, self)


def multiply_elsewhere(gm: GraphModule, inputs: Sequence[torch.Tensor], by: OpOverload) -> GraphModule:
    """A graph with large products by that op, as large as they are for these inputs; the graph itself if it has none.

    Where oneDNN is faster than the BLAS, those of samples' matrices are in C++, which is as fast.
    """
    sizes = values_of_symbols(gm, inputs)
    large = [place for place, node in enumerate(gm.graph.nodes) if _is_large(node, sizes, by)]
    if not large:
        return gm
    gm = copy_graph(gm)
    nodes = list(gm.graph.nodes)
    for node in [nodes[place] for place in large]:
        found = _product(node)
        assert found is not None
        with gm.graph.inserting_before(node):
            made = found.written(gm, by)
        made.meta = node.meta | {"val": made.meta["val"]}
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    gm.recompile()
    begin_libraries(gm)
    return gm


def multiplies(gm: GraphModule, inputs: Sequence[torch.Tensor], by: OpOverload) -> bool:
    """Whether the graph has products that are large enough for that op."""
    sizes = values_of_symbols(gm, inputs)
    return any(_is_large(node, sizes, by) for node in gm.graph.nodes)


def values_of_symbols(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> Sizes:
    """What the graph's symbols are for these inputs."""
    pairs = zip(facts.placeholders(gm), inputs, strict=True)
    sizes = (pair for node, value in pairs for pair in zip(facts.shape(value_of(node)), value.shape, strict=True))
    return {symbol: hint(size) for symbol, size in sizes if isinstance(symbol, sympy.Symbol)}


def _is_large(node: Node, sizes: Sizes, by: OpOverload) -> bool:
    """Whether it is a product of float32 that is worth it."""
    found = _product(node)
    if found is None or any(value.dtype is not torch.float32 for value in found.operands):
        return False
    if found.of_samples and not found.shares_right and not (by is by_onednn.by_onednn and found.fills_tiles()):
        return False
    flops, of_each = LEAST[by]
    return found.flops(sizes) >= max(flops, of_each * found.numbers(sizes))


def _product(node: Node) -> _Product | None:
    if node.target in (aten.mm.default, aten.bmm.default):
        left, right = node.args
        return _Product(left, right)  # type: ignore[arg-type]
    if node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = node.args
        whole = facts.shape(value_of(bias)) == facts.shape(value_of(right))[-1:]  # not one number for all columns
        if whole and value_of(bias).stride(0) == 1:
            return _Product(left, right, bias)  # type: ignore[arg-type]
    return None


def _of_matrices(gm: GraphModule, found: _Product, by: OpOverload) -> Node:
    """oneDNN copies rows that do not lie side by side: the kernel that makes them may write them so."""
    left = found.left
    if by is by_onednn.by_onednn and facts.expr(value_of(left).stride(1)) != 1:
        left = call(gm, aten.clone.default, left, memory_format=torch.contiguous_format)
    return call(gm, by, left, found.right, found.bias)


def _of_rows(gm: GraphModule, found: _Product, by: OpOverload) -> Node:
    """The rows of all samples in one matrix."""
    n, t, k = facts.shape(value_of(found.left))
    rows = call(gm, aten.reshape.default, found.left, [-1, int(k)])
    made = _of_matrices(gm, _Product(rows, call(gm, aten.select.int, found.right, 0, 0)), by)
    shape = [int(size) if size.is_number else -1 for size in (n, t)]
    return call(gm, aten.view.default, made, [*shape, value_of(found.right).shape[2]])


def _of_samples(gm: GraphModule, found: _Product) -> Node:
    """In C++, whose operands lie in any way."""
    transposed = call(gm, aten.transpose.int, found.left, 1, 2)
    both = call(gm, torch.ops.psg_fx.products_here.default, transposed, found.right, False)
    return output(gm, both, 0)
