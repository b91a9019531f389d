"""Where the samples may lie in the arguments of an operator, for trials of its independence rule."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from psg_fx.graph.facts import SampleAxis
from psg_fx.passes.independence.table import SampleRule
from support.op_samples import Call

PIVOTED = ("linalg_lu_solve", "lu_solve", "lu_unpack")  # other pivots are read outside of memory
UNSAFE = re.compile(
    ".*(embedding|segment_reduce|pdist|masked_scatter|nll_loss2?d?|multi[a-z]*_margin_loss|ctc_loss|attention)[a-z_]*_backward"
)
PLAIN, SAME, NUMBER = "samples", "the same for all samples", "the number of the sample"


@dataclass(frozen=True, eq=False)
class Placement:
    """Which flat arguments carry the samples and where; `sized`: which flat numbers are multiplied by B."""

    axes: Mapping[int, SampleAxis]
    kinds: Mapping[int, str]
    sized: tuple[int, ...] = ()

    def __str__(self) -> str:
        placed = [f"argument {k}: {a}, {self.kinds[k]}" for k, a in self.axes.items()]
        return "; ".join(placed + [f"argument {k} times B" for k in self.sized])


def widened(call: Call) -> Call | None:
    """The call with a dim of size 1 in front of every tensor."""
    if call.name.startswith(("_", "reflection_pad")):
        return None  # the parts of an operator do not check that their arguments fit, nor do these (torch 2.15 crashes)
    leaves, _ = call.leaves()
    if any(isinstance(v, Tensor) and not v.numel() for v in leaves):
        return None
    found = call.with_leaves([v.unsqueeze(0) if isinstance(v, Tensor) else v for v in leaves])
    try:
        found.run()
    except Exception:
        return None
    return found


def placements(call: Call, rule: SampleRule, limit: int) -> Iterator[Placement]:
    """Samples in one argument, in several, all or all but one at the same place, and in several anywhere; also with
    sizes times B.
    """
    leaves, _ = call.leaves()
    tensors = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.ndim and v.numel()]
    numbers = sizes_of(call) if rule.sizes else []
    options = {k: list(axes_of(leaves[k])) for k in tensors}
    found: list[Mapping[int, SampleAxis]] = [{k: a} for k in tensors for a in options[k]]
    for count in range(2, min(len(tensors), 4) + 1):
        for chosen in itertools.combinations(tensors[:6], count):
            found += [dict(zip(chosen, axes, strict=True)) for axes in aligned(leaves, chosen, options)]
    if len(tensors) > 4:
        for chosen in (tuple(tensors), *itertools.combinations(tensors, len(tensors) - 1)):
            found += [dict(zip(chosen, axes, strict=True)) for axes in aligned(leaves, chosen, options)]
    limit = 3 * limit if numbers else limit
    rng = random.Random(call.signature())
    if len(tensors) > 1:
        found += [
            {k: rng.choice(options[k]) for k in rng.sample(tensors, rng.randint(2, min(3, len(tensors))))}
            for _ in range(limit // 4)
        ]
    if rule.shapes_only or rule.sizes:
        found.append({})
    sizes: list[tuple[int, ...]] = [(), *((k,) for k in numbers)]
    every = [Placement(a, dict.fromkeys(a, PLAIN), s) for a in found for s in sizes if a or s or rule.shapes_only]
    every = [p for p in every if safe(call, p)]
    others = [p for p in special(leaves, every, rule) if safe(call, p)]
    first: dict[tuple[Any, ...], Placement] = {}
    rest = [p for p in (*every, *others) if first.setdefault(place_of(p), p) is not p]
    rng.shuffle(rest)
    from_few, from_many = list(first.values()), list(first.values())[::-1]
    turns = [p for pair in zip(from_few, from_many, strict=True) for p in pair]
    yield from list(dict.fromkeys([*turns[: len(first)], *rest]))[: max(limit, min(len(first), 2 * limit))]


def place_of(placement: Placement) -> tuple[Any, ...]:
    """Which arguments hold samples, and in which dim the first does: one of each is always tried."""
    dims = [axis.dim for axis in placement.axes.values()]
    return tuple(placement.axes), tuple(dims[:1]), placement.sized


def sizes_of(call: Call) -> list[int]:
    """The flat arguments that are sizes."""
    text = str(call.op._schema)
    marked = [
        pytree.tree_map(lambda _, a=a: bool(re.search(rf"SymInt(\[\d*\])?\?? {a.name}\b", text)), given)
        for a, given in by_schema(call)
    ]
    return [
        k
        for k, (size, v) in enumerate(zip(pytree.tree_leaves(marked), call.leaves()[0], strict=True))
        if type(v) is int and v > 0 and (size or call.name == "arange")
    ]


def by_schema(call: Call) -> Iterator[tuple[Any, Any]]:
    """The given arguments with their entries in the schema, in the order of the flat arguments."""
    yield from zip(call.op._schema.arguments, call.args, strict=False)
    named = {a.name: a for a in call.op._schema.arguments}
    yield from ((named[name], given) for name, given in call.kwargs.items())


def safe(call: Call, placement: Placement) -> bool:
    """Some operators do not check the sizes of their arguments and would read outside of memory."""
    if UNSAFE.match(call.name):
        return False
    places = [(call.leaves()[0][k], axis.dim) for k, axis in placement.axes.items()]
    if call.name == "_fft_c2r":
        return all(dim not in call.args[1] for _, dim in places)
    if call.name in PIVOTED:
        whole = call.name != "lu_unpack" or (len(set(placement.axes.values())) == 1 and len(placement.axes) == 2)
        return whole and all(dim < v.ndim - (1 if v.dtype == torch.int32 else 2) for v, dim in places)
    if "batch_norm" in call.name:
        return set(placement.axes) == {0} and placement.axes[0].dim != 1
    if call.name in ("_cholesky_solve_helper", "_masked_softmax"):
        return len(placement.axes) == 2 and len(set(placement.axes.values())) == 1 and places[0][1] == 0
    if call.name in ("binary_cross_entropy", "_reshape_alias"):
        return 0 in placement.axes
    if "flash_attention" in call.name:
        return len({a for k, a in placement.axes.items() if k < 3}) == 1 and {0, 1, 2} <= set(placement.axes)
    if "_backward" in call.name and call.name != "_cdist_backward":
        leaves = call.leaves()[0]
        least = 2 if "group_norm" in call.name else leaves[0].ndim
        same = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.ndim >= min(least, leaves[0].ndim)]
        if "convolution" in call.name:
            same = same[:2]
        return set(same) <= set(placement.axes) and len({placement.axes[k].dim for k in same}) == 1
    if call.name == "native_group_norm":
        return list(placement.axes) == [0] and placement.axes[0].dim == 0 and placement.sized == (3,)
    return True


def special(leaves: list[Any], every: list[Placement], rule: SampleRule) -> Iterator[Placement]:
    """The same with arguments that hold the same for all samples, or the numbers of the samples."""
    for placement in every:
        first, *rest = placement.axes or [None]
        if first is None:
            continue
        if leaves[first].ndim and leaves[first].is_floating_point():
            yield Placement(placement.axes, {**placement.kinds, first: SAME}, placement.sized)
        whole = [k for k in (first, *rest) if leaves[k].dtype == torch.int64]
        if rule.index and (whole or not rest):
            yield Placement(placement.axes, {**placement.kinds, (whole or [first])[0]: NUMBER}, placement.sized)


def axes_of(value: Tensor) -> Iterator[SampleAxis]:
    """The samples outside, inside or in the middle of each dim."""
    for dim, size in enumerate(value.shape):
        yield SampleAxis(dim, 1, size)
        if size > 1:
            yield SampleAxis(dim, size, 1)
        if size == 4:
            yield SampleAxis(dim, 2, 2)


def aligned(leaves: list[Any], chosen: Any, options: Mapping[int, list[SampleAxis]]) -> Iterator[list[SampleAxis]]:
    """The same dim and layout in all, counted from the right or from the left."""
    lead, *rest = chosen
    for axis in options[lead]:
        right, left = [axis], [axis]
        for other in rest:
            from_right = axis.dim - leaves[lead].ndim + leaves[other].ndim
            right += [a for a in options[other] if same(a, from_right, axis, leaves[other])][:1]
            left += [a for a in options[other] if same(a, axis.dim, axis, leaves[other])][:1]
        for found in [right] if right == left else [right, left]:
            if len(found) == len(chosen):
                yield found


def same(option: SampleAxis, dim: int, axis: SampleAxis, value: Tensor) -> bool:
    """Whether `option` lies in `dim` as `axis` does, or has only one entry for each sample there."""
    return option.dim == dim and ((option.outer, option.inner) == (axis.outer, axis.inner) or value.shape[dim] == 1)
