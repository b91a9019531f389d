"""Hooks that a model puts on gradients of activations: what they make of a gradient is part of the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import psg_fx
from external.program import Problem, Program, check, check_together, drop_in, require_refused, truth, with_loss
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
        self.recurrent = nn.GRU(5, 5, batch_first=True)
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


def _read_at_the_end(m: Net, x: Tensor) -> Tensor:
    """Variables of a hook are what they are when the forward pass is over; what it reads gets no gradient of it."""
    h = m.features(x)
    mask, seen = torch.ones_like(h), []
    h.register_hook(lambda g: g * mask * seen[0] + (g * factor).view(g.shape))
    mask[:, 0] = 0
    mask, factor, value = mask * 3, h.sin(), h * 2
    seen.append(h.cos())
    value.register_hook(lambda g: g + 1)
    other = h * 3
    other.register_hook(lambda g: g.mul_(value))
    h = h.cos()
    return m.last(h + other)


def _in_other_things(m: Net, x: Tensor) -> Tensor:
    """`functools.partial`, methods, wrappers, and ops that return what they are given."""
    h = m.features(x)
    mask = (h > 0).to(x.dtype)
    for hook in (partial(_masked, mask=mask), torch.no_grad()(lambda g: g * mask.to(g.dtype).contiguous()), m.smaller):
        h = h * 1
        h.register_hook(hook)
    return m.last(h)


def _without_gradients(m: Net, x: Tensor) -> Tensor:
    """Registered where gradients are off, on a value that has one."""
    h = m.features(x)
    with torch.no_grad():
        h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return m.last(h)


def _masked(g: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([g * mask, g], 1)[:, : g.shape[1]]


def _beside_another_gradient(m: Net, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    by = grad(m.features(y).sum(), y, create_graph=True)[0]
    h = m.features(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return m.last(h) + by[:, :2]


EXACT = {
    "read at the end": _read_at_the_end, "in other things": _in_other_things,
    "registered without gradients": _without_gradients,
    "beside another gradient": _beside_another_gradient,
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
    check_together(EXACT, names, problem)


def test_without_a_loss() -> None:
    check(Program("several", lambda: problem(_several)), drop_in)


@pytest.mark.slow
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


def _counting(m: Net, x: Tensor) -> Tensor:
    h, count = m.features(x), 0

    def hook(g: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return g * count

    h.register_hook(hook)
    return m.last(h)


def _of_a_scalar(m: Net, x: Tensor) -> Tensor:
    total = m.features(x).sum()
    total.register_hook(lambda g: 3 * g)
    return m.last(m.features(x)) * total


def _of_a_written_view(m: Net, x: Tensor) -> Tensor:
    h = m.features(x).clone()
    view = h[:, 0]
    view.register_hook(lambda g: 0 * g)
    view.mul_(2)
    return m.last(h)


def _of_an_attribute(m: Net, x: Tensor) -> Tensor:
    h = m.features(x)
    m.kept = h.detach()
    h.register_hook(lambda g: g * m.kept)
    return m.last(h)


def _of_a_recurrent_layer(m: Net, x: Tensor) -> Tensor:
    h = m.recurrent(m.features(x)[:, None])[0][:, 0]
    h.register_hook(lambda g: 2 * g)
    return m.last(h)


def _of_a_fixed_point(m: Net, x: Tensor, inside: bool = False) -> Tensor:
    """Bai et al. 2019, arXiv:1909.01377: the gradient by iterations with the Jacobian at a fixed point."""
    h = m.features(x)
    point = h.detach().requires_grad_()
    step = 0.3 * (m.last(point) @ m.last.weight).tanh()

    def hook(g: Tensor) -> Tensor:
        at, value, found = point, step, g
        if inside:
            with torch.enable_grad():
                at = h.detach().requires_grad_()
                value = 0.3 * (m.last(at) @ m.last.weight).tanh()
        for _ in range(4):
            found = g + grad(value, at, found, retain_graph=True)[0]
        return found

    h.register_hook(hook)
    return m.last(h)


def test_a_hook_that_computes_what_it_differentiates() -> None:
    check(Program("fixed point", lambda: problem(partial(_of_a_fixed_point, inside=True))), with_loss)


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], type[Exception], str]] = {
    "keeps it": (_hooked(lambda m, g: setattr(m, "kept", g)), NotYetSupported, "that keeps a gradient.*hook\\(m, g\\)"),
    "keeps what it computes": (
        _hooked(lambda m, g: m.norms.append(g.norm(dim=1))), NotYetSupported, "or what it computes of it",
    ),
    "reads a number": (
        _hooked(lambda m, g: setattr(m, "norm", g.norm().item())), NotYetSupported, "reads a number out of a tensor",
    ),
    "by the norm of all": (_hooked(lambda m, g: g / g.norm()), SamplesMixed, "linalg_vector_norm"),
    "of the gradient of the code": (_of_the_gradient_of_the_code, NotYetSupported, r"a hook beside torch\.autograd"),
    "counts": (_counting, NotYetSupported, "changes variables or attributes"),
    "another shape": (_hooked(lambda m, g: g[:1]), NotYetSupported, "returns another shape"),
    "no tensor": (_hooked(lambda m, g: 2.0), NotYetSupported, "returns no tensor"),
    "another one": (_hooked(lambda m, g: g.register_hook(m.smaller)), NotYetSupported, "registers another one"),
    "writes and returns nothing": (_hooked(lambda m, g: (g.mul_(2), None)[1]), NotYetSupported, "and writes into it"),
    "a scalar": (_of_a_scalar, NotYetSupported, "a hook on a scalar"),
    "a view that is written": (_of_a_written_view, NotYetSupported, "a view that is written into later"),
    "an attribute of the forward": (_of_an_attribute, NotYetSupported, "reads kept, which the forward pass sets"),
    "a recurrent layer": (_of_a_recurrent_layer, NotYetSupported, "what a recurrent layer returns"),
    "by what is drawn of it": (_by_what_is_drawn, NotYetSupported, "reads what is drawn"),
    "differentiates the forward": (_of_a_fixed_point, NotYetSupported, "compute what is differentiated inside of it"),
    "of a parameter": (_of_a_parameter, NotYetSupported, "on the gradient of a parameter"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    require_refused(problem(function), kind, text)
