"""Custom autograd functions, hooks and checkpoints: their backward counts, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import psg_fx
from external.program import Problem, Program, check, drop_in, with_loss
from psg_fx import NotYetSupported, SamplesMixed
from support import oracle
from support.selection import at_once, one_in

Function = torch.autograd.Function


class Scaled(Function):
    """Its backward is not that of its forward, and it keeps a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 1.5 * g * x.sigmoid()


class SumAndProduct(Function):
    """Two inputs, two outputs, `setup_context`, and an argument that is no tensor."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x + y, scale * x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, None]:
        return g + h, ctx.scale * g - h, None


class Looked(Function):
    """An integer input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size = x.shape[-1]
        return x.gather(-1, ids)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return 3.0 * g.new_zeros(*g.shape[:-1], ctx.size).scatter_add(-1, ids, g), None


class Reversed(Function):
    """The gradient reversal of domain adaptation (Ganin, Lempitsky 2015, arXiv:1409.7495)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class CentredForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class ClippedBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class Turned(Function):
    """On complex values; its backward is twice the gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 1j

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * -2j


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2.0 * g


class NoisyWeight(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w + torch.randn_like(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Model(nn.Module):
    """`function(self, x)` with two linear layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _complex(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, -1))


def _real(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def _two(m: Any, x: Tensor) -> Tensor:
    s, p = SumAndProduct.apply(m.a(x), m.b(x), 0.5)
    return s * p


def _parameter_and_data(m: Any, x: Tensor) -> Tensor:
    s, p = SumAndProduct.apply(m.a(x), m.b.bias.expand(x.shape), 0.5)
    return s * p


def _nested(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.a(checkpoint(lambda v: m.b(v).tanh(), m.a(x), use_reentrant=False))
    return found


def _inferred(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = m.a(x).tanh()
    found: Tensor = m.b(x) * h.clone()
    return found


def _written_without_gradients(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.a(x)
    with torch.no_grad():
        h.mul_(2.0)
    return h


def _written(write: Callable[[Tensor, Tensor], Any], grad: bool = False) -> Callable[[Any, Tensor], Tensor]:
    """A tensor without a gradient that is written into by what has one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h, target = m.a(x), torch.zeros_like(x)
        with torch.set_grad_enabled(grad):
            write(target, h)
        found: Tensor = m.b(x) * (h - target).square() + target
        return found

    return forward


def _by_column(target: Tensor, h: Tensor) -> None:
    target[..., 0] = h[..., 0]
    target[:, 1:3] += 2 * h[:, 1:3]


def _by_parts(target: Tensor, h: Tensor) -> None:
    first, _, last = target.split((2, 1, 2), 1)
    first.add_(h[:, :2])
    for row in last.unbind(1):
        row.copy_(h[:, 0])


def _in_two_steps(target: Tensor, h: Tensor) -> None:
    changed = h.softmax(-1) * 2
    target.transpose(1, 2)[:, 1:].mul_(0.5).add_(changed.transpose(1, 2)[:, 1:])
    torch.mul(target[:, 0], h[:, 0], out=target[:, 0])


def _given_back(m: Any, x: Tensor) -> Tensor:
    """Under `torch.no_grad()` an op that returns its argument itself leaves the argument's gradient alone."""
    h = m.a(x)
    with torch.no_grad():
        same = F.dropout(h.to(x.dtype).cpu().type_as(x), training=False)
        other = torch.atleast_2d(+m.b(x).contiguous()).flatten(2)
    found: Tensor = h * same.sum(-1, keepdim=True) + other
    return found


def _adding(weight: nn.Parameter, write: Callable[[nn.Parameter, Tensor], None]) -> type[Function]:
    """A function that leaves the gradient of a weight at the weight."""

    class Adding(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ weight.detach()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            write(weight, x.flatten(0, 1).T @ g.flatten(0, 1))
            return g @ weight.detach().T

    return Adding


def _by_assignment(weight: nn.Parameter, gradient: Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _by_attribute(weight: Any, gradient: Tensor) -> None:
    weight.main_grad = gradient


def _by_backward(weight: nn.Parameter, gradient: Tensor) -> None:
    with torch.enable_grad():
        torch.autograd.backward((weight * gradient).sum())


def _frozen(m: Any, x: Tensor) -> Tensor:
    """A critic, as many write it."""
    h = m.a(x)
    m.b.requires_grad_(False)
    out: Tensor = m.b(h)
    m.b.requires_grad_(True)
    return out


def _packed(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t):
        out: Tensor = m.a(x).sin()
    return out


def _threshold(m: Any, x: Tensor) -> Tensor:
    """Small weights are nought: what they are computed from is not read again."""
    h = m.a(x)
    weight = h.exp().detach()
    weight[weight < 1] = 0
    weight /= weight.sum(-1, keepdim=True) + 1
    return m.b(x) * weight * h


def _cut(t: Tensor) -> Tensor:
    t[..., 0] *= 2
    t[:, 1:3].clamp_(max=0.1)
    return t


def _assigned(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.a(x)
    h.data = 2 * h
    return h


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "activations": lambda m, x: m.b(Scaled.apply(m.a(x))),
    "a weight": lambda m, x: F.linear(m.b(x), Scaled.apply(m.a.weight)),
    "a part of a weight": lambda m, x: F.linear(x, Scaled.apply(m.a.weight[:2]).repeat(2, 1)) + m.b(x),
    "two outputs": _two,
    "parameter and data": _parameter_and_data,
    "folded rows": lambda m, x: Scaled.apply(m.a(x.reshape(-1, 4))).view(x.shape),
    "integers": lambda m, x: Looked.apply(m.a(x), m.b(x).detach().argsort(-1)),
    "the input itself": lambda m, x: m.b(Reversed.apply(m.a(x))),
    "twice": lambda m, x: Scaled.apply(m.b(Scaled.apply(m.a(x)))),
    "under no_grad": lambda m, x: m.b(x) + Scaled.apply(m.a(x).detach()),
    "checkpointed": lambda m, x: checkpoint(lambda v: Scaled.apply(m.a(v)), m.b(x), use_reentrant=False),  # type: ignore[no-any-return]
    "nested checkpoints": lambda m, x: checkpoint(_nested, m, x, use_reentrant=False),  # type: ignore[no-any-return]
    "inference mode": _inferred,
    "complex activations": lambda m, x: m.b(_real(Turned.apply(_complex(m.a(x))))),
    "a complex weight": lambda m, x: _real(_complex(m.b(x)) @ Turned.apply(_complex(m.a.weight)[:2])),
    "data": lambda m, x: m.b(x) * m.a(x).data,
    "columns written under no_grad": _written(_by_column),
    "parts written under no_grad": _written(_by_parts),
    "views written under no_grad": _written(_in_two_steps),
    "given back under no_grad": _given_back,
    "moved to where it is": lambda m, x: m.a.to(x.dtype)(m.b(x).tanh()),
    "written where it is detached": _threshold,
    "written in parts where it is detached": lambda m, x: m.b(x) * _cut(m.a(x).tanh().detach()),
    "less itself without a gradient": lambda m, x: [h := m.a(x), h.sub_(h.detach()), h + m.b(x)][2],
    "written through .data": lambda m, x: m.b(x) * m.a(x).tanh().data.clamp_(min=0.0),
    "detached in place before": lambda m, x: m.b(x * m.a(x).detach().detach_()),
}
X = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("names", at_once([list(EXACT)[k::4] for k in range(4)], EXACT))
def test_exact(names: tuple[str, ...]) -> None:
    def several(m: Any, x: Tensor) -> Tensor:
        return torch.cat([EXACT[name](m, x).flatten(1) for name in names], 1)

    check(Program("-".join(names), lambda: Problem(Model(several).double(), X)), with_loss)


@pytest.mark.parametrize("name", one_in(4, EXACT))
def test_exact_without_a_loss(name: str) -> None:
    check(Program(name, lambda: Problem(Model(EXACT[name]).double(), X)), drop_in)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "mixing forward": (
        lambda m, x: CentredForward.apply(m.a(x)), SamplesMixed, "in a custom autograd.Function: aten.sub mixes",
    ),
    "mixing backward": (
        lambda m, x: ClippedBackward.apply(m.a(x)), SamplesMixed, "in a custom autograd.Function: aten.div mixes",
    ),
    "complex mixing backward": (
        lambda m, x: _real(ClippedBackward.apply(_complex(m.a(x)))), SamplesMixed, "aten.div mixes",
    ),
    "in place": (lambda m, x: InPlace.apply(m.a(x)), NotYetSupported, "InPlace is not supported.*writes into its"),
    "noise on a weight": (
        lambda m, x: F.linear(x, NoisyWeight.apply(m.a.weight)), NotYetSupported, "draws random numbers",
    ),
    "a write under no_grad": (_written_without_gradients, NotYetSupported, "autograd does not see.*h.mul_"),
    "a write into .detach()": (
        lambda m, x: [h := m.a(x), h.detach().clamp_(min=0.0)][0], NotYetSupported, "autograd does not see.*clamp_",
    ),
    "a write into .data": (
        lambda m, x: [h := m.a(x), h.data.clamp_(min=0.0)][0], NotYetSupported, "autograd does not see.*clamp_",
    ),
    "a write into .detach() of what a view reads": (
        lambda m, x: [h := m.a(x), v := h[..., 1:], _cut(h.detach()), v.exp()][3], NotYetSupported, "does not see.*=",
    ),
    "a write into .detach() of zeros": (
        _written(lambda t, h: t.detach()[:, 0].add_(h[:, 0]), grad=True), NotYetSupported, "does not see.*add_",
    ),
    "a write into .data of zeros": (
        _written(lambda t, h: t.data.copy_(h), grad=True), NotYetSupported, "autograd does not see.*copy_",
    ),
    "a backward that writes to .grad": (
        lambda m, x: _adding(m.b.weight, _by_assignment).apply(m.a(x)), NotYetSupported, r"writes to b\.weight\.grad",
    ),
    "a backward that writes to an attribute": (
        lambda m, x: _adding(m.b.weight, _by_attribute).apply(m.a(x)), NotYetSupported, r"writes to b\.weight\.main_",
    ),
    "a backward with a backward": (
        lambda m, x: _adding(m.b.weight, _by_backward).apply(m.a(x)), NotYetSupported, "Adding is not supported.*own",
    ),
    "detached in place": (
        lambda m, x: [h := m.a(x), h.detach_(), m.b(x) * h][2], NotYetSupported, r"detaches a tensor in place.*detach_",
    ),
    "an assignment to .data": (_assigned, NotYetSupported, r"assigns to the \.data of a tensor.*data = "),
    "a gradient that is switched off": (
        _frozen, NotYetSupported, r"switches a gradient off.*requires_grad_\(False\)",
    ),
    "a hook on a node": (
        lambda m, x: [h := 1 * m.a(x), h.grad_fn.register_prehook(lambda g: (2 * g[0],))][0], NotYetSupported,
        "hook on a node of autograd.*register_prehook",
    ),
    "hooks on what is saved": (
        _packed, NotYetSupported, "hooks on the tensors that autograd saves.*saved_tensors_hooks",
    ),
    "the gradient of the last step": (
        lambda m, x: m.a(x) * (1.0 if m.a.weight.grad is None else 2.0), NotYetSupported, r"reads \.grad of a tensor",
    ),
    "hook on an activation": (
        lambda m, x: [h := m.a(x), h.register_hook(lambda g: 2 * g)][0], NotYetSupported, "hook on a tensor's gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    with pytest.raises(kind, match=f"(?s){text}"):
        with_loss(Problem(Model(function).double(), X))


@pytest.mark.parametrize("write", [_by_assignment, _by_attribute, _by_backward])
def test_nothing_is_left_at_a_parameter(write: Callable[[Any, Tensor], None], tmp_path: Path) -> None:
    model = Model(lambda m, x: _adding(m.b.weight, write).apply(m.a(x))).double()
    step = psg_fx.transform(model, lambda out: out.square().mean(), backend="eager")
    for call in (lambda: step(X), lambda: step.export(tmp_path / "step.pt2", X)):
        with pytest.raises(NotYetSupported):
            call()
        assert model.b.weight.grad is None
        assert not vars(model.b.weight)


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = Model(EXACT["activations"]).double()
    handle = model.a.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(NotYetSupported, match=r"a\.weight has a hook on its gradient"):
        with_loss(Problem(model, X))
    handle.remove()
    with_loss(Problem(model, X))


def test_a_backward_hook_on_a_module_is_refused() -> None:
    model = Model(EXACT["activations"]).double()
    model.a.register_full_backward_hook(lambda m, i, o: (2 * i[0],))
    with pytest.raises(NotYetSupported, match="a module has a backward hook"):
        with_loss(Problem(model, X))


def test_reentrant_checkpoint() -> None:
    """`autograd.grad`, which the loop needs, does not pass through one; the same block without it is the truth."""

    def model(wrapped: bool) -> nn.Module:
        torch.manual_seed(0)

        def forward(m: Any, x: Tensor) -> Tensor:
            h = m.b(x)
            inner: Any = lambda v: torch.tanh(m.a(v))  # noqa: E731
            found: Tensor = checkpoint(inner, h, use_reentrant=True) if wrapped else inner(h)
            return found

        return Model(forward).double()

    truth = oracle.loop_grads(model(False), Problem(model(False), X).loss, X)[1]
    assert oracle.worst_error(with_loss(Problem(model(True), X)), truth) < 1e-12


def test_captures_of_one_model_do_not_meet() -> None:
    """Each call of a function is an op of its own, also when the model is captured again."""
    step = psg_fx.transform(Model(EXACT["twice"]), lambda out: out.sum(), backend="eager")
    first = step(X.float()).grads["a.weight"]
    step(X.float()[:, :3])
    assert torch.equal(step(X.float()).grads["a.weight"], first)
