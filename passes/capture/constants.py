"""Numbers that the code makes of the batch size outside of the graph, and tensors of them: what another size makes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.source import locate
from psg_fx.tensors import same_values
from psg_fx.torch_private.functional import Functional

aten = torch.ops.aten


@dataclass(frozen=True)
class Share:
    """A number that is `factor` times the batch size, or (inverse) divided by it; and an offset to that."""

    factor: int | float
    inverse: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class Row:
    """As many numbers as the share says: 0, 1, 2, .., or each of them `fill`."""

    count: Share
    fill: int | float | None = None


Elements = Sequence[Any] | Row
"""The elements of a tensor, flat, a `Share` where one goes with the batch size; or the row that it is."""


def alike(values: Sequence[Any]) -> bool:
    """Whether an argument is the same everywhere; NaN equals itself here."""
    first = values[0]
    return all(v is first or (type(v) is type(first) and (v == first or repr(v) == repr(first))) for v in values)


def share(values: Sequence[Any], sizes: Sequence[int], exact: float) -> Any:
    """What a number is that had these values at these batch sizes: itself, c·B, c/B, or another number of those that
    are no sizes, which counts at one batch size and for one sample: c·B + d is right at both.  None for others.

    exact: up to which relative error floats count as equal.
    """
    if alike(values):
        return values[0]
    if all(type(v) is int for v in values) and len({v / s for v, s in zip(values, sizes, strict=True)}) == 1:
        return Share(values[0] // sizes[0])
    if not all(type(v) is float and math.isfinite(v) for v in values):
        return None
    alone = sizes.index(1)  # the value that counts, to the last bit
    for inverse in (False, True):
        factors = [v * s if inverse else v / s for v, s in zip(values, sizes, strict=True)]
        if max(abs(f - factors[alone]) for f in factors) <= exact * abs(factors[alone]):
            return Share(factors[alone], inverse)
    other = sizes.index(max(sizes[:2])) if sizes[0] == 1 else 0
    factor = (values[other] - values[alone]) / (sizes[other] - 1)
    return Share(factor, offset=values[alone] - factor)


def constants_that_follow(programs: Sequence[Functional], sizes: Sequence[int]) -> dict[str, Elements]:
    """The tensors that the code makes of the batch size outside the graph, as `torch.tensor(len(x))`: the name of the
    placeholder -> its elements, flat, a `Share` where one goes with the batch size; or the row that it is, as the index
    of `x[range(len(x)), y]`.
    """
    first = programs[0]
    found: dict[str, Elements] = {}
    for spec in first.graph_signature.input_specs:
        values: list[Any] = [p.constants.get(spec.target or "") for p in programs]
        if spec.kind is not InputKind.CONSTANT_TENSOR or not all(isinstance(v, torch.Tensor) for v in values):
            continue
        if any(v.shape != values[0].shape for v in values) or values[0].numel() > _FEW:
            if row := _row(values, sizes):
                found[spec.arg.name] = row
            elif not _same(values):
                raise _of_the_batch_size(first, spec.arg.name)
        elif not _same(values):
            exact = 4 * torch.finfo(values[0].dtype).eps if values[0].is_floating_point() else 0.0
            rows = zip(*(v.flatten().tolist() for v in values), strict=True)
            elements = [share(row, sizes, exact) for row in rows]
            if any(element is None for element in elements):
                raise _of_the_batch_size(first, spec.arg.name)
            found[spec.arg.name] = elements
    return found


def same_constants(programs: Sequence[Functional]) -> bool:
    """Whether the placeholders of all hold the same."""
    for specs in zip(*(p.graph_signature.input_specs for p in programs), strict=True):
        values: list[Any] = [p.constants.get(s.target or "") for p, s in zip(programs, specs, strict=True)]
        if len({(s.kind, s.target) for s in specs}) > 1:
            return False
        if specs[0].kind is InputKind.CONSTANT_TENSOR:
            shapes = {v.shape if isinstance(v, torch.Tensor) else None for v in values}
            if len(shapes) > 1 or None in shapes or not _same(values):
                return False
    return True


_FEW = 64
"""A tensor of more elements is not taken apart."""


def _row(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> Row | None:
    """What tensors of different lengths are."""
    count = share([v.numel() for v in values], sizes, 0.0)
    if not isinstance(count, Share) or any(v.ndim != 1 for v in values):
        return None
    if all(v.dtype is torch.int64 and torch.equal(v, torch.arange(len(v), device=v.device)) for v in values):
        return Row(count)
    fill = values[0][0]
    return Row(count, fill.item()) if all((v == fill).all() for v in values) else None


def _same(values: Sequence[Any]) -> bool:
    return all(same_values(v, values[0]) for v in values)


def _of_the_batch_size(program: Functional, name: str) -> NotYetSupported:
    users = [user for n in program.graph_module.graph.nodes if n.name == name for user in n.users]
    return NotYetSupported(
        "the code makes a tensor of the batch size outside the graph",
        where=locate(users[0]) if users else f"the constant {name}",
        why="it holds other values for another batch size, in no simple way",
        fix="make it with torch.arange or torch.full",
    )  # fmt: skip


def compute(gm: GraphModule, batch: Node, constant: Node, elements: Elements) -> None:
    """Let a tensor of numbers that go with the batch size be computed from it."""
    value = constant.meta["val"]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    call = gm.graph.call_function
    with gm.graph.inserting_after(batch):
        new = call(aten.view.default, (constant, [-1] if isinstance(elements, Row) else list(value.shape)))
    constant.replace_all_uses_with(new, lambda user: user is not new)
    with gm.graph.inserting_before(new):
        if not isinstance(elements, Row):
            numbers = [number(gm, batch, e) if isinstance(e, Share) else e for e in elements]
            parts = [call(aten.full.default, ([], n), options) for n in numbers]
            made = call(aten.stack.default, (parts,))
        elif elements.fill is None:
            made = call(aten.arange.default, (number(gm, batch, elements.count),), options)
        else:
            made = call(aten.full.default, ([number(gm, batch, elements.count)], elements.fill), options)
    new.update_arg(0, made)


def number(gm: GraphModule, batch: Node, share: Share) -> Node:
    """The share of this batch size."""
    if share.inverse:
        return gm.graph.call_function(operator.truediv, (share.factor, batch))
    found = batch if share.factor == 1 else gm.graph.call_function(operator.mul, (batch, share.factor))
    return gm.graph.call_function(operator.add, (found, share.offset)) if share.offset else found
