"""The joint graph is proven: whatever keeps the samples apart forward has a backward that is found to do so, and in an
accepted one the rows of sample i are what the joint graph of that sample alone computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_batch import APART
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from psg_fx.graph import facts
from psg_fx.graph.history import History
from psg_fx.graph.strides import free_of_strides
from psg_fx.passes.differentiate import differentiate
from psg_fx.passes.independence.probe import take
from psg_fx.passes.pipeline import BATCH, UNREDUCE
from psg_fx.passes.runner import run
from psg_fx.passes.sites import find_sites
from support.graphs import captured
from support.selection import one_in

Program = Callable[[Tensor], Any]


class Around(nn.Module):
    """A linear layer, so that a gradient passes through the program."""

    def __init__(self, program: Program, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.program, self.parts = nn.Linear(6, 6), program, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.first(x))


def loss(out: Tensor) -> Tensor:
    real = torch.view_as_real(out) if out.is_complex() else out.double()
    return (real.sin() + 0.3 * real.square()).sum()


def joint(model: nn.Module, with_loss: bool = True) -> GraphModule:
    """The joint graph, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model.eval()
        gm = free_of_strides(captured(model, loss if with_loss else None, (torch.randn(4, 6),)))
    history, state = History(), gm.meta["state"]
    for step in (BATCH, UNREDUCE, find_sites, differentiate):
        gm = run(step, gm, history)
    gm.meta["state"] = state
    return gm


def images(channels: int = 2, side: int = 4) -> Callable[[Tensor], Tensor]:
    """`[B, 6]` as images `[B, channels, side, side]`."""
    repeats = -(-channels * side * side // 6)
    return lambda x: x.repeat(1, repeats)[:, : channels * side * side].view(-1, channels, side, side)


to_image = images()
FURTHER: dict[str, Callable[[], nn.Module]] = {
    "deep": lambda: Around(lambda x: x.tanh(), nn.Linear(6, 6)),
    "instance norm": lambda: Around(lambda x: F.instance_norm(to_image(x))),
    "instance norm with scales": lambda: Around(
        lambda x: F.instance_norm(to_image(x), weight=torch.arange(1.0, 3), bias=torch.ones(2))
    ),
    "group norm": lambda: Around(lambda x: F.group_norm(to_image(x), 2)),
    "layer norm": lambda: Around(lambda x: F.layer_norm(x.view(-1, 2, 3), (3,))),
    "rms norm": lambda: Around(lambda x: F.rms_norm(x.view(-1, 2, 3), (3,))),
    "batch norm in eval mode": lambda: Around(lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6))),
    "convolution": lambda: Around(lambda x: F.conv2d(to_image(x), torch.arange(24.0).view(3, 2, 2, 2).sin())),
    "grouped convolution": lambda: Around(
        lambda x: F.conv2d(to_image(x), torch.arange(8.0).view(2, 1, 2, 2).sin(), stride=2, padding=1, groups=2)
    ),
    "transposed convolution": lambda: Around(
        lambda x: F.conv_transpose2d(to_image(x), torch.arange(24.0).view(2, 3, 2, 2).sin())
    ),
    "max pool": lambda: Around(lambda x: F.max_pool2d(to_image(x), 2)),
    "average pool": lambda: Around(lambda x: F.avg_pool2d(to_image(x), 2)),
    "adaptive pool": lambda: Around(lambda x: F.adaptive_avg_pool2d(to_image(x), 3)),
    "adaptive max pool": lambda: Around(lambda x: F.adaptive_max_pool2d(to_image(x), 3)),
    "nearest": lambda: Around(lambda x: F.interpolate(to_image(x), scale_factor=2)),
    "bilinear": lambda: Around(lambda x: F.interpolate(to_image(x), size=(3, 5), mode="bilinear")),
    "bicubic": lambda: Around(lambda x: F.interpolate(to_image(x), size=(3, 5), mode="bicubic")),
    "reflected": lambda: Around(lambda x: F.pad(to_image(x), (1, 1, 2, 0), mode="reflect")),
    "replicated": lambda: Around(lambda x: F.pad(to_image(x), (1, 1, 2, 0), mode="replicate")),
    "attention": lambda: Around(lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 3, 2).sin()] * 3)),
    "masked attention": lambda: Around(
        lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 3, 2).sin()] * 3, attn_mask=torch.ones(3, 3).tril())
    ),
    "heads folded into the batch": lambda: Around(
        lambda x: (x.view(-1, 2, 3).transpose(0, 1).reshape(2, -1, 3).flatten(0, 1).softmax(1))
    ),
    "distances": lambda: Around(lambda x: torch.cdist(x.view(-1, 2, 3), x.view(-1, 2, 3).cos())),
    "bilinear form": lambda: Around(lambda x: F.bilinear(x, x.cos(), torch.arange(72.0).view(2, 6, 6).sin())),
    "grid sample": lambda: Around(
        lambda x: F.grid_sample(to_image(x), x[:, :4].view(-1, 1, 2, 2).sin(), align_corners=False)
    ),
    "activations": lambda: Around(
        lambda x: sum(f(x) for f in (F.gelu, F.silu, F.elu, F.mish, F.hardswish, F.hardsigmoid, F.softplus,
                                     F.logsigmoid, F.leaky_relu, F.hardtanh, F.softshrink, F.hardshrink))
    ),
    "prelu": lambda: Around(lambda x: F.prelu(x, torch.full((6,), 0.2))),
    "gated": lambda: Around(lambda x: F.glu(x)),
    "diagonal": lambda: Around(lambda x: torch.diagonal(x.unsqueeze(1) * x.unsqueeze(2), dim1=1, dim2=2)),
    "windows": lambda: Around(lambda x: x.unfold(1, 3, 2)),
    "blocks of the batch": lambda: Around(lambda x: torch.cat([x, x.sin()])[x.shape[0] :]),
    "cumulative": lambda: Around(lambda x: x.cumprod(1) + x.cumsum(1).logcumsumexp(1)),
    "extremes": lambda: Around(lambda x: x.cummax(1)[0] + x.sort(1)[0] + x.amax(1, keepdim=True)),
    "linear algebra": lambda: Around(
        lambda x: torch.linalg.solve(x[:, :4].view(-1, 2, 2) + 9 * torch.eye(2), x[:, :2, None])
    ),
    "norms": lambda: Around(lambda x: F.normalize(x, dim=1) + x.var(1, keepdim=True) + x.std(1, keepdim=True)),
    "fourier": lambda: Around(lambda x: torch.fft.rfft(x, dim=1).abs()),
    "lstm": lambda: Recurrent(nn.LSTM(3, 4, batch_first=True)),
    "gru": lambda: Recurrent(nn.GRU(3, 4)),
}  # fmt: skip


class Recurrent(nn.Module):
    """A layer before a recurrent one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), layer

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 2, 3)
        return self.layer(h if self.layer.batch_first else h.transpose(0, 1))[0].relu()


def proven(gm: GraphModule) -> int:
    """The number of backward nodes whose rows are those of single samples."""
    generator = torch.Generator().manual_seed(1)
    _, *cotangents = gm.graph.find_nodes(op="placeholder")[len(gm.meta["state"]) :]
    size = {facts.graph_facts(gm).batch: 3}
    shapes = [(3, 6), *([int(s.subs(size)) for s in facts.shape(n.meta["val"])] for n in cotangents)]
    given = [torch.randn(*shape, generator=generator) for shape in shapes]
    dims = [facts.SampleAxis(0), *(facts.fact(n).samples for n in cotangents)]

    def values(parts: list[Tensor]) -> dict[Any, Any]:
        recorder = Interpreter(gm, garbage_collect_values=False)
        with torch.no_grad():
            recorder.run(*gm.meta["state"], *parts)
        return recorder.env

    whole, count = values(given), 0
    for i in range(3):
        alone = values([take(value, dim, i) for value, dim in zip(given, dims, strict=True)])
        for node, value in whole.items():
            fact = facts.fact(node)
            if "empty" in str(node.target):  # holds nothing yet
                continue
            if fact.proof and isinstance(value, Tensor) and not isinstance(fact.samples, tuple) and not fact.index:
                rows = take(value, fact.samples, i)
                torch.testing.assert_close(rows, alone[node], rtol=1e-4, atol=1e-5, equal_nan=True)
                count += 1
    return count


PROGRAMS = {name: lambda program=program: Around(program) for name, program in APART.items()}
del PROGRAMS["assignment"]  # torch has no backward of aten.copy
WITHOUT_GRADIENT = {"embedding", "table", "one hot", "searchsorted"}
"""Programs that only ask which number x is."""


@pytest.mark.parametrize("name", one_in(5, PROGRAMS))
def test_a_program_that_is_apart_has_a_backward_that_is(name: str) -> None:
    if name == "quantile" and torch.__version__ < "2.12":
        pytest.skip("torch.export of this version does not trace quantile with a symbolic batch size")
    assert bool(proven(joint(PROGRAMS[name]()))) == (name not in WITHOUT_GRADIENT)


@pytest.mark.parametrize("name", one_in(2, FURTHER))
def test_rows_of_the_backward_are_those_of_single_samples(name: str) -> None:
    assert proven(joint(FURTHER[name]()))


@pytest.mark.parametrize("name", one_in(8, PROGRAMS | FURTHER))
def test_so_it_is_without_a_loss(name: str) -> None:
    if name == "quantile" and torch.__version__ < "2.12":
        pytest.skip("torch.export of this version does not trace quantile with a symbolic batch size")
    assert bool(proven(joint((PROGRAMS | FURTHER)[name](), with_loss=False))) == (name not in WITHOUT_GRADIENT)
