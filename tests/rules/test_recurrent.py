"""Recurrent layers: one op with the loop inside, its gradients, and graphs that are as long for any number of steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.errors import SamplesMixed
from psg_fx.ops.recurrent import layers as recurrent
from support import oracle
from support.selection import one_in, selected

B, T = 4, 5
CELLS = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3), "rnn": (nn.RNN, 1)}


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


class Model(nn.Module):
    """A recurrent layer with learned initial states; a head on what `read` takes of the outputs and last states."""

    def __init__(self, kind: type[nn.RNNBase], read: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.rnn, self.read = kind(3, 4, batch_first=True, **options), read
        rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
        sizes = [options.get("proj_size") or 4, 4][: 1 + (kind is nn.LSTM)]
        self.initial = nn.ParameterList([real(rows, 1, n) for n in sizes])
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        first = tuple(h.expand(-1, x.shape[0], -1).contiguous() for h in self.initial)
        out, last = self.rnn(x, first if len(first) > 1 else first[0])
        return self.head(self.read(out, last if isinstance(last, tuple) else (last,)))  # type: ignore[no-any-return]


def all_outputs(out: Tensor, last: tuple[Tensor, ...]) -> Tensor:
    return out.flatten(1)


def all_states(out: Tensor, last: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([state.transpose(0, 1).flatten(1) for state in last], 1)


def last_cell(out: Tensor, last: tuple[Tensor, ...]) -> Tensor:
    return last[-1][-1]


def made(kind: type[nn.RNNBase], read: Callable[..., Tensor] = all_outputs, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(kind, read, **options).double()
    model(real(B, T, 3))
    return model


def check(model: nn.Module, backend: str = "eager", params: Any = None, size: int = B) -> Any:
    """Gradients, norms and the clipped sum against a float64 loop over samples."""
    x, y = real(size, T, 3), torch.arange(size) % 3
    asked = [psg_fx.Grads(), psg_fx.Norms(), psg_fx.ClippedSum(max_norm=0.5)]
    step = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend=backend, params=params)
    out = step(x, y)
    losses, grads = oracle.loop_grads(model, F.cross_entropy, x, y, params=params)
    norms = oracle.norms(grads)
    clipped = oracle.weighted_sum(grads, oracle.clip_factors(norms, 0.5))
    assert oracle.relative_error(out.losses, losses) < 1e-10
    assert oracle.worst_error(out.grads, grads) < 1e-10
    assert oracle.relative_error(out.norms, norms) < 1e-10
    assert oracle.worst_error(out.clipped_sum, clipped) < 1e-10
    return step


READS = {read.__name__: read for read in (all_outputs, all_states, last_cell)}


@pytest.mark.parametrize(("cell", "read"), one_in(4, itertools.product(CELLS, READS)))
def test_whatever_the_loss_reads(cell: str, read: str) -> None:
    check(made(CELLS[cell][0], READS[read]))


@pytest.mark.parametrize("options", [
    {"proj_size": 2, "bidirectional": True, "num_layers": 2, "bias": False},
    pytest.param({"num_layers": 2, "bidirectional": True}, marks=pytest.mark.rest),
    pytest.param({"bias": False}, marks=pytest.mark.rest), pytest.param({"proj_size": 2}, marks=pytest.mark.rest),
], ids=str)  # fmt: skip
def test_options(options: dict[str, Any]) -> None:
    check(made(nn.LSTM, all_outputs, **options))


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.rest), pytest.param("inductor", marks=pytest.mark.inductor)]
)
@pytest.mark.parametrize("cell", ["lstm", *(pytest.param(c, marks=pytest.mark.rest) for c in ("gru", "rnn"))])
def test_backends(cell: str, backend: str) -> None:
    check(made(CELLS[cell][0]), backend)


PARTS = ["rnn.weight_hh_l0", "rnn.bias_hh_l0 initial.0", "rnn.weight_ih_l0"]


@pytest.mark.parametrize(("cell", "params"), one_in(4, itertools.product(CELLS, PARTS)))
def test_some_parameters(cell: str, params: str) -> None:
    check(made(CELLS[cell][0]), params=params.split())


def test_a_batch_of_one() -> None:
    check(made(nn.GRU), size=1)


class Tied(nn.Module):
    """W_hh is used by two layers, and once more by itself; another one is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(3, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)
        self.second.weight_hh_l0 = self.first.weight_hh_l0
        self.last = nn.utils.parametrizations.weight_norm(nn.RNN(4, 4, batch_first=True), "weight_hh_l0")
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(self.second(self.first(x)[0])[0])[0][:, -1]
        return self.head(F.linear(found, self.first.weight_hh_l0))  # type: ignore[no-any-return]


def test_tied_and_normalised_weights() -> None:
    torch.manual_seed(0)
    check(Tied().double())


def test_without_a_loss() -> None:
    model = made(nn.LSTM, all_states, num_layers=2)
    x, y = real(B, T, 3), torch.arange(B) % 3
    step = psg_fx.transform(model, backend="eager")
    F.cross_entropy(step(x), y, reduction="sum").backward()
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    assert oracle.worst_error({n: p.grad_sample for n, p in model.named_parameters()}, grads) < 1e-10  # type: ignore[misc]


@pytest.mark.parametrize("cell", selected(CELLS, {"lstm"}))
def test_the_graph_is_as_long_for_any_number_of_steps(cell: str) -> None:
    def length(steps: int) -> int:
        model = nn.Sequential(CELLS[cell][0](3, 4, batch_first=True)).double()
        step = psg_fx.transform(model, lambda out: out[0].flatten(1).sum(1), backend="eager", quantities=psg_fx.Norms())
        step(real(B, steps, 3))
        return len(step.graphs["joint"].graph.nodes)

    assert length(3) == length(7)


def test_a_loop_over_cells_is_one_term() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for now in x.unbind(1):
                state = self.cell(now, state)
            assert state is not None
            return self.head(state[0])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    step = check(Loop().double())
    gradients = GRADIENTS.of(step.graphs["merged"])
    (term,) = gradients["cell.weight_hh"].terms
    assert len(term.sites) == T


def test_samples_along_time_are_refused() -> None:
    with pytest.raises(SamplesMixed, match="time, over which the layer runs"):
        psg_fx.transform(nn.Sequential(nn.GRU(3, 4)).double(), lambda out: out[0].sum((1, 2)), backend="eager")(
            real(B, T, 3)
        )


# --- the ops themselves -----------------------------------------------------------------------------------------------


def sizes(cell: str) -> tuple[Tensor, ...]:
    """X, h, w, bias for three steps of two samples."""
    gates = CELLS[cell][1]
    return real(3, 2, 4 * gates), real(2, 4), real(4 * gates, 4), real(4 * gates)


def _calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, h, w, bias = sizes("lstm")
    states, gru, rnn = real(3, 2, 4), sizes("gru"), sizes("rnn")
    return {
        "lstm": (recurrent.lstm, (x, h, h.sin(), w, bias, None)),
        "projected": (recurrent.lstm, (x, h[:, :2], h.sin(), w[:, :2], None, real(2, 4))),
        "gru": (recurrent.gru, gru),
        "rnn": (recurrent.rnn, (*rnn, "tanh")),
        "lstm_backward": (
            recurrent.lstm_backward,
            (states, h, x.sigmoid(), h.cos(), states.sin(), states.cos(), w, None),
        ),
        "gru_backward": (recurrent.gru_backward, (states, states.sin(), gru[0].sigmoid(), states.cos(), h, gru[2])),
        "rnn_backward": (recurrent.rnn_backward, (states, states.sin(), rnn[2], "relu")),
        "attach": (recurrent.attach, ("tanh", [states], [states.sin(), None], [states], [rnn[2]])),
    }


@pytest.mark.parametrize("name", _calls())
def test_ops_are_what_their_schemas_and_fake_values_say(name: str) -> None:
    op, args = _calls()[name]
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("cell", ["lstm", "gru", "tanh", "relu"])
def test_gradients_through_time(cell: str) -> None:
    """`attached` is the derivative of the loop with respect to x and the first states."""
    x, h, w, bias = sizes(cell if cell in CELLS else "rnn")
    c = h.cos()

    def run(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        given = x.detach(), h.detach()
        if cell == "lstm":
            hidden, gates, cells, squashed = recurrent.lstm(*given, c.detach(), w, bias, None)
            saved = [gates, cells, squashed, c.detach()]
            inputs = [x, None, h, c, None]
            found, last = recurrent.attached(cell, [hidden, cells[-1]], inputs, saved, [w, None])
            return torch.cat([found, last.unsqueeze(0)])
        if cell == "gru":
            hidden, gates, inner = recurrent.gru(*given, w, bias)
            return recurrent.attached(cell, [hidden], [x, None, h], [hidden, gates, inner, given[1]], [w])[0]
        hidden = recurrent.rnn(*given, w, bias, cell)
        return recurrent.attached(cell, [hidden], [x, None, h], [hidden], [w])[0]

    inputs = [t.clone().requires_grad_() for t in (x, h, c)]
    wanted = inputs if cell == "lstm" else inputs[:2]
    assert torch.autograd.gradcheck(lambda *t: run(*t, *inputs[len(t) :]), wanted)
