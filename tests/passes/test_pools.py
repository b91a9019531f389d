"""Max pooling by vectors gives torch's values and places; other windows are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx.passes.compile.pools import pool_by_vectors
from support import oracle
from support.selection import one_in

aten = torch.ops.aten
Pooled = tuple[Tensor, Tensor]

WINDOWS: dict[str, Callable[[Tensor], Pooled]] = {
    "both dims": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [2, 2]),
    "one number": lambda x: aten.max_pool2d_with_indices(x, [2]),
    "one image": lambda x: aten.max_pool2d_with_indices(x[0], [2, 2]),
    "in full": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [2, 2], [0, 0], [1, 1], True),
    "channels first": lambda x: aten.max_pool2d_with_indices(x.transpose(0, 1), [2, 2]),
}
LEFT: dict[str, Callable[[Tensor], Pooled]] = {
    "overlapping": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1]),
    "padded": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [2, 2], [1, 1]),
    "dilated": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [2, 2], [0, 0], [2, 2]),
    "wider": lambda x: aten.max_pool2d_with_indices(x, [3, 3]),
    "odd": lambda x: aten.max_pool2d_with_indices(x[..., 1:], [2, 2]),
    "columns first": lambda x: aten.max_pool2d_with_indices(x.transpose(-1, -2), [2, 2]),
    "channels last": lambda x: aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), [2, 2]),
    "double": lambda x: aten.max_pool2d_with_indices(x.double(), [2, 2]),
}


def with_gradient(pool: Callable[[Tensor], Pooled]) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Its values and places, and the places once more, as a backward pass would read them."""

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, places = pool(x)
        return values, places, places.sum(-1)

    return both


def images() -> Tensor:
    """Some windows hold equal entries, some zeros of both signs, one is no number."""
    found = torch.randint(-2, 3, (3, 2, 6, 8), generator=torch.Generator().manual_seed(0)).float()
    found[found == 0] *= torch.where(torch.rand(int((found == 0).sum())) < 0.5, -1.0, 1.0)
    found[1, 1, 2, 5] = torch.nan
    return found


def rewritten(pool: Callable[[Tensor], Pooled], mode: str = "fake") -> tuple[GraphModule, tuple[Any, ...]]:
    """The graph after the pass, and what it gave before."""
    gm = make_fx(with_gradient(pool), tracing_mode=mode)(images())  # type: ignore[arg-type]
    before = gm(images())
    pool_by_vectors(gm)
    gm.graph.lint()
    gm.recompile()
    return gm, before


def ops(gm: GraphModule) -> set[object]:
    return {node.target for node in gm.graph.nodes}


@pytest.mark.parametrize("name", WINDOWS)
def test_values_and_places_are_those_of_torch(name: str) -> None:
    gm, before = rewritten(WINDOWS[name])
    assert aten.max_pool2d_with_indices.default not in ops(gm)
    for got, want in zip(gm(images()), before, strict=True):
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LEFT)
def test_other_windows_are_left(name: str) -> None:
    assert aten.max_pool2d_with_indices.default in ops(rewritten(LEFT[name])[0])


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("layout", one_in(2, [torch.contiguous_format, torch.channels_last]))
def test_a_compiled_step(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 5),
    ).to(memory_format=layout)  # fmt: skip
    x, y = torch.randn(7, 2, 12, 12).to(memory_format=layout), torch.randint(5, (7,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="inductor", dynamic=True)
    for size in (7, 4):
        grads = step(x[:size], y[:size]).grads
        for name, want in oracle.loop_grads(model, F.cross_entropy, x[:size], y[:size])[1].items():
            assert oracle.relative_error(grads[name], want) < 1e-5
