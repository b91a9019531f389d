"""Models and losses that differentiate by `torch.func`: Jacobians, Laplacians, products with them, under `vmap` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import psg_fx
from external.program import Problem, Program, check, check_together, require_refused, truth, with_loss
from psg_fx import NotYetSupported, SamplesMixed
from support import oracle
from support.selection import at_once

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """`function(self, x)` with what the functions below need."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.function = nn.Linear(3, 6), nn.Linear(6, 1), function

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x).tanh()
        return found

    def energy(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.features(x)).sum()
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _kept(m: Net, x: Tensor) -> Tensor:
    """Once differentiated with what the function returns besides, once with its value, at both of two arguments."""
    by, value = grad(lambda v: (m.energy(v), m.features(v)), has_aux=True)(x)
    (by_x, by_y), energy = vmap(grad_and_value(lambda v, w: m.energy(v * w), argnums=(0, 1)))(x, x + 1)
    return by + value[:, :3] * by_x + by_y * energy[:, None]


def _trees(m: Net, x: Tensor) -> Tensor:
    found = grad(lambda d: m.energy(d["a"] * d["b"][0]))({"a": x, "b": [x.cos()]})
    return found["a"] - found["b"][0]


def _what_is_read_besides(m: Net, x: Tensor) -> Tensor:
    """The same tensor: constant for the derivative, but not for the gradients of the parameters."""
    h = m.features(x)
    return grad(lambda v: (v * h * h.sin()).sum() + v.square().sum())(h)


def _of_a_derivative(m: Net, x: Tensor) -> Tensor:
    """In both orders of forward and reverse mode."""
    inner = grad(lambda v: jvp(m.energy, (v,), (v.cos(),))[1])(x)
    return inner + jvp(grad(m.energy), (x,), (x.sin(),))[1]


def _products(m: Net, x: Tensor) -> Tensor:
    """Of two arguments and results, and with what is learned."""
    (_, both), pulled, kept = vjp(lambda v, w: ((m.features(v * w), m.first(w)), v), x, x + 1, has_aux=True)
    by_x, by_y = pulled((both, m.features(x)))
    value, pushed = jvp(lambda v, w: m.features(v * w), (x, by_x), (x.cos(), m.first(x)[:, :3]))
    return by_x + by_y + kept + (value * pushed)[:, :3]


def _constant(m: Net, x: Tensor) -> Tensor:
    """No gradient at all, a result that has none, and derivatives taken where autograd is off."""
    none = grad(lambda v: m.energy(torch.ones_like(x)))(x)
    number, tangent = jvp(lambda v: (v.round(), m.energy(x))[0], (x,), (x,))
    with torch.no_grad():
        direction = grad(m.energy)(x)
    return m.features(x + none + direction + number * tangent)


def _counted_from_the_end(m: Net, x: Tensor) -> Tensor:
    by = grad(lambda v, w: m.energy(v * w), argnums=-1)(x, x.cos())
    return by + grad(lambda v, w: m.energy(v * w), argnums=(-1, 0))(x, x.cos())[1]


def _pulled_outside(m: Net, x: Tensor) -> Tensor:
    """What is taken where autograd is off is constant, wherever it is asked; an output may be of something else."""
    with torch.no_grad():
        _, pulled = vjp(m.features, x)
    _, tangents = jvp(lambda v: (m.features(v), m.first(x)), (x,), (x.sin(),))
    return pulled(m.first(x).detach())[0] + tangents[0][:, :3] + tangents[1][:, :3]


def _hutchinson(m: Net, x: Tensor) -> Tensor:
    """The divergence in a random direction (Grathwohl et al. 2019, arXiv:1810.01367)."""
    probe = x.sign()
    _, pulled = vjp(lambda v: m.first(v).tanh()[:, :3], x)
    return (pulled(probe)[0] * probe).sum(1, keepdim=True)


def _laplacian(m: Net, x: Tensor) -> Tensor:
    return vmap(lambda v: torch.trace(hessian(m.energy)(v)))(x)[:, None]


def _third(m: Net, x: Tensor) -> Tensor:
    return vmap(grad(lambda v: torch.trace(jacrev(jacfwd(m.energy))(v))))(x)


def _jacobians(m: Net, x: Tensor) -> Tensor:
    """By two arguments, and with what the function returns besides."""
    two = sum(vmap(jacrev(lambda v, w: m.features(v * w), argnums=(0, 1)))(x, x + 1))
    one, kept = vmap(jacfwd(lambda v: (m.features(v), m.first(v)), has_aux=True))(x)
    found: Tensor = two + one * kept[:, :, None]
    return found


def _chunks(m: Net, x: Tensor) -> Tensor:
    return torch.cat([vmap(jacrev(m.features, chunk_size=size))(x) for size in (1, 4)], 1)


def _axes(m: Net, x: Tensor) -> Tensor:
    """Slices of other dims, of slices, and of samples, and what is the same for all of them."""
    turned = vmap(grad(m.energy), in_dims=1, out_dims=1)(x.T).T
    nested = vmap(vmap(grad(lambda v, w: m.energy(v * w)), in_dims=(0, None)))(torch.stack([x, x * 2], 1), x)
    scales = torch.arange(1.0, 4.0, dtype=x.dtype)
    shared = vmap(lambda k: grad(lambda v: m.features(v * k).sum())(x))(scales)
    return turned + nested.sum(1) + shared.sum(0)


def _lagrangian(m: Net, x: Tensor) -> Tensor:
    """Accelerations by the equations of motion (Cranmer et al. 2020, arXiv:2003.04630)."""

    def lagrangian(q: Tensor, v: Tensor) -> Tensor:
        return (m.first(q)[:3].tanh() * v * v).sum() + m.first(q * v).sin().sum() + 2 * (v * v).sum()

    def acceleration(q: Tensor, v: Tensor) -> Tensor:
        mass = hessian(lagrangian, 1)(q, v)
        force = grad(lagrangian, 0)(q, v) - jacfwd(jacrev(lagrangian, 1), 0)(q, v) @ v
        return torch.linalg.solve(mass, force)

    return vmap(acceleration)(x, x.cos())


def _normalised(m: Net, x: Tensor) -> Tensor:
    return vmap(grad(lambda v: F.layer_norm(m.first(v), (6,)).sin().sum()))(x)


def _normalised_with_kept_statistics(m: Net, x: Tensor) -> Tensor:
    """Of one sample as a batch."""
    mean, var = torch.arange(6.0, dtype=x.dtype) / 6, torch.arange(1.0, 7.0, dtype=x.dtype)

    def energy(v: Tensor) -> Tensor:
        return F.batch_norm(m.first(v)[None], mean, var, m.last.weight[0], m.first.bias).sin().sum()

    return vmap(grad(energy))(x)


def _of_a_result_with_statistics(m: Net, x: Tensor) -> Tensor:
    return grad(lambda v: torch.native_layer_norm(m.first(v), (6,), None, None, 1e-5)[0].sin().sum())(x)


def _adapted(m: Net, x: Tensor) -> Tensor:
    """Finn et al. 2017, arXiv:1703.03400: two steps for each sample, from what all have in common."""
    common = dict(m.first.named_parameters())

    def task(v: Tensor) -> Tensor:
        own = common
        for _ in range(2):
            by = grad(lambda p: functional_call(m.first, p, (v,)).square().mean())(own)
            own = {name: p - 0.1 * by[name] for name, p in own.items()}
        return m.last(functional_call(m.first, own, (v.sin(),)).tanh())

    return vmap(task)(x)


def _by_what_samples_share(m: Net, x: Tensor) -> Tensor:
    """A vjp, a jvp and a Hessian by parameters, for each sample; a vmap in a vmap."""
    w, b = m.last.weight[0, :3], m.last.bias

    def each(v: Tensor) -> Tensor:
        value, pull = vjp(lambda p: (v * p).sin(), w)
        _, pushed = jvp(lambda p: (v * p).cos() * p, (w,), (v,))
        bent = hessian(lambda p: (v * p).sum() ** 3)(w)
        inner = vmap(lambda u: grad(lambda p: (p * v * u).sin().sum())(b))(v)
        return pull(value)[0] + pushed + bent.sum(0) + inner[:, 0]

    return vmap(each)(x)


EXACT = [
    _kept, _trees, _what_is_read_besides, _of_a_derivative, _products, _constant, _hutchinson, _laplacian, _third,
    _jacobians, _axes, _counted_from_the_end, _pulled_outside, _normalised, _normalised_with_kept_statistics,
    _of_a_result_with_statistics, _adapted, _by_what_samples_share,
]  # fmt: skip
BY_NAME: dict[str, Callable[[Any, Tensor], Tensor]] = {function.__name__: function for function in EXACT}


def problem(function: Callable[[Any, Tensor], Tensor]) -> Problem:
    return Problem(Net(function).double(), X.clone())


@pytest.mark.parametrize("names", at_once([list(BY_NAME)[k::3] for k in range(3)], BY_NAME))
def test_exact(names: tuple[str, ...]) -> None:
    check_together(BY_NAME, names, problem)


@pytest.mark.slow
@pytest.mark.parametrize("function", [_chunks, _lagrangian])
@pytest.mark.filterwarnings("ignore:one graph for each batch size")  # of these torch's vmap reads it
def test_for_one_size(function: Callable[[Any, Tensor], Tensor]) -> None:
    check(Program(function.__name__, lambda: problem(function)), with_loss)


@pytest.mark.slow
def test_third_derivatives_of_a_normalisation() -> None:
    """Those of torch are wrong: here they are compared with the formula, written out."""

    def normalised(m: Net, v: Tensor) -> Tensor:
        return F.layer_norm(m.first(v), (6,))

    def written(m: Net, v: Tensor) -> Tensor:
        h = m.first(v)
        found: Tensor = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
        return found

    def trace_with(form: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
        return lambda m, x: vmap(lambda v: torch.trace(hessian(lambda w: form(m, w).sin().sum())(v)))(x)

    found = with_loss(problem(trace_with(normalised)))
    assert oracle.worst_error(found, truth(problem(trace_with(written)))) < 1e-11


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled() -> None:
    program = Program("laplacian", lambda: problem(_laplacian))
    assert oracle.worst_error(with_loss(program.problem(), backend="inductor"), truth(program.problem())) < 1e-11


@pytest.mark.parametrize("function", [_hutchinson, _laplacian, _adapted])
def test_one_graph_for_all_sizes(function: Callable[[Any, Tensor], Tensor]) -> None:
    step = psg_fx.transform(Net(function).double(), F.mse_loss, quantities=psg_fx.Norms(), backend="eager")
    whole = step(X, X[:, :1]).norms
    assert torch.allclose(step(X[:2], X[:2, :1]).norms, whole[:2], atol=1e-12)
    assert len(step.captures) == 1


def _learned_update(m: Net, x: Tensor) -> Tensor:
    """Finn et al. 2017, arXiv:1703.03400: one step for all samples."""
    given = dict(m.first.named_parameters())
    by = grad(lambda p: functional_call(m.first, p, (x,)).square().sum())(given)
    found: Tensor = functional_call(m.first, {name: p - 0.1 * by[name] for name, p in given.items()}, (x,))
    return found


def _without_gradients(m: Net, x: Tensor) -> Tensor:
    def function(v: Tensor) -> Tensor:
        with torch.no_grad():  # a gate
            gate = m.first(v).sigmoid()
        return gate * m.features(v)

    return grad(lambda v: function(v).sum())(x) + jvp(function, (x,), (x,))[1][:, :3]


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], type[Exception], str]] = {
    "by a parameter": (_learned_update, SamplesMixed, "the sample dim"),
    "no gradients in forward mode": (_without_gradients, NotYetSupported, r"turns gradients off.*# a gate"),
    "written argument": (
        lambda m, x: jvp(lambda v: m.last(v.mul_(2)), (m.features(x),), (m.features(x),))[1],
        NotYetSupported, "writes into its argument",
    ),
    "a question of levels": (
        lambda m, x: grad(lambda v: m.energy(v) * (2 if v.requires_grad else 1))(x), NotYetSupported, "asks whether",
    ),
    "data": (lambda m, x: grad(lambda v: (m.first(v).data * m.first(v)).sum())(x), NotYetSupported, r"reads \.data"),
    "of all samples": (lambda m, x: jacrev(m.features)(x).sum((0, 1)), NotYetSupported, "for another batch size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    require_refused(problem(function), kind, text)
