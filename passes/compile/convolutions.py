"""Large convolutions of float32 on a CPU by a matrix unit, where there is one: forward, backward, gradients of samples.

oneDNN computes them as ever where a unit would not be worth it: of other steps than one, in groups, of few channels,
or of images so small that most of what a unit computes is the zeros around them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.history import copy_graph
from psg_fx.graph.nodes import call, value_of, written_before
from psg_fx.ops.define import begin_libraries
from psg_fx.ops.products import in_parts
from psg_fx.ops.products.convolutions_in_parts import convolution_in_parts, weight_gradients_in_parts
from psg_fx.ops.products.grouped_convolution import grouped_weight_gradient

from .contiguous import with_contiguous_arguments
from .products import LEAST, Sizes, values_of_symbols

aten = torch.ops.aten

USED = {convolution_in_parts: 0.77, weight_gradients_in_parts: 0.85}
"""How much of what is computed must be wanted, at least (docs/design/cpu.md)."""

_ROWS, _PLACES, _PIXELS = 16, 32, 32
"""Of a tile of the unit: its rows, or columns, and the places that it adds up; pixels that are multiplied at once."""


@dataclass(frozen=True)
class _Window:
    """How a convolution reads its image; all of them in both axes, or in one."""

    kernel: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def arguments(self) -> tuple[list[int], list[int]]:
        return [*self.padding], [*self.dilation]

    def turned(self) -> _Window:
        """As its gradient reads the cotangent."""
        around = [d * (k - 1) - p for k, p, d in zip(self.kernel, self.padding, self.dilation, strict=True)]
        return _Window(self.kernel, around, self.dilation)


@dataclass(frozen=True)
class _Work:
    """Of an op of the unit: samples' images [channels, *space], and [outputs, *out_space] that are computed of them, or
    that meet them in gradients of weights.
    """

    by: OpOverload
    samples: int
    channels: int
    outputs: int
    space: Sequence[int]
    window: _Window

    def is_worth(self) -> bool:
        if min(*self.out_space, *self.window.padding) < 0 or not self._flops:
            return False
        flops, of_each = LEAST[in_parts.in_parts]
        return self._flops >= max(flops, of_each * self._numbers) and self._used >= USED[self.by]

    @property
    def out_space(self) -> list[int]:
        rows = zip(self.space, self.window.kernel, self.window.padding, self.window.dilation, strict=True)
        return [size + 2 * p - d * (k - 1) for size, k, p, d in rows]

    @property
    def _weights(self) -> int:
        return self.channels * self.outputs * math.prod(self.window.kernel)

    @property
    def _flops(self) -> int:
        return 2 * self.samples * math.prod(self.out_space) * self._weights

    @property
    def _numbers(self) -> int:
        """That are read and written; gradients of weights are so once for each sample, also if they are added up."""
        images = self.channels * math.prod(self.space) + self.outputs * math.prod(self.out_space)
        return self.samples * images + self._weights * (self.samples if self.by is weight_gradients_in_parts else 1)

    @property
    def _used(self) -> float:
        """How much of what the unit computes is wanted: the rest are zeros around images, and what fills tiles."""
        *height, width = self.out_space
        pixels = (math.prod(height) - 1) * (self.space[-1] + 2 * self.window.padding[-1]) + width
        of_channels = _ROWS if self.by is weight_gradients_in_parts else _PLACES
        computed = _filled(pixels, _PIXELS) * _filled(self.outputs, _ROWS) * _filled(self.channels, of_channels)
        return math.prod(self.out_space) * self.channels * self.outputs / computed


def _filled(count: int, size: int) -> int:
    return -(-count // size) * size


def convolves(gm: GraphModule, by: OpOverload) -> bool:
    """Whether that op is the matrix unit's, and the graph has convolutions."""
    return by is in_parts.in_parts and any(node.target in _WAYS for node in gm.graph.nodes)


def convolve_elsewhere(gm: GraphModule, inputs: Sequence[torch.Tensor], by: OpOverload) -> GraphModule:
    """A graph with convolutions by the matrix unit, if that multiplies; the graph itself if it has none that are worth
    it, as large as they are for these inputs.
    """
    if not convolves(gm, by):
        return gm
    sizes = values_of_symbols(gm, inputs)
    written = copy_graph(gm)
    found = [_replace(written, node, sizes) for node in list(written.graph.nodes) if node.target in _WAYS]
    if not any(found):
        return gm
    with_contiguous_arguments(written)
    written.recompile()
    begin_libraries(written)
    return written


Replaced = Iterator[tuple[Node, Node]]
"""Nodes, and what computes the same by the unit."""


def _replace(gm: GraphModule, node: Node, sizes: Sizes) -> bool:
    """Whether it, or some of what it makes, is computed by the unit now."""
    with written_before(node, node.meta):
        pairs = list(_WAYS[node.target](gm, node, sizes))
    for old, new in pairs:
        old.replace_all_uses_with(new)
        gm.graph.erase_node(old)
    if pairs and node.target is aten.convolution_backward.default:
        _ask_less(gm, node)
    return bool(pairs)


def _ask_less(gm: GraphModule, backward: Node) -> None:
    """Of a convolution's backward only what is read."""
    for user in list(backward.users):
        if not user.users:
            gm.graph.erase_node(user)
    *arguments, mask = backward.args
    asked = [index in {user.args[1] for user in backward.users} for index, _ in enumerate(mask)]  # type: ignore[arg-type]
    backward.args = (*arguments, asked)
    backward.meta["val"] = tuple(v if one else None for v, one in zip(backward.meta["val"], asked, strict=True))
    if not any(asked):
        gm.graph.erase_node(backward)


def _convolved(gm: GraphModule, node: Node, sizes: Sizes) -> Replaced:
    x, w, bias, stride, padding, dilation, transposed, more, groups = node.args
    window = _window(_kernel(w), stride, padding, dilation, groups, x, w)
    if window and not any(more) and _convolution(x, w, window, bool(transposed), sizes).is_worth():  # type: ignore[arg-type]
        yield node, call(gm, convolution_in_parts, x, w, bias, *window.arguments, transposed)


def _backward(gm: GraphModule, node: Node, sizes: Sizes) -> Replaced:
    """Its input's and its weight's gradient, each by itself; what is not worth it stays where it is."""
    grad, x, w, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    window = _window(_kernel(w), stride, padding, dilation, groups, grad, x, w)
    if window is None or transposed or any(user.target is not operator.getitem for user in node.users):
        return
    for user in [user for user in node.users if user.users]:
        if user.args[1] == 0 and _convolution(grad, w, window, True, sizes).is_worth():
            yield user, call(gm, convolution_in_parts, grad, w, None, *window.arguments, True)
        if user.args[1] == 1 and _gradients(grad, x, 1, window, sizes).is_worth():
            yield user, call(gm, weight_gradients_in_parts, grad, x, 1, [*window.kernel], *window.arguments)


def _of_samples(gm: GraphModule, node: Node, sizes: Sizes) -> Replaced:
    grad, x, groups, kernel, stride, padding, dilation = node.args
    window = _window(kernel, stride, padding, dilation, 1, grad, x)
    if window is None or facts.shape(value_of(x))[0] != 1:
        return
    samples = _number(facts.expr(groups.meta["val"]) if isinstance(groups, Node) else groups, sizes)
    if samples and _gradients(grad, x, samples, window, sizes).is_worth():
        yield node, call(gm, weight_gradients_in_parts, grad, x, groups, [*window.kernel], *window.arguments)


_WAYS: dict[Any, Callable[[GraphModule, Node, Sizes], Replaced]] = {
    aten.convolution.default: _convolved,
    aten.convolution_backward.default: _backward,
    grouped_weight_gradient: _of_samples,
}
"""The ops that a unit may compute -> what of them is written by it."""


def _window(
    kernel: Any, stride: Any, padding: Any, dilation: Any, groups: Any, *values: Any
) -> _Window | None:  # fmt: skip
    """Of a convolution of step one, ungrouped, of images of one axis or two, all values of float32; or none."""
    axes = len(kernel)
    stride, padding, dilation = ([*given] * (axes // len(given)) for given in (stride, padding, dilation))
    suits = axes in (1, 2) and groups == 1 and stride == [1] * axes and all(facts.expr(k).is_number for k in kernel)
    if not suits or any(value_of(value).dtype is not torch.float32 for value in values):
        return None
    return _Window([int(k) for k in kernel], padding, dilation)


def _kernel(w: Any) -> Sequence[Any]:
    return value_of(w).shape[2:]


def _number(size: Any, sizes: Sizes) -> int:
    """A size, or zero where that is known only while the graph is run."""
    found = sympy.sympify(size).subs(sizes)
    return int(found) if found.is_number else 0


def _convolution(x: Any, w: Any, window: _Window, transposed: bool, sizes: Sizes) -> _Work:
    samples, channels, *space = (_number(size, sizes) for size in facts.shape(value_of(x)))
    outputs = _number(facts.shape(value_of(w))[1 if transposed else 0], sizes)
    window = window.turned() if transposed else window
    return _Work(convolution_in_parts, samples, channels, outputs, space, window)


def _gradients(grad: Any, x: Any, groups: int, window: _Window, sizes: Sizes) -> _Work:
    folds, channels, *space = (_number(size, sizes) for size in facts.shape(value_of(x)))
    outputs = _number(facts.shape(value_of(grad))[1], sizes)
    return _Work(weight_gradients_in_parts, folds * groups, channels // groups, outputs // groups, space, window)
