"""Models and losses that take gradients themselves: forces, penalties, residuals of differential equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel

import psg_fx
from external.program import Problem, Program, check, check_together, drop_in, require_refused, truth, with_loss
from psg_fx import NotYetSupported, SamplesMixed
from support import graphs_of_nodes, oracle
from support.rows_of_samples import Batch, Part
from support.rows_of_samples import check as check_rows
from support.selection import at_once

WIDTH = 8
ACTIVATIONS = (F.silu, F.relu, F.logsigmoid, F.softsign)


class Net(nn.Module):
    """`function(self, x)` with what the functions below need."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.scale, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(0.4)
        self.layer, self.root = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)
        self.batch = nn.BatchNorm1d(4).eval()
        self.down, self.up = nn.Conv1d(4, 4, 3, 2, padding=1, groups=2), nn.ConvTranspose1d(4, 4, 3, 3, dilation=2)
        self.function = function

    def energy(self, x: Tensor, activation: Callable[[Tensor], Tensor] = F.tanh) -> Tensor:
        """`[B, 1]`"""
        found: Tensor = self.last(activation(self.second(activation(self.first(x)))))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def free(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def forces(m: Net, x: Tensor, activation: Callable[[Tensor], Tensor] = F.tanh) -> Tensor:
    x = free(x)
    return -grad(m.energy(x, activation).sum(), x, create_graph=True)[0]


def activations(m: Net, x: Tensor) -> Tensor:
    return torch.cat([forces(m, x, activation) for activation in ACTIVATIONS], 1)


def of_the_input_itself(m: Net, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    return grad(m.energy(x).sum(), x, create_graph=True)[0]


def penalty(m: Net, x: Tensor) -> Tensor:
    """Gulrajani et al. 2017, arXiv:1704.00028."""
    x = free(x)
    e = m.energy(x)
    (g,) = grad(e, x, grad_outputs=torch.ones_like(e), create_graph=True)
    return e + m.scale * (g.norm(dim=1, keepdim=True) - 1) ** 2


def heat_equation(m: Net, x: Tensor) -> Tensor:
    """u_t - u_xx of a network u(t, x, ..)."""
    t, place, rest = x[:, :1].requires_grad_(), x[:, 1:2].requires_grad_(), x[:, 2:]
    u = m.energy(torch.cat([t, place, rest], 1))
    ut, ux = (grad(u, v, torch.ones_like(u), create_graph=True)[0] for v in (t, place))
    return ut - grad(ux, place, torch.ones_like(ux), create_graph=True)[0]


def weighted(m: Net, x: Tensor) -> Tensor:
    """A product with a vector that has gradients itself."""
    x = free(x)
    return grad(m.second(m.first(x).tanh()).sin(), x, grad_outputs=m.first(x), create_graph=True)[0]


def two_outputs(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    a, b = m.first(x).tanh(), m.second(x).sin()
    total = b.sum()
    return grad([a, total], [x], [b, torch.ones_like(total)], create_graph=True)[0]


def by_what_is_computed(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    h = m.first(x)
    e = m.last(m.second(h).tanh() * h)
    by_x, by_h = grad(e.sum(), [x, h], create_graph=True)
    return by_x + m.second(by_h)


def a_constant(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    e = m.energy(x)
    return e + m.scale * grad(e.sum(), x, retain_graph=True)[0].square().sum(1, keepdim=True)


def of_the_mean(m: Net, x: Tensor) -> Tensor:
    """And of a sum that has a dim."""
    x = free(x)
    e = m.energy(x)
    return grad(e.mean(), x, create_graph=True)[0] + grad(e.square().sum(0), x, create_graph=True)[0]


def attack(m: Net, x: Tensor) -> Tensor:
    """Goodfellow et al. 2015, arXiv:1412.6572."""
    x = free(x)
    loss = F.cross_entropy(m.first(x), m.second(x).argmax(1), reduction="sum")
    return m.energy(x + 0.1 * grad(loss, x)[0].sign())


def unused(m: Net, x: Tensor) -> Tensor:
    x, other = free(x), free(x)
    e = m.energy(x)
    by_x, none = grad(e.sum(), [x, other], create_graph=True, allow_unused=True)
    (zeros,) = grad(e.sum(), other, create_graph=True, materialize_grads=True)
    assert none is None
    assert by_x is not None
    return by_x + zeros


def a_part_is_constant(m: Net, x: Tensor) -> Tensor:
    """What is detached, or computed without gradients, is constant for both gradients."""
    x = free(x)
    with torch.no_grad():
        gate = m.second(x).sigmoid()
    return grad((m.energy(x) * gate * m.first(x).detach()).sum(), x, create_graph=True)[0]


def norms_of_features(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    return grad(m.root(m.layer(m.first(x)).tanh()).log_softmax(-1)[:, 0].sum(), x, create_graph=True)[0]


def images(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    h = m.first(x).unflatten(1, (4, 2)).repeat_interleave(4, 2)
    h = m.batch(m.instance(F.max_pool1d(m.group(h), 2).tanh() + 0.1 * F.avg_pool1d(h, 2)))
    h = m.up(m.down(F.pad(h, (1, 1), "reflect")).sigmoid())
    return grad(h.square().sum(), x, create_graph=True)[0]


def attention(m: Net, x: Tensor) -> Tensor:
    """The CPU's fused kernel has no second derivative."""
    x = free(x)
    q, k = (layer(x).unflatten(1, (1, 4, 2)) for layer in (m.first, m.second))
    with sdpa_kernel(SDPBackend.MATH):
        h = F.scaled_dot_product_attention(q, k, q, is_causal=True)
    return grad(m.last(h.flatten(1)).sum(), x, create_graph=True)[0]


def matrices(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    h = m.first(x)
    a = h.unsqueeze(2) * h.unsqueeze(1) + 4 * torch.eye(WIDTH, dtype=x.dtype)
    e = torch.linalg.solve(a, m.second(x).unsqueeze(2)).flatten(1).sum(1) + torch.logdet(a)
    e = e + torch.linalg.det(h[:, :1, None].sin().exp() * torch.eye(3, dtype=x.dtype))  # of equal singular values
    return grad(e.sum(), x, create_graph=True)[0]


def adversarial(m: Net, x: Tensor) -> Tensor:
    """Miyato et al. 2017, arXiv:1605.07725: the loss once more where it grows fastest."""
    h = m.first(x)
    (g,) = grad(m.last(m.second(h).tanh()).sum(), h, create_graph=True)
    found: Tensor = m.last(m.second(h + 0.1 * F.normalize(g, dim=1)).tanh())
    return found


EXACT = [
    activations, of_the_input_itself, penalty, heat_equation, weighted, two_outputs, by_what_is_computed,
    a_constant, of_the_mean, attack, unused, a_part_is_constant, norms_of_features, images, attention, matrices,
    adversarial,
]  # fmt: skip
BY_NAME: dict[str, Callable[[Any, Tensor], Tensor]] = {function.__name__: function for function in EXACT}
X = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def problem(function: Callable[[Any, Tensor], Tensor]) -> Problem:
    return Problem(Net(function).double(), X.clone())


@pytest.mark.parametrize("names", at_once([list(BY_NAME)[k::3] for k in range(3)], BY_NAME))
def test_exact(names: tuple[str, ...]) -> None:
    check_together(BY_NAME, names, problem)


def test_without_a_loss() -> None:
    check(Program("penalty", lambda: problem(penalty)), drop_in)


@pytest.mark.inductor
def test_compiled() -> None:
    program = Program("forces", lambda: problem(forces))
    assert oracle.worst_error(with_loss(program.problem(), backend="inductor"), truth(program.problem())) < 1e-12


def test_in_the_loss() -> None:
    """A loss that takes the gradient of what the model returns."""

    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        x, e = out
        return F.mse_loss(grad(e.sum(), x, create_graph=True)[0], y)

    def energy(m: Net, x: Tensor) -> Any:
        x = free(x)
        return x, m.energy(x)

    check(Program("loss", lambda: Problem(Net(energy).double(), X, X.cos(), loss)), with_loss)


def test_dropout_is_drawn_once() -> None:
    def dropped(m: Net, x: Tensor) -> Tensor:
        x = free(x)
        e = m.energy(x, lambda h: m.dropout(h.tanh()))
        return e + grad(e.sum(), x, create_graph=True)[0]

    given = problem(dropped)
    step = psg_fx.transform(given.model, given.loss, quantities=psg_fx.MeanGrad(), backend="eager")
    torch.manual_seed(1)
    found = step(X)
    torch.manual_seed(1)
    loss = given.loss(given.model(X))
    used = {n: p for n, p in given.model.named_parameters() if n.partition(".")[0] in ("first", "second", "last")}
    for (name, p), want in zip(used.items(), grad(loss, list(used.values())), strict=True):
        assert torch.allclose(found.mean_grad[name] * len(X), want, atol=1e-12), (name, p.shape)


def test_validate_and_other_sizes() -> None:
    step = psg_fx.transform(Net(forces).double(), F.mse_loss, quantities=psg_fx.Norms(), backend="eager")
    step.validate(X, X.sin())
    whole = step(X, X.sin()).norms
    for size in (1, 2):
        assert torch.allclose(step(X[:size], X[:size].sin()).norms, whole[:size], atol=1e-12)
    assert len(step.captures) == 1
    ids = torch.tensor([0, 1, 0, 1])
    assert step(X, X.sin(), groups=ids).norms.shape == (2,)


class Potential(nn.Module):
    """Energies of molecules `[B, 1]` and forces on their atoms `[N, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.atom, self.message, self.last = nn.Linear(4, 5), nn.Linear(11, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> tuple[Tensor, ...]:
        place = free(x[:, :3])
        h = self.atom(x).tanh()
        to, of = edge_index
        apart = (place[to] - place[of]).square().sum(1, keepdim=True)
        messages = F.silu(self.message(torch.cat([h[to], h[of], apart], 1))) * torch.exp(-apart)
        h = h + torch.zeros_like(h).index_add(0, to, messages)
        e = place.new_zeros(count, 1).index_add(0, batch, self.last(h.sin()))
        return e, -grad(e.sum(), place, create_graph=True)[0], batch


def of_molecules(out: tuple[Tensor, ...], y: Tensor) -> Tensor:
    e, f, batch = out
    losses = (e.squeeze(1) - y) ** 2
    return losses + torch.zeros_like(losses).index_add(0, batch, (f - 0.3).square().sum(1))


def test_forces_on_molecules_of_any_size() -> None:
    batches = [graphs_of_nodes.graphs(*given) for given in (graphs_of_nodes.MANY[0], graphs_of_nodes.MANY[4])]
    torch.manual_seed(0)
    check_rows(Potential().double(), of_molecules, [_with_energies(batch) for batch in batches])


def _with_energies(batch: Batch) -> Batch:
    def part(of: Part) -> Part:
        return Part(of.inputs, tuple(t.double().sin() for t in of.targets))

    return Batch(part(batch.whole), tuple(map(part, batch.alone)), batch.batch_dim)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def _by(m: Net, x: Tensor, energy: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
    x = free(x)
    return grad(energy(x).sum(), x, create_graph=True, **options)[0]


def _backward(m: Net, x: Tensor) -> Tensor:
    x = free(x)
    m.energy(x).sum().backward()
    return m.energy(x)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "of all samples": (
        lambda m, x: _by(m, x, lambda v: m.energy(v).sum() ** 2), SamplesMixed, "reduced over them.*grad",
    ),
    "by a parameter": (
        lambda m, x: F.linear(x, grad(m.energy(x).sum(), m.first.weight, create_graph=True)[0]), SamplesMixed, "grad",
    ),
    "a custom function": (
        lambda m, x: _by(m, x, lambda v: Doubled.apply(m.energy(v))), NotYetSupported, "the custom function Doubled",
    ),
    "attention that draws": (
        lambda m, x: _by(m, x, lambda v: F.scaled_dot_product_attention(*[m.first(v)[:, None]] * 3, dropout_p=0.5)),
        NotYetSupported, "draws at random",
    ),
    "several at once": (
        lambda m, x: _by(m, x, m.first, grad_outputs=torch.ones(2), is_grads_batched=True), NotYetSupported, "batched",
    ),
    "into .grad": (_backward, NotYetSupported, r"a backward pass of its own.*backward\(\).*autograd.grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    require_refused(problem(function), kind, text)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused(layer: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(2, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = free(x.unflatten(1, (4, 2)))
            return grad(self.layer(x)[0].sum(), x, create_graph=True, allow_unused=True)[0]

    with pytest.raises(NotYetSupported, match="through a recurrent layer"):
        with_loss(Problem(Recurrent().double(), X))
