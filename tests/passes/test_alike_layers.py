"""Layers that are alike are differentiated once, however they read each other, and the joint graph is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import psg_fx
from psg_fx.graph import facts
from psg_fx.graph.history import History
from psg_fx.graph.strides import free_of_strides
from psg_fx.graph.tracing import trace
from psg_fx.passes.differentiate import chain, differentiate, segments
from psg_fx.passes.pipeline import BATCH, UNREDUCE
from psg_fx.passes.runner import run
from psg_fx.passes.sites import find_sites
from psg_fx.torch_private.fakes import empty_as, symbolic_inputs
from support import oracle
from support.by_loop import ByLoop, close
from support.graphs import captured

LAYERS = 5


class Layer(nn.Module):
    """Norm, a gate, a mask, dropout: a dozen of ops, with a tuple among them."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        value, gate = self.mix(self.norm(x)).chunk(2, dim=-1)
        value = value if memory is None else value * memory
        value = value if mask is None else value.masked_fill(~mask, 0.5)
        return x + self.out(F.dropout(value.tanh() * gate.sigmoid() + gate.cos(), self.dropout)).exp().log1p()


class Stack(nn.Module):
    """Layers, and how they are wired."""

    def __init__(self, wired: Callable[[nn.ModuleList, Tensor], Any], tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Layer(dropout=dropout) for _ in range(1 if tied else LAYERS)]
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.layers, self.wired = nn.ModuleList(layers * (LAYERS if tied else 1)), wired

    def forward(self, x: Tensor) -> Any:
        found = self.wired(self.layers, self.first(x))
        return [self.last(each) for each in found] if isinstance(found, list) else self.last(found)


def in_a_row(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def all_read_later(layers: nn.ModuleList, x: Tensor) -> Tensor:
    seen = [x := layer(x) for layer in layers]
    return torch.stack(seen).square().sum(0) + seen[1] * seen[3]


def begun_with_zeros(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The first segment reads no tensor."""
    total = torch.zeros(x.shape[0])
    for layer in layers:
        x = layer(x)
        total = total + x.sum((1, 2))
    return x * total[:, None, None]


def of_one_memory(layers: nn.ModuleList, x: Tensor) -> Tensor:
    memory = x.sin()
    for layer in layers:
        x = layer(x, memory)
    return x + memory


def of_the_one_before_last(layers: nn.ModuleList, x: Tensor) -> Tensor:
    before = x
    for layer in layers:
        x, before = layer(x, before), x
    return x


def of_one_mask(layers: nn.ModuleList, x: Tensor) -> Tensor:
    mask = x.detach() > -0.5
    for layer in layers:
        x = layer(x, None, mask)
    return x


def detached_between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    seen = []
    for layer in layers:
        x = layer(x.detach())
        seen.append(x)
    return torch.stack(seen).sum(0)


def turned_between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """What is handed on lies in memory in another order from some layer on."""
    for i, layer in enumerate(layers):
        x = layer(x if i < 3 else x.transpose(1, 2).contiguous().transpose(1, 2))
    return x


def each_given(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return [x := layer(x) for layer in layers]


WIRED = [
    in_a_row, all_read_later, begun_with_zeros, of_one_memory, of_the_one_before_last, of_one_mask, detached_between,
    turned_between,
]  # fmt: skip


def loss_fn(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum() / out.shape[0]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ops each segment has that was differentiated."""
    found: list[int] = []
    original = chain.vjp

    def counted(segment: Any, *arguments: Any) -> Any:
        found.append(len(segment.nodes))
        return original(segment, *arguments)

    monkeypatch.setattr(chain, "vjp", counted)
    return found


@pytest.mark.parametrize(("wired", "tied"), [*((wired, False) for wired in WIRED), (of_one_memory, True)])
def test_against_the_loop(wired: Any, tied: bool, traces: list[int]) -> None:
    model = Stack(wired, tied).double()
    quantities = [psg_fx.Grads(), psg_fx.Norms(), psg_fx.ClippedSum(max_norm=0.7)]
    step = psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager")
    for size in (3, 1):
        x, y = torch.randn(size, 4, 6).double(), torch.randn(size, 4, 2).double()
        out, expected = step(x, y), ByLoop(model, loss_fn, quantities)(x, y)
        close(out.norms, expected.norms)
        for name, value in expected.grads.items():
            close(out.grads[name], value)
            close(out.clipped_sum[name], expected.clipped_sum[name])
    assert sum(traces) < LAYERS * 15, "each layer was traced for itself"


@pytest.mark.parametrize("frozen", [[], [2], [0, 1], [1, 3], [4]], ids=str)
def test_frozen_layers(frozen: list[int]) -> None:
    model = Stack(in_a_row).double()
    for i in frozen:
        model.layers[i].requires_grad_(False)
    model.first.requires_grad_(False)
    step = psg_fx.transform(model, loss_fn, quantities=psg_fx.Grads(), backend="eager")
    x, y = torch.randn(3, 4, 6).double(), torch.randn(3, 4, 2).double()
    out = step(x, y)
    for name, value in oracle.loop_grads(model, loss_fn, x, y)[1].items():
        close(out.grads[name], value)


def test_outputs_of_all_layers_without_a_loss_and_the_gradient_of_the_input() -> None:
    model = Stack(each_given).double()
    step = psg_fx.transform(model, backend="eager")
    x = torch.randn(3, 4, 6).double().requires_grad_()
    outs = step(x)
    seeds = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, seeds)
    (of_input,) = torch.autograd.grad(model(x), x, seeds)
    close(x.grad, of_input)
    for i in range(len(x)):
        found = torch.autograd.grad(model(x[i : i + 1]), [*model.parameters()], [s[i : i + 1] for s in seeds])
        for parameter, value in zip(model.parameters(), found, strict=True):
            close(parameter.grad_sample[i], value)


class Differing(nn.Module):
    """Layers that are alike but for where an argument is None, or for a value that is conjugated lazily."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=k == 0) for k in range(LAYERS)])
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(6) + 2) for _ in range(LAYERS)])
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for k, (layer, scale) in enumerate(zip(self.layers, self.scales, strict=True)):
            x = layer(x).tanh().cos().exp().sin() * 1.5 + x.cos().sin().exp()
            if self.kind == "none":
                x = F.layer_norm(x, [6], *((None, scale) if k == 2 else (scale, None)))
            else:
                z = torch.view_as_complex((x * scale).unflatten(-1, (3, 2)).contiguous()).conj()
                x = torch.stack([z.real.contiguous().sin(), z.imag.contiguous().cos()], -1).flatten(-2)
        return x[..., :2]


@pytest.mark.parametrize("kind", ["none", "conjugated"])
def test_what_is_nearly_alike(kind: str) -> None:
    model = Differing(kind).double()
    step = psg_fx.transform(model, loss_fn, quantities=psg_fx.Grads(), backend="eager")
    x, y = torch.randn(3, 4, 6).double(), torch.randn(3, 4, 2).double()
    for name, value in oracle.loop_grads(model, loss_fn, x, y)[1].items():
        close(step(x, y).grads[name], value)


def joint(model: nn.Module) -> GraphModule:
    x, y = torch.randn(3, 4, 6), torch.randn(3, 4, 2)
    gm, history = free_of_strides(captured(model, loss_fn, (x,), (y,))), History()
    for step in (BATCH, UNREDUCE, find_sites, differentiate):
        gm = run(step, gm, history)
    return gm


@pytest.mark.parametrize("wired", WIRED, ids=lambda f: f.__name__)
def test_the_same_ops_as_of_the_graph_as_a_whole(
    wired: Any, traces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(wired, dropout=0.5)
    cut = joint(model)
    monkeypatch.setattr(segments, "FEWEST", 10**6)
    whole = joint(model)
    counts = [
        Counter((n.target, str(n.meta["val"])) for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor))
        for gm in (cut, whole)
    ]
    assert counts[0] == counts[1]
    assert sum(traces[:-1]) < traces[-1], "nothing was copied"


def test_a_cotangent_has_the_sizes_of_its_trace() -> None:
    """Frames folded into the batch: 2 B rows, in a segment that reads nothing of B rows."""
    (x,) = symbolic_inputs([torch.empty(7, 3)], [0])
    with x.fake_mode:  # type: ignore[attr-defined]
        read, seed = (torch.empty(2 * x.shape[0], 3) for _ in range(2))
    gm = trace(lambda value: value + empty_as(seed, [value]), [read])
    assert facts.shape(gm.graph.output_node().args[0].meta["val"]) == facts.shape(seed)
    with pytest.raises(RuntimeError, match="is not tracked"):
        trace(lambda value: value + empty_as(seed), [read])
