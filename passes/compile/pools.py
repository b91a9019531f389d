"""Max pooling of 2×2 windows that do not overlap, on a CPU, in loops that inductor vectorises.

torch's kernel and inductor's loop compare the four entries of a window one by one, and which is the largest no branch
predictor can know: 590,000 windows take 6 to 8 ms, two threads of an AMD EPYC, unless channels lie last.  Rows are
compared here by whole vectors.  For columns, every two neighbours are read as one number of 64 bits, whose halves are
taken apart by shifts; what is kept for the backward pass is the place in the window, one byte.  1.2 ms.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call, numbers_along, value_of, written_before

aten = torch.ops.aten
Largest = tuple[Node, Node]
"""The larger values, and where in its window each was."""


def pool_by_vectors(gm: GraphModule) -> None:
    """Replace such poolings; the places that a backward pass reads are counted where it does."""
    for node in list(gm.graph.nodes):
        if node.target is not aten.max_pool2d_with_indices.default or not _suits(node):
            continue
        outputs = {user.args[1]: user for user in node.users}
        with written_before(node, node.meta):
            values, places = _columns(gm, *_rows(gm, node.args[0]))
        if 1 in outputs:
            _count_where_read(gm, outputs[1], places, value_of(node.args[0]).shape[-1])
        if 0 in outputs:
            outputs[0].replace_all_uses_with(values)
        for user in outputs.values():
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _suits(node: Node) -> bool:
    """Whether its windows are all of 2×2, side by side, of float32, in images that lie row by row: where channels lie
    last torch is fast.
    """
    value, kernel, *others = [*node.args, *[()] * 6][:6]
    stride, padding, dilation, _ = others
    if node.kwargs or not all(user.target is operator.getitem for user in node.users):
        return False
    alone = all(p == 0 for p in _pair(padding)) and all(d == 1 for d in _pair(dilation))
    image = value_of(value)
    sizes: Any = image.shape[-2:]
    even = all(isinstance(size, int) and size % 2 == 0 for size in sizes) and image.stride()[-2:] == (sizes[1], 1)
    windows = _pair(kernel) == [2, 2] == (_pair(stride) or [2, 2])
    return windows and alone and even and image.dtype is torch.float32 and sys.byteorder == "little"


def _pair(given: Any) -> list[int]:
    """Both of what may be given once for both dims, or not at all."""
    return [*given] * (2 // len(given)) if given else []


def _rows(gm: GraphModule, value: Any) -> Largest:
    """Of every two rows, one behind the other in memory."""
    dim, height = value_of(value).ndim - 2, value_of(value).shape[-2]
    upper, lower = (call(gm, aten.slice.Tensor, value, dim, i, height, 2) for i in (0, 1))
    keep = _larger(gm, aten.ge.Tensor, upper, lower)
    zero, two = (call(gm, aten.full_like.default, keep, k, dtype=torch.int32) for k in (0, 2))
    largest = call(gm, aten.where.self, keep, upper, lower), call(gm, aten.where.self, keep, zero, two)
    values, places = (call(gm, aten.clone.default, x, memory_format=torch.contiguous_format) for x in largest)
    return values, places


def _columns(gm: GraphModule, values: Node, places: Node) -> Largest:
    """Of every two neighbours."""
    left, right = (call(gm, aten.view.dtype, half, torch.float32) for half in _halves(gm, values))
    left_place, right_place = _halves(gm, places)
    higher = call(gm, aten.le.Tensor, left_place, right_place)  # of equal ones the first is taken, row by row
    equal = call(gm, aten.logical_and.default, call(gm, aten.eq.Tensor, left, right), higher)
    keep = call(gm, aten.logical_or.default, _larger(gm, aten.gt.Tensor, left, right), equal)
    place = call(gm, aten.where.self, keep, left_place, call(gm, aten.add.Tensor, right_place, 1))
    return call(gm, aten.where.self, keep, left, right), call(gm, aten._to_copy.default, place, dtype=torch.int8)


def _larger(gm: GraphModule, how: Any, one: Node, other: Node) -> Node:
    """Where one is larger than the other, or no number."""
    return call(gm, aten.logical_or.default, call(gm, how, one, other), call(gm, aten.ne.Tensor, one, one))


def _halves(gm: GraphModule, value: Node) -> tuple[Node, Node]:
    """The bits of every other element of 32, and those of their neighbours to the right."""
    pairs = call(gm, aten.view.dtype, value, torch.int64)
    upper = call(gm, aten.__rshift__.Scalar, pairs, 32)
    left, right = (call(gm, aten._to_copy.default, half, dtype=torch.int32) for half in (pairs, upper))
    return left, right


def _count_where_read(gm: GraphModule, indices: Node, places: Node, width: Any) -> None:
    """The places in the image, for each that reads them: until then a byte for each is kept."""
    for user in list(indices.users):
        with written_before(user, user.meta):
            place = call(gm, aten._to_copy.default, places, dtype=torch.int64)
            below = call(gm, aten.mul.Tensor, call(gm, aten.__rshift__.Scalar, place, 1), int(width))
            inside = call(gm, aten.add.Tensor, below, call(gm, aten.bitwise_and.Scalar, place, 1))
            inside = call(gm, aten.add.Tensor, inside, numbers_along(gm, places, -1, 2))
            corners = call(gm, aten.add.Tensor, inside, numbers_along(gm, places, -2, 2 * int(width)))
            user.replace_input_with(indices, corners)
