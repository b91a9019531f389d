"""Code that ties itself to the batch size: one graph for each size where that is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, Norms, SamplesMixed
from support import oracle
from support.selection import one_in

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR), torch.tensor([0, 2, 1, 1, 0, 2])
Layer = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """`function(layer, x)` with a linear layer 4 -> 3."""

    def __init__(self, function: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


def plain_number(layer: Layer, x: Tensor) -> Tensor:
    size = int(x.shape[0])
    return layer(x).reshape(size, 3)


def numpy_size(layer: Layer, x: Tensor) -> Tensor:
    return layer(x.reshape(int(np.prod(x.shape)) // 4, 4))


def divided(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) / int(x.shape[0]) + math.floor(x.shape[0]) / int(x.shape[0])


def harmless_branch(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] % 7 != 3 else layer(x).contiguous()


def copied_for_several(layer: Layer, x: Tensor) -> Tensor:
    """A reshape that is a view for one sample alone, and a copy that is none there."""
    rows = layer(torch.stack([x, x.sin()], 1)).transpose(0, 1).reshape(2 * len(x), 3)
    rows = rows.tanh().view(2, len(x), 3).permute(1, 0, 2).contiguous().view(len(x), 2, 3).sum(1)
    return rows + rows[:, 1].reshape(len(x), -1)


def of_a_root(layer: Layer, x: Tensor) -> Tensor:
    """Numbers that follow the batch size in any way, and are no sizes."""
    share = torch.tensor([math.log(len(x) + 1.0), 1.0], dtype=x.dtype)
    return layer(x) * math.exp(1 / len(x)) / math.sqrt(len(x)) + share.sum()


EXACT = [plain_number, numpy_size, divided, harmless_branch, copied_for_several, of_a_root]


def step_of(function: Callable[[Layer, Tensor], Tensor], loss: Any = F.cross_entropy) -> Any:
    return psg_fx.transform(Model(function), loss, backend="eager")


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("function", one_in(3, EXACT))
def test_one_graph_for_each_size(function: Callable[[Layer, Tensor], Tensor]) -> None:
    step = step_of(function)
    for size in (6, 4, 1, 6):
        x, y = X[:size], Y[:size]
        losses, grads = oracle.loop_grads(step.model, F.cross_entropy, x, y)
        out = step(x, y)
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12
    assert len(step.captures) == 3


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(4, [f.__name__ for f in EXACT]))
def test_no_samples(name: str) -> None:
    """Rows are empty and sums are zero, whatever the code would divide by."""
    function: Callable[[Layer, Tensor], Tensor] = globals()[name]
    asked = [Grads(), Norms(), ClippedSum(1.0)]
    loss = lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(out)  # noqa: E731
    step = psg_fx.transform(Model(function), loss, quantities=asked, backend="eager")
    for _ in range(2):
        out = step(X[:0], Y[:0])
        assert out.losses.shape == out.norms.shape == (0,)
        for key, p in step.model.named_parameters():
            assert out.grads[key].shape == (0, *p.shape)
            assert torch.equal(out.clipped_sum[key], torch.zeros_like(p))
    _, grads = oracle.loop_grads(step.model, F.cross_entropy, X, Y)
    assert oracle.worst_error(step(X, Y).grads, grads) < 1e-12
    without = psg_fx.transform(Model(function), backend="eager")
    if function in (divided, of_a_root):  # the model returns what it is of the whole batch
        with pytest.raises(SamplesMixed, match="divide in the loss"):
            without(X[:0])
        return
    without(X[:0]).sum().backward()
    assert without.model.layer.weight.grad_sample.shape == (0, 3, 4)


def test_distances_of_all_rows() -> None:
    """Torch computes them by products from 26 rows on."""
    table = torch.randn(5, 3, dtype=torch.float64, generator=GENERATOR)
    step = step_of(lambda layer, x: torch.cdist(layer(x.repeat_interleave(6, 0)), table).view(-1, 6, 5).sum(1))
    _, grads = oracle.loop_grads(step.model, F.cross_entropy, X, Y)
    assert oracle.worst_error(step(X, Y).grads, grads) < 1e-12
    assert step(X[:2], Y[:2]).losses.shape == (2,)
    assert len(step.captures) == 1


def test_it_is_said_once_and_kept_in_the_plan() -> None:
    step = step_of(plain_number)
    with pytest.warns(UserWarning, match=r"one graph for each batch size: .* \(test_capture.py:\d+: size = int\(x.sh"):
        step(X, Y)
    step(X[:4], Y[:4])  # warnings are errors here
    assert "one graph for each batch size" in step.explain()


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
def test_buffers_are_written_by_the_number_of_the_batch() -> None:
    """And losses by that of one sample."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        layer.total.mul_(1 + math.log(len(x)))
        found: Tensor = layer(x) * math.sqrt(len(x))
        return found

    step = step_of(forward)
    step.model.layer.register_buffer("total", torch.ones((), dtype=torch.float64))
    out = step(X[:4], Y[:4])
    assert oracle.worst_error(out.grads, oracle.loop_grads(step.model, F.cross_entropy, X[:4], Y[:4])[1]) < 1e-12
    assert abs(step.model.layer.total.item() - (1 + math.log(4))) < 1e-14


def test_labels_of_eight_bits() -> None:
    losses = (F.cross_entropy, lambda out, y: F.nll_loss(out.log_softmax(-1), y, ignore_index=1))
    for loss in losses:
        step = step_of(lambda layer, x: layer(x), loss)
        truth = oracle.loop_grads(step.model, loss, X, Y)[1]
        assert oracle.worst_error(step(X, Y.to(torch.uint8)).grads, truth) < 1e-12


def test_without_a_loss() -> None:
    model = Model(plain_number)
    _, grads = oracle.loop_grads(model, lambda out: out.sin().sum(), X)
    step = psg_fx.transform(model, backend="eager")
    with pytest.warns(UserWarning, match="one graph for each batch size"):
        step(X).sin().sum().backward()
    assert oracle.worst_error({n: p.grad_sample for n, p in model.named_parameters()}, grads) < 1e-12


def repeated_for_one(layer: Layer, x: Tensor) -> Tensor:
    noise = x[:, :1]
    if noise.shape[0] == 1:
        noise = noise.expand(x.shape[0], -1)
    return layer(x) * noise


def checked_beside_a_number(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    if int(x.shape[0]) != y.shape[0] or (y.shape[0] == 1 and x.shape[0] > 1):
        raise ValueError("other samples")
    return y


def said_of_large_ones(layer: Layer, x: Tensor) -> Tensor:
    assert x.shape[0] > 4 or x.ndim == 2
    return layer(x)


@pytest.mark.parametrize("function", [repeated_for_one, checked_beside_a_number, said_of_large_ones])
def test_another_branch_for_one_sample_that_computes_the_same(function: Callable[[Layer, Tensor], Tensor]) -> None:
    model = Model(function)
    losses, grads = oracle.loop_grads(model, lambda out: out.sin().sum(), X)
    step = psg_fx.transform(model, lambda out: out.sin().sum(), backend="eager")
    with pytest.warns(UserWarning, match="one graph for each batch size"):
        out = step(X)
    assert oracle.worst_error(out.grads, grads) < 1e-12
    torch.testing.assert_close(out.losses, losses)


def test_what_only_a_cast_looks_at_is_not_computed() -> None:
    """Export writes what it knows of the argument of `x.to` behind it: an op without a result, which is always run."""
    step = step_of(lambda layer, x: layer(x).to(x.dtype) + 0 * layer(x).sin().to(x.dtype).shape[1])
    step(X, Y)
    targets = [str(node.target) for node in step.graphs["captured"].graph.nodes]
    assert not [name for name in targets if "assert" in name or "sin" in name]


class Folded(nn.Module):
    """Elements of a tensor of 2 B rows, counted inside of a composite op, of which B is found again as a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.norm = nn.Bilinear(2, 2, 1, bias=False), nn.GroupNorm(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        rows = self.pairs(x, x.sin())
        rows = torch.cat([rows, rows * 2], 1).repeat_interleave(2, 0).reshape(2 * x.shape[0], 1, 2)
        weight = self.norm.weight * (self.norm.weight.detach().abs() > 0.2)
        return F.group_norm(rows, 1, weight, self.norm.bias).reshape(x.shape[0], 2, 1, 2)


def test_sizes_are_written_by_those_of_inputs() -> None:
    model = Folded().double()

    def loss(out: Tensor) -> Tensor:
        return out.square().sum()

    step = psg_fx.transform(model, loss, backend="eager")
    for size in (5, 1):
        x = X[:size].unflatten(1, (2, 2))
        _, want = oracle.loop_grads(model, loss, x)
        assert oracle.worst_error(step(x).grads, want) < 1e-12
