"""What is alike is traced once, and copies are what tracing them would have given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import zoo
from psg_fx.algebra.ask import Ask
from psg_fx.algebra.asks import Along
from psg_fx.algebra.gradient import Term
from psg_fx.algebra.network import Network
from psg_fx.passes.lower import pieces
from psg_fx.planner import groups
from psg_fx.planner.plan import PLAN
from support.selection import selected

MANY = [
    psg_fx.ClippedSum(max_norm=1.0), psg_fx.Grads(), psg_fx.Gram(), psg_fx.SecondMoment(), psg_fx.Projection(rank=4),
]  # fmt: skip


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every piece that is traced."""
    found: list[Any] = []
    original: Callable[..., Any] = pieces.trace

    def counted(piece: Any, values: list[Tensor]) -> Any:
        found.append(piece)
        return original(piece, values)

    monkeypatch.setattr(pieces, "trace", counted)
    return found


def tidied(model: nn.Module, x: Tensor, quantities: Any = MANY) -> torch.fx.GraphModule:
    step = psg_fx.transform(model, lambda y, t: (y - t).square().flatten(1).sum(1), quantities=quantities,
                            backend="eager", progress=False)  # fmt: skip
    step(x, torch.zeros(()).expand(model(x).shape))
    return step.graphs["tidied"]


def stack(depth: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())))


@pytest.mark.slow
def test_depth_costs_no_traces(traced: list[Any]) -> None:
    x = torch.randn(3, 5, 4)
    tidied(stack(2), x)
    few = len(traced)
    traced.clear()
    tidied(stack(5), x)
    assert len(traced) == few


@pytest.mark.parametrize(
    ("second", "alike"),
    [
        (nn.LayerNorm(4), True),
        (nn.LayerNorm(4, eps=1e-3), False),
        (nn.LayerNorm(4, bias=False), False),
        (nn.RMSNorm(4), False),
    ],
    ids=["same", "eps", "no bias", "rms norm"],
)
def test_only_what_is_alike(second: nn.Module, alike: bool, traced: list[Any]) -> None:
    x = torch.randn(3, 5, 4)
    tidied(nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4)), x, psg_fx.Norms())
    alone = len(traced)
    traced.clear()
    tidied(nn.Sequential(nn.LayerNorm(4), nn.GELU(), second, nn.Tanh(), nn.Linear(4, 4)), x, psg_fx.Norms())
    assert (len(traced) == alone) is alike


class Turned(nn.Module):
    """Two equal layers, the second of which reads memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).transpose(1, 2)).transpose(1, 2)


class Both(nn.Module):
    """One operand made of two parameters that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(x) @ torch.complex(self.real, self.imaginary)).flatten(-2)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "stack": lambda: (stack(3), torch.randn(3, 5, 4)),
    "turned": lambda: (Turned(), torch.randn(3, 4, 4)),
    "both": lambda: (Both(), torch.randn(3, 5, 4)),
    "tied": lambda: (nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 4)), torch.randn(3, 5, 4)),
    "convolutions": lambda: (
        nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)) for _ in range(2))),
        torch.randn(3, 4, 6, 6),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", selected(MODELS, {"convolutions", "both"}))
def test_copies_are_what_tracing_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MODELS[name]()
    copied = tidied(model, x)
    monkeypatch.setattr(groups.Group, "signature", property(lambda group: id(group)))
    traced = tidied(model, x)
    assert operations(copied) == operations(traced)


@pytest.mark.slow
def test_copies_of_a_transformer(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    copied, few = gpt(), len(traced)
    traced.clear()
    monkeypatch.setattr(groups.Group, "signature", property(lambda group: id(group)))
    assert operations(gpt()) == operations(copied)
    assert few < len(traced) * 2 / 3


def gpt() -> torch.fx.GraphModule:
    ex = zoo.example("gpt", 3, layers=3, width=8, heads=2, tokens=6, vocabulary=20)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=MANY[:2], backend="eager", progress=False)
    step(ex.inputs, ex.targets)
    return step.graphs["tidied"]


def operations(gm: torch.fx.GraphModule) -> Counter[tuple[str, str]]:
    """Every op with the shape of its result, counted."""
    ops = (n for n in gm.graph.nodes if n.op == "call_function")
    return Counter((str(n.target), str(getattr(n.meta.get("val"), "shape", ""))) for n in ops)


class Interleaved(nn.Module):
    """Two layers that read the same values, and one between them in the order of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.two = (nn.Linear(128, 128, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh() + self.two(x).tanh())


def test_results_keep_the_order_of_parameters() -> None:
    """Bounds of parameters are told apart by their order."""
    torch.manual_seed(0)
    model, x = Interleaved().double(), torch.randn(3, 16, 128, dtype=torch.float64)
    bounds = {"one.weight": 1.0, "other.weight": 0.1, "two.weight": 0.01}
    asked = psg_fx.ClippedSum(max_norm=bounds, per="parameter")
    step = psg_fx.transform(model, lambda y: y.square().sum((1, 2)), quantities=asked, backend="eager", progress=False)
    factors, norms = (lambda out: (out.clip_factors, out.norms))(step(x))
    plan = PLAN.of(step.graphs["planned"])
    assert [group.names for group in groups.groups(plan)] == [("one.weight", "two.weight"), ("other.weight",)]
    for name, bound in bounds.items():
        torch.testing.assert_close(factors[name] * norms[name], torch.full((3,), bound, dtype=torch.float64))


class Half(Along):
    """⟨g, v⟩, half of it for one parameter: somebody's ask that looks at names."""

    def contract(self, term: Term, name: str) -> Network:
        found = super().contract(term, name)
        leaf = found.leaves[-1]
        scale = 0.5 if name == "1.weight" else 1.0
        return replace(found, leaves=(*found.leaves[:-1], replace(leaf, build=lambda v: v.reshape(4, 4) * scale)))


@dataclass(frozen=True)
class Halves(psg_fx.Dots):
    """`Dots` by that ask."""

    def asks(self) -> tuple[Ask, ...]:
        return (Half(),)


def test_an_ask_of_somebody_else_may_look_at_names() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))), torch.randn(3, 5, 4)
    direction = {name: torch.randn(4, 4) for name in ("0.weight", "1.weight")}
    loss = lambda y: y.square().sum((1, 2))  # noqa: E731
    step = psg_fx.transform(model, loss, quantities=[Halves(), psg_fx.Grads()], backend="eager", progress=False)
    out = step(x, directions=direction)
    dots = {name: (out.grads[name] * v).sum((1, 2)) for name, v in direction.items()}
    torch.testing.assert_close(out.dots, dots["0.weight"] + dots["1.weight"] / 2)
