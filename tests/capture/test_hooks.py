"""Hooks that a model puts on gradients of activations: what they make of a gradient is part of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import psg_fx
from external.program import Problem, Program, check, drop_in, truth, with_loss
from psg_fx import NotYetSupported, SamplesMixed
from support import oracle
from support.selection import at_once

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """`function(self, x)` with what the functions below need."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.function, self.scale = nn.Linear(3, 5), nn.Linear(5, 2), function, 0.3
        self.norms: list[Tensor] = []
        self.register_buffer("factor", torch.tensor(0.7))

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x).tanh()
        return found

    def smaller(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _hooked(hook: Callable[[Net, Tensor], Any]) -> Callable[[Net, Tensor], Tensor]:
    def function(m: Net, x: Tensor) -> Tensor:
        h = m.features(x)
        h.register_hook(lambda g: hook(m, g))
        found: Tensor = m.last(h)
        return found

    return function


def _after_it_is_read(m: Net, x: Tensor) -> Tensor:
    """Ganin, Lempitsky 2015, arXiv:1409.7495: the features learn the opposite."""
    h = m.features(x)
    y = m.last(h)
    h.register_hook(lambda g: -m.scale * g)
    return y + m.last(h.sin())


def _several(m: Net, x: Tensor) -> Tensor:
    """The first one that is registered gets the gradient first; one is taken away, and one looks on."""
    h = m.features(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    h.register_hook(lambda g: 3 * g + 0.05)
    h.register_hook(lambda g: None)
    h.register_hook(lambda g: 0 * g).remove()  # type: ignore[no-untyped-call]
    return m.last(h)


def _parts(m: Net, x: Tensor) -> Tensor:
    """Of a view, of results of one op, and of what is written in place before and after."""
    a, b = m.features(x).split([2, 3], 1)
    a.register_hook(lambda g: 0.1 * g)
    b.register_hook(lambda g: g.sign() * (g.abs() > 0.01))
    h = torch.cat([a, b], 1) * 2
    h.mul_(2)
    h.register_hook(lambda g: 5 * g)
    h = h.sin_()
    view = h[:, :2]
    view.register_hook(lambda g: 2 * g)
    return m.last(h) + view


def _in_a_loop(m: Net, x: Tensor) -> Tensor:
    h = m.features(x)
    for k in range(3):
        h = h.sin()
        if h.requires_grad:
            h.register_hook(lambda g, k=k: g * (k + 2))
    h.register_hook(m.smaller)
    return m.last(h)


def _by_what_is_computed(m: Net, x: Tensor) -> Tensor:
    """The gradient of the mask is none of the hook's; `scale` is a number beside it."""
    h, scale = m.features(x), m.scale
    mask, other = h > 0, m.first(x).sigmoid()
    h.register_hook(lambda g, mask=mask, *, power=2: g * mask * scale**power + g * other)
    return m.last(h) + other[:, :2]


EXACT = {
    "by what is computed": _by_what_is_computed,
    "after it is read": _after_it_is_read, "several": _several, "parts": _parts, "in a loop": _in_a_loop,
    "by a row's norm": _hooked(lambda m, g: g / g.norm(dim=1, keepdim=True)),
    "by a buffer": _hooked(lambda m, g: g * m.factor),
    "in several steps": _hooked(lambda m, g: torch.where(g > 0, (g * 2).clamp(max=1), g + g.abs())),
}  # fmt: skip


def problem(function: Callable[[Any, Tensor], Tensor]) -> Problem:
    return Problem(Net(function).double(), X.clone())


@pytest.mark.parametrize("names", at_once([list(EXACT)[k::2] for k in range(2)], EXACT))
def test_exact(names: tuple[str, ...]) -> None:
    def together(m: Any, x: Tensor) -> Tensor:
        return torch.cat([EXACT[name](m, x) for name in names], 1)

    check(Program("-".join(names), lambda: problem(together)), with_loss)


def test_without_a_loss() -> None:
    check(Program("several", lambda: problem(_several)), drop_in)


@pytest.mark.inductor
def test_compiled() -> None:
    program = Program("parts", lambda: problem(_parts))
    assert oracle.worst_error(with_loss(program.problem(), backend="inductor"), truth(program.problem())) < 1e-12


def test_in_the_loss() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        out = out * 1
        out.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return F.mse_loss(out, y)

    check(Program("loss", lambda: Problem(Net(lambda m, x: m.last(m.first(x))).double(), X, X[:, :2], loss)), with_loss)


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
def test_one_graph_for_each_size() -> None:
    def function(m: Net, x: Tensor) -> Tensor:
        return _after_it_is_read(m, x) * torch.ones(int(x.shape[0]), 1, dtype=x.dtype)

    check(Program("one size", lambda: problem(function)), with_loss)


def test_what_a_hook_reads_is_read_anew() -> None:
    given = problem(_after_it_is_read)
    step = psg_fx.transform(given.model, given.loss, quantities=psg_fx.Grads(), backend="eager")
    for scale in (0.3, 0.5, 0.3):
        given.model.scale = scale  # type: ignore[assignment]
        found, want = step(X).grads, oracle.loop_grads(given.model, given.loss, X)[1]
        assert oracle.worst_error(found, want) < 1e-12
    assert len(step.captures) == 2


def _of_the_gradient_of_the_code(m: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = m.features(x)
    h.register_hook(lambda g: 2 * g)
    return grad(m.last(h).sum(), x, create_graph=True)[0]


def _of_a_parameter(m: Net, x: Tensor) -> Tensor:
    m.last.weight.register_hook(lambda g: 2 * g)
    return m.last(m.features(x))


def _by_what_is_drawn(m: Net, x: Tensor) -> Tensor:
    h = m.features(x)
    kept = F.dropout(h)
    h.register_hook(lambda g: g * (kept != 0))
    return m.last(kept)


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], type[Exception], str]] = {
    "keeps it": (_hooked(lambda m, g: setattr(m, "kept", g)), NotYetSupported, "a gradient that keeps it"),
    "keeps what it computes": (
        _hooked(lambda m, g: m.norms.append(g.norm(dim=1))), NotYetSupported, "what it computes of it",
    ),
    "reads a number": (
        _hooked(lambda m, g: setattr(m, "norm", g.norm().item())), NotYetSupported, "reads a number out of it",
    ),
    "by the norm of all": (_hooked(lambda m, g: g / g.norm()), SamplesMixed, "linalg_vector_norm"),
    "of the gradient of the code": (_of_the_gradient_of_the_code, NotYetSupported, r"a hook beside torch\.autograd"),
    "by what is drawn of it": (_by_what_is_drawn, NotYetSupported, "reads what is drawn"),
    "of a parameter": (_of_a_parameter, NotYetSupported, "on the gradient of a parameter"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    with pytest.raises(kind, match=f"(?s){text}"):
        with_loss(problem(function))
