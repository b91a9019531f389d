"""Large convolutions of float32 by a matrix unit are those of torch; all others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx.ops.products import by_onednn as onednn
from psg_fx.ops.products import convolutions_in_parts as parts
from psg_fx.ops.products import in_parts
from psg_fx.ops.products.convolutions_in_parts import convolution_in_parts, weight_gradients_in_parts
from psg_fx.ops.products.grouped_convolution import grouped_weight_gradient
from psg_fx.passes.compile import compile as compiling
from psg_fx.passes.compile import convolutions
from psg_fx.passes.compile.convolutions import convolve_elsewhere
from psg_fx.torch_private import native
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.tracer import trace_fakes
from support import oracle
from support.selection import one_in

aten = torch.ops.aten
BY = in_parts.in_parts
UNIT = {"convolution": convolution_in_parts, "gradients": weight_gradients_in_parts}
TORCH = (aten.convolution.default, aten.convolution_backward.default, grouped_weight_gradient)
X, W, B, G = (6, 20, 9, 17), (40, 20, 3, 3), (40,), (6, 40, 9, 17)

Function = Callable[..., Any]


def convolved(
    padding: int = 1, stride: int = 1, dilation: int = 1, groups: int = 1, transposed: bool = False
) -> Function:  # fmt: skip
    def run(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        zeros = [0] * (x.ndim - 2)
        window = [stride], [padding], [dilation]
        return aten.convolution(x, w, bias[0] if bias else None, *window, transposed, zeros, groups)

    return run


def backward(*mask: bool, stride: int = 1, transposed: bool = False) -> Function:
    def run(g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        found = aten.convolution_backward(g, x, w, [40], [stride] * 2, [1, 1], [1, 1], transposed, [0, 0], 1, mask)
        return [value for value, asked in zip(found, mask, strict=True) if asked]

    return run


def of_samples(g: Tensor, x: Tensor) -> Tensor:
    flat = [value.reshape(1, -1, *value.shape[2:]) for value in (g, x)]
    return grouped_weight_gradient(*flat, x.shape[0], [3, 3], [1, 1], [1, 1], [1, 1])


def of_folds(g: Tensor, x: Tensor) -> Tensor:
    """Each sample has two images, of which its gradient is the sum."""
    flat = [value.reshape(2, -1, *value.shape[2:]) for value in (g, x)]
    return grouped_weight_gradient(*flat, x.shape[0] // 2, [3, 3], [1, 1], [1, 1], [1, 1])


CASES: dict[str, tuple[Function, list[tuple[int, ...]], set[str], set[Any]]] = {
    "alone": (convolved(), [X, W], {"convolution"}, set()),
    "bias": (convolved(), [X, W, B], {"convolution"}, set()),
    "places apart": (convolved(padding=2, dilation=2), [X, W, B], {"convolution"}, set()),
    "transposed": (convolved(transposed=True), [X, (20, 40, 3, 3), B], {"convolution"}, set()),
    "sequences": (convolved(), [(6, 20, 50), (40, 20, 3)], {"convolution"}, set()),
    "of the input": (backward(True, False, False), [G, X, W], {"convolution"}, set()),
    "of the weight": (backward(False, True, False), [G, X, W], {"gradients"}, set()),
    "of both": (backward(True, True, False), [G, X, W], {"convolution", "gradients"}, set()),
    "of all": (
        backward(True, True, True), [G, X, W], {"convolution", "gradients"}, {aten.convolution_backward.default},
    ),
    "of samples": (of_samples, [G, X], {"gradients"}, set()),
    "steps of two": (convolved(stride=2), [X, W], set(), {aten.convolution.default}),
    "groups": (convolved(groups=2), [X, (40, 10, 3, 3)], set(), {aten.convolution.default}),
    "volumes": (convolved(), [(2, 20, 4, 5, 6), (40, 20, 3, 3, 3)], set(), {aten.convolution.default}),
    "backward of steps of two": (
        backward(True, True, False, stride=2), [(6, 40, 5, 9), X, W], set(), {aten.convolution_backward.default},
    ),
    "backward of a transposed one": (
        backward(True, True, False, transposed=True), [G, X, (20, 40, 3, 3)], set(),
        {aten.convolution_backward.default},
    ),
    "of samples of two images": (of_folds, [G, X], set(), {grouped_weight_gradient}),
    "another precision": (
        lambda x, w: convolved()(x.double(), w.double()).float(), [X, W], set(), {aten.convolution.default},
    ),
}  # fmt: skip
"""What is computed, of which shapes, by which ops of the unit, and which of torch's stay."""


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(convolutions.LEAST, BY, (0, 0))
    monkeypatch.setattr(convolutions, "USED", dict.fromkeys(UNIT.values(), 0))


@pytest.fixture
def compiled() -> None:
    for name in (parts.CONVOLUTION, parts.WEIGHT_GRADIENTS):
        native.begin(name)
    native.finish()


def traced(function: Function, shapes: list[tuple[int, ...]]) -> tuple[GraphModule, list[Tensor]]:
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


def targets(gm: GraphModule) -> set[Any]:
    return {node.target for node in gm.graph.nodes if node.op == "call_function"}


def hold(found: Any, exact: Any) -> None:
    """Within what torch's own summed gradients are off, which it computes where there is no unit: up to 2.4e-6."""
    for one, other in zip(*(value if isinstance(value, list) else [value] for value in (found, exact)), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=4e-6 * float(other.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_convolutions(name: str, any_size: None, compiled: None) -> None:
    function, shapes, unit, torchs = CASES[name]
    gm, inputs = traced(function, shapes)
    before = targets(gm)
    found = convolve_elsewhere(gm, inputs, BY)
    assert targets(gm) == before
    assert (found is gm) == (not unit)
    found.graph.lint()
    assert targets(found) & {*UNIT.values()} == {UNIT[name] for name in unit}
    assert targets(found) & {*TORCH} == torchs
    hold(found(*inputs), function(*(value.double() for value in inputs)))


OF_SAMPLES = {"of the input": 2, "of the weight": 2, "of both": 2, "of all": 2, "of samples": 2}
"""How many inputs hold samples, if it is not the first alone."""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_for_every_number_of_samples(name: str, any_size: None, compiled: None) -> None:
    function, shapes, *_ = CASES[name]
    dims = [0 if i < OF_SAMPLES.get(name, 1) else None for i in range(len(shapes))]
    gm = trace_fakes(function, symbolic_inputs([torch.empty(shape) for shape in shapes], dims))
    torch.manual_seed(0)
    inputs = [torch.randn(shape if dim is None else (11, *shape[1:])) for shape, dim in zip(shapes, dims, strict=True)]
    found = convolve_elsewhere(gm, inputs, BY)
    assert targets(found) & {*UNIT.values()}
    hold(found(*inputs), function(*(value.double() for value in inputs)))


@pytest.mark.parametrize(
    ("function", "shapes", "taken"),
    [
        (convolved(), [(16, 64, 32, 32), (64, 64, 3, 3)], True),
        (convolved(), [(16, 64, 7, 7), (64, 64, 3, 3)], False),  # fewer products
        (convolved(), [(64, 3, 64, 64), (64, 3, 3, 3)], False),  # three channels of 32
        (convolved(), [(256, 128, 4, 4), (128, 128, 3, 3)], False),  # zeros around
        (convolved(padding=0), [(16, 64, 32, 32), (64, 64, 1, 1)], False),  # each number is multiplied rarely
        (convolved(padding=0), [(16, 256, 32, 32), (256, 256, 1, 1)], True),
        (of_samples, [(16, 64, 32, 32), (16, 64, 32, 32)], True),
        (of_samples, [(64, 128, 8, 8), (64, 128, 8, 8)], False),  # gradients are more than products
    ],
)  # fmt: skip
def test_what_is_worth_packing(function: Function, shapes: list[tuple[int, ...]], taken: bool) -> None:
    gm = trace_fakes(
        function, symbolic_inputs([torch.empty(shape, device="meta") for shape in shapes], [None] * len(shapes))
    )
    assert (convolve_elsewhere(gm, [torch.empty(shape, device="meta") for shape in shapes], BY) is not gm) == taken


def test_where_there_is_no_unit(any_size: None) -> None:
    gm, inputs = traced(convolved(), [X, W])
    assert convolve_elsewhere(gm, inputs, onednn.by_onednn) is gm


def test_sizes_are_those_of_the_call() -> None:
    few, many = ([torch.empty(n, 64, 32, 32), torch.empty(64, 64, 3, 3)] for n in (0, 2))
    gm = trace_fakes(convolved(), symbolic_inputs([torch.empty(5, 64, 32, 32), many[1]], [0, None]))
    assert convolve_elsewhere(gm, few, BY) is gm
    assert convolution_in_parts in targets(convolve_elsewhere(gm, many, BY))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 18, 3, padding=1)
        self.second = nn.Conv2d(18, 20, (3, 5), dilation=(1, 2), bias=False)
        self.third = nn.ConvTranspose2d(20, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).tanh()).flatten(1)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("last", one_in(2, [True, False]))
def test_a_step(last: bool, any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the unit can compute, at two batch sizes, in whatever order the user's images lie."""
    made: list[set[Any]] = []
    original = convolutions.convolve_elsewhere

    def noted(gm: GraphModule, inputs: Any, by: Any) -> GraphModule:
        found = original(gm, inputs, by)
        made.append(targets(found))
        return found

    monkeypatch.setattr(compiling, "convolve_elsewhere", noted)
    monkeypatch.setattr(compiling, "elsewhere", lambda is_wanted: BY)
    torch.manual_seed(0)
    model, x, y = Images(), torch.randn(4, 2, 7, 13), torch.randn(4, 3 * 7 * 7)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    quantities = [psg_fx.Norms(), psg_fx.Grads(), psg_fx.ClippedSum(max_norm=0.1)]
    step = psg_fx.transform(model, nn.functional.mse_loss, quantities=quantities)
    for size in (4, 3):
        out = step(x[:size], y[:size])
        _, grads = oracle.loop_grads(model, nn.functional.mse_loss, x[:size], y[:size])
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5
        assert oracle.worst_error(out.grads, grads) < 1e-5
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-5
    assert made
    assert all(convolution_in_parts in ops for ops in made)
