"""Numbers that code reads out of tensors and computes with, `loss / max(mask.sum().item(), 1)`: they are those tensors.

A number in Python is one for all samples, and where it is read out of samples nothing could be said of them.  Where it
only adds, multiplies or divides, the tensor that it was read from does the same, without a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, value_of, written_before
from psg_fx.torch_private.tracer import READING

aten = torch.ops.aten
_OF_NUMBERS: Mapping[Callable[..., Any], Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.neg: aten.neg.default, torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default, torch.sym_float: aten.alias.default,
}  # fmt: skip
"""What Python computes of numbers -> the op that computes it of tensors."""
_WITH_TENSORS = {
    aten.add.Tensor: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor, aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor, aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor, aten.div.Scalar: aten.div.Tensor,
}  # fmt: skip
"""Ops on a tensor and a number -> the same with a tensor of one."""


def keep_numbers_in_tensors(gm: GraphModule) -> None:
    """Rewrite the numbers that are only computed with.  All others stay, as those that the code checks."""
    if numbers := _computed_with(gm):
        _Numbers(gm).rewrite(numbers)
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _computed_with(gm: GraphModule) -> list[Node]:
    """The numbers that are read or follow from such, and are read by nothing else than ops that add or multiply."""
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
        follows = node.target in _OF_NUMBERS and all(n in found or _is_plain(n) for n in node.args)
        follows = follows and (node.target is not operator.truediv or _is_plain(node.args[1]))  # Python raises for zero
        if is_number and (node.target in READING or follows):
            found[node] = None
    while unfit := [n for n in found if not all(u in found or _is_with_tensor(u, n) for u in n.users)]:
        for node in {*unfit, *facts.descendants(unfit)}:
            found.pop(node, None)
    return list(found)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_with_tensor(user: Node, number: Node) -> bool:
    """Whether an op has the number as its second operand, the first being a tensor with a fraction."""
    if user.target not in _WITH_TENSORS or len(user.args) != 2 or user.kwargs or user.args[1] is not number:
        return False
    value = user.args[0].meta["val"] if isinstance(user.args[0], Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Numbers:
    """twins: the tensor of each number, of no dims, in float64: Python's integers have no largest one."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.twins: dict[Node, Node] = {}

    def rewrite(self, numbers: list[Node]) -> None:
        for number in numbers:
            with written_before(number, number.meta):
                self.twins[number] = self._read(number) if number.target in READING else self._computed(number)
        for number in numbers:
            for user in list(number.users):
                if user not in self.twins:
                    self._with_tensor(user)

    def _read(self, number: Node) -> Node:
        tensor: Any = number.args[0]
        one = call(self.gm, aten.reshape.default, call(self.gm, aten.detach.default, tensor), [])
        return self._cast(one, torch.float64)

    def _computed(self, number: Node) -> Node:
        like = self.twins[number.all_input_nodes[0]]
        operands = [
            self.twins[n] if isinstance(n, Node) else call(self.gm, aten.full_like.default, like, float(n))  # type: ignore[arg-type]
            for n in number.args
        ]
        return call(self.gm, _OF_NUMBERS[number.target], *operands)  # type: ignore[index]

    def _with_tensor(self, user: Node) -> None:
        """The op with the tensor, in the dtype that it has with the number."""
        x, number = user.args
        with written_before(user, user.meta):
            other = self.twins[number]  # type: ignore[index]
            if value_of(other).device != value_of(x).device:
                other = call(self.gm, aten._to_copy.default, other, device=value_of(x).device)
            made = call(self.gm, _WITH_TENSORS[user.target], x, other)  # type: ignore[index]
            made = self._cast(made, value_of(user).dtype)
        user.replace_all_uses_with(made)
        self.gm.graph.erase_node(user)

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        same = value_of(node).dtype is dtype
        return node if same else call(self.gm, aten._to_copy.default, node, dtype=dtype)
