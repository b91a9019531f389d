"""Loops over tiles write what belongs to their tile."""

from __future__ import annotations

import types

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._inductor.codegen import cpp
from torch._inductor.virtualized import V

import psg_fx
from psg_fx.torch_private.mended import inductor_mended
from psg_fx.torch_private.tiled import tiles_apart
from support import oracle

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("fresh_compiler")]


def apart(x: Tensor) -> Tensor:
    """Sums whose first and last loops are tiled, and one between them is not; 18 is two more than a vector, or than
    several.
    """
    v = x * (torch.erf(x) + 1) * 0.5
    rows = nn.functional.pad(v, (0, 0, 0, 0, 0, 10), value=0.5)
    return rows @ nn.functional.pad(v.permute(3, 2, 1, 0), (0, 0, 0, 10), value=0.5)


def test_a_sum_within_tiles_that_lie_apart() -> None:
    """Written for whole vectors, the last tile of each row would lie over the first of the next."""
    x = torch.randn(1, 8, 18, 18).to(memory_format=torch.channels_last)
    with inductor_mended():
        found = torch.compile(apart)(x)
    torch.testing.assert_close(found, apart(x))


@pytest.mark.slow
def test_convolutions_whose_channels_lie_last() -> None:
    """Gradients of weights are summed within tiles of the channels, of which there are fewer than a vector holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(300, 3))
    model, loss = model.to(memory_format=torch.channels_last), nn.functional.cross_entropy
    x, y = torch.randn(7, 2, 12, 12).to(memory_format=torch.channels_last), torch.randint(3, (7,))
    step = psg_fx.transform(model, loss, dynamic=False)
    for _ in range(5):
        out = step(x, y)
    _, grads = oracle.loop_grads(model, loss, x, y)
    assert oracle.worst_error(out.grads, grads) < 1e-5


@pytest.mark.parametrize(
    ("step", "buffers", "fused"), [(16, {"of": 1}, False), (1, {"of": 1}, True), (16, {}, True)]
)  # fmt: skip
def test_what_fused_loops_keep(step: int, buffers: dict[str, int], fused: bool) -> None:
    """Of a tiled loop they would keep one place.  Which programs are compiled to such loops is not known here."""
    loop = cpp.LoopLevel(var=sympy.Symbol("x0"), size=sympy.Integer(20))
    loop.steps = sympy.Integer(step)
    kernel = types.SimpleNamespace(loop_nest=cpp.LoopNest([loop]), ranges=[sympy.Integer(20)])
    with tiles_apart(), V.set_local_buffer_context(types.SimpleNamespace(local_buffers=buffers)):
        fit = cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
        assert fit(None, [kernel, kernel], 1) is fused
