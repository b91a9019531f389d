"""The loops of recurrent layers in C++: their numbers, and which compiled steps have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.ops.recurrent import here as recurrent_here
from psg_fx.ops.recurrent import layers as recurrent
from psg_fx.ops.recurrent.here import HERE
from psg_fx.passes.compile import recurrences
from psg_fx.torch_private import native
from support import oracle

SIZES = [(3, 5, 7), (1, 1, 1), (4, 9, 70), (2, 3, 64), (5, 1, 150)]
"""Steps, samples and units: below, at and beyond what a tile and a stretch of a sum hold."""
NAMES = [op._schema.name.removeprefix("psg_fx::") for op in HERE]


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    for name in ("lstm", "gru", "rnn"):
        native.begin(name)
    native.finish()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the library, for every time it is asked for."""
    names: list[str] = []

    def library(name: str) -> Any:
        names.append(name)
        return native.library(name)

    monkeypatch.setattr(recurrent_here, "library", library)
    return names


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that are begun between capture and what compiles the graph."""
    names: list[str] = []
    monkeypatch.setattr(recurrences, "native", SimpleNamespace(begin=names.append))
    return names


def arguments(name: str, sizes: Sequence[int], fewer: bool = False) -> list[Any]:
    """Arguments of an op; fewer: without what it need not have."""
    torch.manual_seed(0)
    t, b, h = sizes
    gates = {"lstm": 4, "gru": 3, "rnn": 1, "lstm_backward": 4, "gru_backward": 3, "rnn_backward": 1}[name]
    x, state, cell = torch.randn(t, b, gates * h), torch.randn(b, h), torch.randn(b, h)
    w, bias = torch.randn(gates * h, h) / h**0.5, None if fewer else torch.randn(gates * h)
    dh, kept, made = torch.randn(t, b, h), torch.rand(t, b, 2 * h)[..., h:], x.sigmoid()
    return {
        "lstm": [x, state, cell, w, bias, None],
        "gru": [x, state, w, bias],
        "rnn": [x, state, w, bias, "relu" if fewer else "tanh"],
        "lstm_backward": [dh, cell, made, state, kept, dh.cos(), w, None],
        "gru_backward": [dh, kept, made, dh.cos(), state, w],
        "rnn_backward": [dh, kept - 0.5, w, "relu" if fewer else "tanh"],
    }[name]


def results(op: Any, given: Sequence[Any]) -> list[Tensor]:
    found = op(*given)
    return [found] if isinstance(found, Tensor) else list(found)


def named(name: str) -> tuple[Any, Any]:
    """The op with the loop, and the one in C++."""
    op = getattr(torch.ops.psg_fx, name).default
    return op, HERE[op]


def test_it_is_compiled_here() -> None:
    assert all(native.library(name) is not None for name in ("lstm", "gru", "rnn"))
    assert NAMES == ["lstm", "gru", "rnn", "lstm_backward", "gru_backward", "rnn_backward"]


@pytest.mark.parametrize("fewer", [False, True], ids=["all", "fewer"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers(name: str, sizes: Sequence[int], fewer: bool, asked: list[str]) -> None:
    """Against the loop in float64."""
    op, here = named(name)
    given = arguments(name, sizes, fewer)
    want = results(op, [a.double() if isinstance(a, Tensor) else a for a in given])
    for got, right in zip(results(here, given), want, strict=True):
        assert got.dtype is torch.float32
        assert oracle.relative_error(got, right) < 3e-6
    assert asked == [name.partition("_")[0]]


@pytest.fixture
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads_has_the_same_numbers(name: str) -> None:
    _, here = named(name)
    given, found = arguments(name, (6, 9, 70)), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(results(here, given))
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_compiler_it_is_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, here = named(name)
    given = arguments(name, SIZES[0])
    monkeypatch.setattr(recurrent_here, "library", lambda name: None)
    assert all(torch.equal(a, b) for a, b in zip(results(here, given), results(op, given), strict=True))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_what_is_no_number_is_as_in_the_loop(name: str, value: float) -> None:
    op, here = named(name)
    given = arguments(name, SIZES[2], fewer=True)
    given[0][1, 2, ::3] = value
    want = results(op, [a.double() if isinstance(a, Tensor) else a for a in given])
    for got, right in zip(results(here, given), want, strict=True):
        assert torch.allclose(got.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_gates_that_are_shut_keep_the_state_to_the_last_bit() -> None:
    given = arguments("lstm", SIZES[2])
    parts = given[0].chunk(4, -1)
    for part, idle in zip(parts, (-torch.inf, torch.inf, 0.0, -torch.inf), strict=True):
        part.fill_(idle)
    hidden, _, cells, _ = named("lstm")[1](*given)
    assert torch.equal(cells, given[2].expand_as(cells))
    assert torch.equal(hidden, torch.zeros_like(hidden))


@pytest.mark.parametrize("name", ["lstm", "rnn"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 6.0, 200.0])
def test_small_and_large_values_are_as_precise(name: str, scale: float) -> None:
    """Without a state, so that what is squashed is what is given; each number by itself."""
    op, here = named(name)
    given = [a * 0 if isinstance(a, Tensor) else a for a in arguments(name, (1, 20, 128))]
    given[0] = torch.randn(given[0].shape) * scale
    want = results(op, [a.double() if isinstance(a, Tensor) else a for a in given])
    for got, right in zip(results(here, given), want, strict=True):
        assert torch.allclose(got.double(), right, rtol=1e-6, atol=1e-37)


class Model(nn.Module):
    """A recurrent layer in both directions, and a head on what it says last."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 20, num_layers=2, bidirectional=True, batch_first=True, **options)
        self.head = nn.Linear(2 * (options.get("proj_size") or 20), 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.head(out[:, -1])  # type: ignore[no-any-return]


def step_of(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """What a step says of six samples, and the gradients of a float64 loop."""
    torch.manual_seed(1)
    x, y = torch.randn(6, 9, 6, dtype=dtype), torch.arange(6) % 3
    step = psg_fx.transform(model.to(dtype), F.cross_entropy, quantities=[psg_fx.Grads(), psg_fx.Norms()], **options)
    return step(x, y), oracle.loop_grads(model.double(), F.cross_entropy, x.double(), y)[1]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("kind", "options"), [(nn.LSTM, {}), (nn.GRU, {"bias": False}), (nn.RNN, {"nonlinearity": "relu"})],
    ids=["lstm", "gru", "rnn"],
)  # fmt: skip
def test_a_compiled_step_has_it(
    kind: type[nn.RNNBase], options: dict[str, Any], asked: list[str], begun: list[str]
) -> None:
    torch.manual_seed(0)
    out, want = step_of(Model(kind, **options))
    assert set(begun) == {kind.__name__.lower()}
    assert len(asked) == 8  # two layers in two directions, there and back
    assert oracle.worst_error(out.grads, want) < 1e-5
    assert oracle.relative_error(out.norms, oracle.norms(want)) < 1e-5


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {"backend": "eager"}),
        ({}, {"options": {"psg_fx.fused_kernels": False}}),
        ({}, {"dtype": torch.float64}),
        ({"proj_size": 5}, {}),
    ],
    ids=["eager", "off", "float64", "projection"],
)
def test_other_steps_have_the_loop(
    model: dict[str, Any], options: dict[str, Any], asked: list[str], begun: list[str]
) -> None:
    torch.manual_seed(0)
    out, want = step_of(Model(nn.LSTM, **model), **options)
    assert not asked
    assert not begun
    assert oracle.worst_error(out.grads, want) < 1e-5


def test_every_loop_has_one_in_cpp() -> None:
    assert set(HERE) == set(recurrent.LOOPS)
