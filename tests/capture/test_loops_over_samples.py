"""Loops over samples, `torch.stack([f(row) for row in x])`: what their turns compute alike is computed at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import psg_fx
from psg_fx.errors import NotYetSupported, SamplesMixed
from support import oracle

X = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, 1])
ONE_SIZE = "ignore:one graph for each batch size"


class Model(nn.Module):
    def __init__(self, computed: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.computed = nn.Linear(3, 6), nn.Linear(6, 3), computed
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layers = nn.ModuleDict({"gru": nn.GRU(3, 6, batch_first=True), "conv": nn.Conv1d(3, 6, 3)})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self, x)

    def one(self, row: Tensor) -> Tensor:
        """Of one sample, `[tokens, 3]`."""
        return self.last(self.first(row).tanh()).mean(0)


def written(model: Model, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 3, dtype=torch.float32)
    for i in range(len(x)):
        out[i] = model.one(x[i])
    return out.double()


def added_to_rows(model: Model, x: Tensor) -> Tensor:
    out = x.new_ones(3, len(x))
    for i, row in enumerate(x):
        out[:, i] += model.one(row)
    return out.T


def adapted(model: Model, x: Tensor) -> Tensor:
    """Two steps of gradient descent on three tokens of each sample, as MAML takes for each task (Finn et al. 2017)."""
    found = []
    for row in x:
        weights = dict(model.first.named_parameters())
        for _ in range(2):
            loss = functional_call(model.first, weights, (row[:3],)).square().mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        found.append(model.last(functional_call(model.first, weights, (row[3:],)).mean(0)))
    return torch.stack(found)


def attended(model: Model, x: Tensor) -> Tensor:
    found = []
    for row in x:
        h = model.first(row)[None]
        found.append(model.last(model.attention(h, h, h, need_weights=False)[0][0].mean(0)))
    return torch.stack(found)


def in_two_loops(model: Model, x: Tensor) -> Tensor:
    hidden = torch.cat([model.first(x[i : i + 1]).tanh() for i in range(len(x))])
    middle = model.last.weight.mean()
    return torch.stack([model.last(h * middle).sum(0) for h in hidden], 1).T


EXACT: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "rows": lambda m, x: torch.stack([m.one(row) for row in x]),
    "places": lambda m, x: torch.stack([m.one(x[i]) for i in range(x.shape[0])]),
    "slices": lambda m, x: torch.cat([m.one(row[0])[None] for row in x.split(1)]),
    "columns": lambda m, x: torch.cat([m.one(row)[:, None] for row in x], 1).T,
    "tokens": lambda m, x: torch.stack([torch.stack([m.last(m.first(t)) for t in row]).mean(0) for row in x]),
    "best": lambda m, x: torch.stack([m.one(row[row[:, 0].topk(2)[1]]) for row in x]),
    "masked": lambda m, x: torch.stack([m.one(row * (row[:, :1] > 0)) for row in x]),
    "detached": lambda m, x: torch.stack([m.one(row) * m.one(row).detach() for row in x]),
    "inverted": lambda m, x: torch.stack([m.one(torch.linalg.inv(r.T @ r + torch.eye(3))) for r in x.double()]),
    "convolved": lambda m, x: torch.stack([m.last(m.layers["conv"](row.T).mean(1)) for row in x]),
    "written": written, "added": added_to_rows, "adapted": adapted, "attended": attended, "two loops": in_two_loops,
}  # fmt: skip


def right(model: Model, loss: Callable[..., Tensor], sizes: tuple[int, ...] = (4, 1, 3)) -> None:
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    for size in sizes:
        losses, grads = oracle.loop_grads(model, loss, X[:size], Y[:size])
        found = step(X[:size], Y[:size])
        torch.testing.assert_close((found.losses, found.grads), (losses, grads))


@pytest.mark.filterwarnings(ONE_SIZE)
@pytest.mark.parametrize("way", EXACT)
def test_the_same_at_once(way: str) -> None:
    right(Model(EXACT[way]), F.cross_entropy)


def each(out: Tensor, y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(o[None], t[None]) * 2 for o, t in zip(out, y, strict=True)]


@pytest.mark.filterwarnings(ONE_SIZE)
@pytest.mark.parametrize(
    "loss",
    [lambda o, y: sum(each(o, y)), lambda o, y: sum(each(o, y)) / len(y), lambda o, y: torch.stack(each(o, y)).mean()],
    ids=["sum", "mean", "stacked"],
)
def test_losses_of_samples_one_by_one(loss: Callable[..., Tensor]) -> None:
    right(Model(lambda m, x: m.last(m.first(x)).mean(1)), loss)


@pytest.mark.filterwarnings(ONE_SIZE)
def test_of_one_sample_first() -> None:
    right(Model(EXACT["rows"]), F.cross_entropy, (1, 4, 1))


def test_compiled_with_all_that_is_asked() -> None:
    model = Model(adapted)
    step = psg_fx.transform(model, F.cross_entropy, quantities=[psg_fx.Norms(), psg_fx.ClippedSum(max_norm=0.1)])
    with pytest.warns(UserWarning, match=r"the code loops over the samples \(test_loops_over_samples.py:.*stack"):
        found = step(X, Y)
    grads = oracle.loop_grads(model, F.cross_entropy, X, Y)[1]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    torch.testing.assert_close(found.norms, norms)
    factors = (0.1 / norms).clamp(max=1)
    want = {name: torch.einsum("b,b...->...", factors, g) for name, g in grads.items()}
    torch.testing.assert_close(found.clipped_sum, want, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings(ONE_SIZE)
@pytest.mark.parametrize("rows", [lambda x: x, lambda x: x.flatten(0, 1)], ids=["samples", "rows of samples"])
def test_all_rows_in_one_chunk(rows: Callable[[Tensor], Tensor]) -> None:
    def in_chunks(model: Model, x: Tensor) -> Tensor:
        h = rows(x)
        h = torch.cat([model.last(model.first(h[i : i + 64])) for i in range(0, len(h), 64)])
        return h.reshape(len(x), 5, 3).sum(1)

    right(Model(in_chunks), F.cross_entropy)


@pytest.mark.filterwarnings(ONE_SIZE)
@pytest.mark.parametrize("joined", [torch.cat, torch.stack])
def test_one_value_for_each_sample(joined: Callable[..., Tensor]) -> None:
    def repeated(model: Model, x: Tensor) -> Tensor:
        first = model.first.bias[None] if joined is torch.cat else model.first.bias
        return model.last(model.first(x.sum(1)) * joined([first] * len(x), 0))

    right(Model(repeated), F.cross_entropy)


REFUSED: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "the number of a turn": lambda m, x: torch.stack([m.one(x[i]) * (i + 1) for i in range(len(x))]),
    "a neighbour": lambda m, x: torch.stack([m.one(x[i] - x[i - 1]) for i in range(len(x))]),
    "another order": lambda m, x: torch.stack([m.one(row) for row in list(x)[::-1]]),
    "a draw": lambda m, x: torch.stack([m.one(row + torch.randn_like(row)) for row in x]),
    "what is left out": lambda m, x: torch.stack([m.one(row) for row in x[:-1]] + [m.one(x[-1]) * 2]),
}


@pytest.mark.parametrize("way", REFUSED)
def test_turns_that_differ_are_refused(way: str) -> None:
    with pytest.raises(NotYetSupported, match="the program is another one for another batch size"):
        psg_fx.transform(Model(REFUSED[way]), F.cross_entropy, backend="eager")(X, Y)


@pytest.mark.filterwarnings(ONE_SIZE)
@pytest.mark.parametrize(
    "mixing",
    [
        lambda m, x: torch.stack([m.one(row - x.mean(0)) for row in x]),
        lambda m, x: torch.stack([m.one(row) for row in x - x.amax(0)]),
    ],
    ids=["inside", "before"],
)
def test_samples_that_mix_are_refused(mixing: Callable[[Model, Tensor], Tensor]) -> None:
    with pytest.raises(SamplesMixed):
        psg_fx.transform(Model(mixing), F.cross_entropy, backend="eager")(X, Y)
