"""Random draws: with the same seed, a step on the eager backend draws what the ordinary batched step draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.reference.definitions import definitions_for, of_groups
from support.selection import one_in

X, Y = torch.randn(6, 3, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0, 2])


class Head(nn.Module):
    """A body on `[B, 3, 4]`, then three scores from what it returns."""

    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out).flatten(1))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.relu(self.layer(self.dropout(x))))


class UnreadBesideRegions(nn.Module):
    """Draws what nothing reads, and has regions in which torch's state is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            places = torch.arange(4.0).sin()
        with torch.autocast("cpu", enabled=False):
            h = self.layer(x) + places
        self.dropout(self.layer(h))
        return self.dropout(h)


class Everything(nn.Module):
    """Drops all, for which torch draws nothing, and then some."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + F.dropout(x, 1.0), 0.3) + F.dropout(x * 1, 1.0, inplace=True) + nn.Dropout(1.0)(x)


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Conv1d(3, 4, 2), nn.Dropout1d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.alpha_dropout(self.dropout(self.layer(x)), 0.2, training=self.training)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.7), generator=torch.default_generator)
        return self.layer(x + torch.randn_like(x)) * kept + torch.rand(x.shape[0], 3, 4, dtype=x.dtype)


class Weights(nn.Module):
    """Weights with noise of a learned scale, some dropped, some switched off at random; then torch's own of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.conv = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.distributions.Normal(self.weight, F.softplus(self.scale)).rsample()
        x = F.dropout(F.linear(x, F.dropout(weight, 0.3) + 0.1 * torch.randn_like(weight)), 0.2)
        x = F.linear(x, self.weight * torch.bernoulli(torch.sigmoid(self.scale)))
        bias = torch.native_dropout(self.conv.bias, 0.5, False)[0]
        return F.conv1d(x, F.dropout1d(self.conv.weight, 0.4) + torch.empty(3, 3, 1, dtype=x.dtype).uniform_(), bias)


class Steps(nn.Module):
    """A number drawn for each sample with weights that all share, by itself or by its distribution, and three more."""

    def __init__(self, distribution: bool = False) -> None:
        super().__init__()
        self.distribution = distribution
        self.layer = nn.Linear(4, 4)
        self.register_buffer("weights", torch.tensor([1.0, 3.0, 0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.multinomial(self.weights, x.shape[0], replacement=True)
        if self.distribution:
            one = torch.distributions.Categorical(probs=self.weights).sample((x.shape[0],))
        three = torch.multinomial(self.weights, 3 * x.shape[0], replacement=True).view(-1, 3)
        return self.layer(x * one[:, None, None]) + three[..., None]


class Concentrations(nn.Module):
    """Distributions over intervals and simplices, of activations and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(self.layer(x)) + 0.1
        drawn = torch.distributions.Beta(h, h.flip(-1)).rsample() + torch.distributions.Dirichlet(h).rsample()
        shared = torch.distributions.Dirichlet(F.softplus(self.own)).rsample((x.shape[0], 1))
        drawn = drawn + torch.distributions.Gamma(h / 9, h.flip(1)).rsample().sqrt()  # some underflow
        return drawn * shared + torch.distributions.StudentT(h + 2, h).rsample() + torch.distributions.Chi2(h).sample()


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Head(kind(4, 3, num_layers=2, dropout=0.4, batch_first=True, **options), 9 * (1 + bool(options)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Head(Dropped(), 12),
    "unread": lambda: Head(UnreadBesideRegions(), 12),
    "everything": lambda: Head(Everything(), 12),
    "channels": lambda: Head(Channels(), 12),
    "noise": lambda: Head(Noise(), 12),
    "weights": lambda: Head(Weights(), 12),
    "steps": lambda: Head(Steps(), 12),
    "steps-by-a-distribution": lambda: Head(Steps(distribution=True), 12),
    "concentrations": lambda: Head(Concentrations(), 12),
    "attention": lambda: Head(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True), 12),
    "lstm": _recurrent(nn.LSTM),
    "lstm-two-ways": _recurrent(nn.LSTM, bidirectional=True),
    "gru": _recurrent(nn.GRU),
    "rnn": _recurrent(nn.RNN),
}


def ordinary(model: nn.Module) -> tuple[Tensor, list[Tensor], Tensor]:
    """Loss and gradients of the ordinary batched step from a fixed seed, and the next number drawn."""
    torch.manual_seed(7)
    loss = F.cross_entropy(model(X), Y)
    return loss, list(torch.autograd.grad(loss, list(model.parameters()))), torch.rand(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize(
    "name", one_in(2, MODELS, always=["everything", "steps", "steps-by-a-distribution", "concentrations"])
)
def test_the_step_draws_what_the_ordinary_step_draws(name: str) -> None:
    model = MODELS[name]().double()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.MeanGrad(), backend="eager")
    step(X, Y)
    loss, gradients, following = ordinary(model)
    torch.manual_seed(7)
    out = step(X, Y)
    assert torch.equal(torch.rand(1), following)
    torch.testing.assert_close(out.losses.mean(), loss)
    torch.testing.assert_close(list(out.mean_grad.values()), gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_without_a_loss(name: str) -> None:
    model = MODELS[name]().double()
    step = psg_fx.transform(model, backend="eager")
    with torch.no_grad():
        step(X)
    loss, gradients, following = ordinary(model)
    torch.manual_seed(7)
    found = F.cross_entropy(step(X), Y)
    found.backward()
    assert torch.equal(torch.rand(1), following)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close([p.grad_sample.sum(0) for p in model.parameters()], gradients)


def test_draws_differ_between_samples_and_between_calls() -> None:
    model = MODELS["dropout"]().double()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    same, targets = X[:1].expand(6, -1, -1), Y[:1].expand(6)
    first, second = step(same, targets), step(same, targets)
    assert len(set(first.losses.tolist())) > 1
    assert not torch.equal(first.losses, second.losses)


DRAWN = [psg_fx.Grads(), psg_fx.Norms(per="parameter"), psg_fx.Gram(), psg_fx.ClippedSum(max_norm=1.0), psg_fx.Dots(),
         psg_fx.SecondMoment(centered=True), psg_fx.Projection(rank=3)]  # fmt: skip


@pytest.mark.parametrize("groups", [None, torch.tensor([1, 0, -1, 1, 1, 0])], ids=["samples", "groups"])
def test_a_gradient_is_that_of_the_draw_of_its_batch(groups: Tensor | None) -> None:
    model = MODELS["weights"]().double()
    directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    given = {"directions": directions} | ({} if groups is None else {"groups": groups})
    step = psg_fx.transform(model, F.cross_entropy, quantities=DRAWN, backend="eager")
    step(X, Y, **given)
    torch.manual_seed(7)
    out = step(X, Y, **given)
    torch.manual_seed(7)
    losses = F.cross_entropy(model(X), Y, reduction="none")
    each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    names = [name for name, _ in model.named_parameters()]
    grads = {name: torch.stack(rows) for name, rows in zip(names, zip(*each, strict=True), strict=True)}
    if groups is not None:
        grads = of_groups(grads, groups, None)
    checks, notes = definitions_for(DRAWN, given)
    assert not notes
    for check in checks:
        torch.testing.assert_close(getattr(out, check.field), check.expected(losses, grads))


@pytest.mark.inductor
def test_compiled_draws_are_those_of_the_gradient() -> None:
    """Losses are linear in what is drawn, so gradients say what was drawn, and the losses must be of the same draw."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, F.dropout(self.weight, 0.5) + self.scale * torch.randn_like(self.scale))

    model = Linear()
    step = psg_fx.transform(model, lambda out, _: out.sum(1))
    out = step(torch.eye(4), Y[:4])
    kept, noise = out.grads["weight"], out.grads["scale"]
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert noise.sum(0).unique().numel() == 12
    torch.testing.assert_close(out.losses, (kept * model.weight + noise * model.scale).sum((1, 2)).detach())


def test_draws_that_have_a_gradient_are_refused() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ F.rrelu(self.weight, training=True)

    with pytest.raises(psg_fx.NotYetSupported, match=r"rrelu.* draws random numbers on the way of a parameter"):
        psg_fx.transform(Leaky().double(), F.cross_entropy, backend="eager")(X, Y)


def test_draws_from_a_generator_of_its_own_are_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(12, 3), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.flatten(1))
            return out * torch.rand(out.shape, dtype=x.dtype, generator=self.generator)

    text = r"(?s)rand draws from a generator of its own.*test_random.py:\d+: return out \* torch.rand"
    with pytest.raises(psg_fx.NotYetSupported, match=text):
        psg_fx.transform(Own().double(), F.cross_entropy, backend="eager")(X, Y)


def _seeded(out: Tensor) -> Tensor:
    torch.manual_seed(5)
    return torch.rand_like(out)


def _forked(out: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.rand_like(out)


def _set_back(out: Tensor) -> Tensor:
    state = torch.get_rng_state()
    found = torch.rand_like(out)
    torch.set_rng_state(state)
    return found


def _seeded_by_the_generator(out: Tensor) -> Tensor:
    torch.default_generator.manual_seed(5)
    return torch.rand_like(out)


@pytest.mark.parametrize("noise", [_seeded, _forked, _set_back, _seeded_by_the_generator])
def test_a_seed_inside_is_refused(noise: Callable[[Tensor], Tensor]) -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out * noise(out), target)

    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    with pytest.raises(psg_fx.NotYetSupported, match=r"(?s)the state of torch's random numbers.*test_random.py:\d+"):
        psg_fx.transform(model, loss, backend="eager")(X, Y)
