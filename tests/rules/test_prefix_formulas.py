"""Formulas in other ops have the values and the gradients of the ops that they stand for, however operands broadcast,
whichever dim is named, and where elements are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import NotYetSupported
from psg_fx.op_table import _ROWS, known, operator
from psg_fx.ops import in_other_ops as in_other_ops

aten = torch.ops.aten
PLACES = torch.tensor([[0, 2], [1, 1]])
MASK = torch.tensor([True, False, True])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def whole(*shape: int) -> Tensor:
    """With elements that are equal, also to their opposites, and zeros."""
    return torch.randint(-1, 2, shape).double()


def calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for shapes in (((2, 3, 4), (3, 4)), ((3, 4), (2, 3, 4)), ((3, 1), (2, 3, 4)), ((2, 3, 1), (4,)), ((4,), (4,))):
        for dim in range(-len(max(shapes, key=len)), len(max(shapes, key=len))):
            yield aten.cosine_similarity.default, (*(drawn(*s) for s in shapes), dim)
    yield aten.cosine_similarity.default, (drawn(3, 4) * 1e-3, drawn(3, 4), 1, 0.5)
    for make in (drawn, whole):
        for p in (1.0, 1.5, 2.0, math.inf):
            yield (
                aten.cdist.default,
                (make(2, 3, 4), make(5, 4) + (0.25 if make is whole and p == 2.0 else 0.0), p, None),
            )
        yield aten.max.default, (make(3, 4),)
        yield aten.min.default, (make(3, 4),)
        for op in (aten.median.default, aten.nanmedian.default):
            yield op, (make(3, 5),)
    for dim in (0, -1):
        yield aten.sort.default, (drawn(3, 4), dim, True)
        yield aten.sort.stable, (whole(3, 4), {"stable": True, "dim": dim})
        yield aten.topk.default, (drawn(3, 4), 2, dim)
    yield aten.scaled_dot_product_attention.default, (drawn(2, 3, 5, 4), drawn(2, 3, 6, 4), drawn(2, 3, 6, 2))
    yield aten.einsum.default, ("iij,jk->ik", [drawn(3, 3, 4), drawn(4, 2)])
    yield aten.einsum.default, ("ij,ij,i", [drawn(3, 4), drawn(3, 4), drawn(3)])
    for accumulate in (False, True):
        yield aten.index_put.default, (drawn(3, 4), [MASK], drawn(4), accumulate)
    yield aten.diagonal.default, (drawn(3, 4, 5), -1, 0, 2)
    yield aten.unfold.default, (drawn(3, 7), 1, 3, 2)
    yield aten.gather.default, (drawn(2, 3), 1, PLACES)
    yield aten.index_select.default, (drawn(2, 3), -1, torch.tensor([2, 0, 0]))
    yield aten.roll.default, (drawn(3, 4), [1, -1], [0, 1])
    yield aten.flip.default, (drawn(3, 4), [1])
    yield aten.embedding.default, (drawn(4, 3), PLACES, 1)
    for dim in (0, 1, -1):
        yield aten._weight_norm.default, (drawn(3, 4), drawn() if dim == -1 else drawn(*((3, 1), (1, 4))[dim]), dim)
    for bounds in ((1, None, 1), (-3, -1, 1), (0, 9, 2), (3, 1, 1)):
        yield aten.slice.Tensor, (drawn(2, 5), 1, *bounds)
    for batch in ((), (2,)):
        yield aten.conv1d.default, (drawn(*batch, 4, 7), drawn(6, 2, 3), drawn(6), [2], [1], [2], 2)
        yield aten.conv2d.default, (drawn(*batch, 2, 5, 6), drawn(3, 2, 2, 3), None, [1, 2], [1, 0])
        yield aten.conv3d.default, (drawn(*batch, 2, 3, 4, 3), drawn(1, 2, 2, 2, 2))
    for bounds in ((1, 4, 2), (-2, None, 1), (4, 2, 1)):
        rows = len(range(*slice(*bounds).indices(5)))
        yield aten.slice_scatter.default, (drawn(5, 3), drawn(rows, 3), 0, *bounds)
    yield aten.select_scatter.default, (drawn(3, 4), drawn(3), 1, -1)
    yield aten.split.Tensor, (drawn(2, 5), 2, -1)
    yield aten.split_with_sizes.default, (drawn(2, 5), [1, 4], 1)


CALLS = list(calls())


def run(function: Any, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The values, and the gradients of a sum with fixed weights."""
    flat, spec = torch.utils._pytree.tree_flatten(args)
    given = [v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in flat]
    *placed, last = torch.utils._pytree.tree_unflatten(given, spec)
    found = function(*placed, **last) if isinstance(last, dict) else function(*placed, last)
    values = [found] if isinstance(found, Tensor) else list(found)
    floats = [v for v in values if v.is_floating_point()]
    total = sum((v * torch.arange(1.0, v.numel() + 1, dtype=v.dtype).reshape(v.shape).sin()).sum() for v in floats)
    asked = [v for v in given if isinstance(v, Tensor) and v.requires_grad]
    return values, list(torch.autograd.grad(total, asked, materialize_grads=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(len(CALLS)), ids=lambda k: f"{CALLS[k][0]}-{k}")
def test_values_and_gradients(place: int) -> None:
    op, args = CALLS[place]
    said = known(op)
    expected = run(op, args)
    for function in filter(None, (said.formula, said.prefix_formula)):
        torch.testing.assert_close(run(function, args), expected, rtol=1e-10, atol=1e-12)


def test_every_formula_is_tried() -> None:
    tried = {op for op, _ in CALLS}
    ours = {operator(key) for key, said in _ROWS.items() if said.formula or said.prefix_formula} - {None}
    assert {op for op in ours if op.namespace == "aten"} == tried


class Prompt(nn.Module):
    """Rows that a layer makes of parameters alone."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rows, self.layer = nn.Parameter(torch.randn(3, 1, 2)), layer

    def forward(self, x: Tensor) -> Tensor:
        made, last = self.layer(self.rows)
        return x.sum(1, keepdim=True) * made.flatten() + sum(
            part.sum() for part in (last if isinstance(last, tuple) else (last,))
        )


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("make", [lambda: nn.LSTM(2, 4, proj_size=3), lambda: nn.GRU(2, 2, 2, bidirectional=True)])
def test_recurrent_layers_of_parameters(make: Any) -> None:
    torch.manual_seed(0)
    model = Prompt(make()).double()
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    step = psg_fx.transform(model, lambda out, y: (out.sin() * y).sum(1), backend="eager", progress=False)
    found = step(x, y).grads
    for name, p in model.named_parameters():
        for i in range(3):
            (expected,) = torch.autograd.grad((model(x[i : i + 1]).sin() * y[i]).sum(), p)
            torch.testing.assert_close(found[name][i], expected, rtol=1e-10, atol=1e-12)


class Aligned(nn.Module):
    """A loss of parameters alone, whose op of psg_fx has no derivative there."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        targets, lengths = torch.tensor([[1, 2]]), (torch.tensor([4]), torch.tensor([2]))
        return x * nn.functional.ctc_loss(self.w.log_softmax(2), targets, *lengths)


def test_what_has_no_derivative_is_refused_and_never_zero() -> None:
    step = psg_fx.transform(Aligned(), lambda out, y: (out * y).sum(1), backend="eager", progress=False)
    with pytest.raises(NotYetSupported, match="ctc"):
        step(torch.randn(3, 6), torch.randn(3, 6))
