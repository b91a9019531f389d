"""Custom autograd functions, hooks and writes that autograd does not see: refused, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from external.program import Problem, Program, check, require_refused, with_loss
from psg_fx import NotYetSupported, SamplesMixed
from support.autograd_functions import (
    Function,
    Model,
    Scaled,
    Shifted,
    Sized,
    SumAndProduct,
    X,
    as_complex,
    as_real,
    cut,
    written,
)


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


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.01, 0.01)


class ClippedMasked(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return w * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return g.clamp(-0.01, 0.01) * mask, None


class Passed(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return g * (w.abs() < 0.3)


class Padded(Function):
    """As scans write, in place: a view of what has been padded is written and kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        view = F.pad(x, (0, 0, 0, 1)).transpose(1, 2)
        view.mul_(2.0)
        ctx.save_for_backward(view)
        return view.transpose(1, 2)[:, :-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (view,) = ctx.saved_tensors
        return g * view.transpose(1, 2)[:, :-1].cos()


def _twice(function: type[Any], m: Any, x: Tensor, *more: Tensor) -> Tensor:
    """Of one weight: as a matrix, and as the sums of its rows."""
    weight = function.apply(m.a.weight, *more)
    found: Tensor = m.b(x) @ weight.t() + weight.sum(1)
    return found


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2.0 * g


class InPlaceBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.mul_(2)


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Any) -> Any:
        return [x.sin()] if other == "list" else (x.sin(), x.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor, None]:
        return g, None


class AsksForParameters(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * 2 if isinstance(w, nn.Parameter) else x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class NoisyWeight(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w + torch.randn_like(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _written_without_gradients(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.a(x)
    with torch.no_grad():
        h.mul_(2.0)
    return h


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


def _assigned(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.a(x)
    h.data = 2 * h
    return h


def _sized(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.b(Sized.apply(m.a(x), forward, backward))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "mixing forward": (
        lambda m, x: CentredForward.apply(m.a(x)), SamplesMixed, "in a custom autograd.Function: aten.sub mixes",
    ),
    "a view that is written and kept": (
        lambda m, x: Padded.apply(m.a(x)), NotYetSupported, r"writes into a view and keeps it[^$]*view\.clone\(\)",
    ),
    "a weight at two places": (
        lambda m, x: _twice(Clipped, m, x), NotYetSupported, "used at 2 places, and its backward is not linear",
    ),
    "a masked weight at two places": (
        lambda m, x: _twice(ClippedMasked, m, x, torch.ones(m.a.weight.shape, dtype=torch.bool)), NotYetSupported,
        "used at 2 places, and its backward is not linear",
    ),
    "mixing backward": (
        lambda m, x: ClippedBackward.apply(m.a(x)), SamplesMixed, "in a custom autograd.Function: aten.div mixes",
    ),
    "complex mixing backward": (
        lambda m, x: as_real(ClippedBackward.apply(as_complex(m.a(x)))), SamplesMixed, "aten.div mixes",
    ),
    "a forward that computes with the batch size": (
        _sized(lambda t, n: t / n, lambda g, n: g), NotYetSupported, "Sized computes with the batch size.*its forward",
    ),
    "a backward that computes with the batch size": (
        _sized(lambda t, n: +t, lambda g, n: g / n), NotYetSupported, "Sized computes with the batch size.*its backwa",
    ),
    "a backward for batches": (
        _sized(lambda t, n: +t, lambda g, n: g if n > 1 else 2 * g), NotYetSupported, "a batch of one sample diff.*> 1",
    ),
    "a backward that reads the batch size": (
        _sized(lambda t, n: +t, lambda g, n: g * int(n)), NotYetSupported, r"reads the batch size as a .*\* int\(n\)",
    ),
    "a forward that reads the batch size": (
        _sized(lambda t, n: t * float(n), lambda g, n: g), NotYetSupported, "reads the batch size as a .*float",
    ),
    "a forward for batches beside a plain batch size": (
        lambda m, x: _sized(lambda t, n: t if n > 4 else 2 * t, lambda g, n: g)(m, x) / float(len(x)), NotYetSupported,
        "a batch of one sample differently.*n > 4",
    ),
    "the batch size as an argument that is computed with": (
        lambda m, x: SumAndProduct.apply(m.a(x), m.b(x), x.shape[0])[1], NotYetSupported, "computes with the batch siz",
    ),
    "a number made of the batch size as an argument": (
        lambda m, x: SumAndProduct.apply(m.a(x), m.b(x), x.shape[0] / 2)[1], NotYetSupported, "size is among its argum",
    ),
    "a number that follows the batch size": (
        lambda m, x: SumAndProduct.apply(m.a(x), m.b(x), int(x.shape[0]))[1], NotYetSupported, "is another one for ano",
    ),
    "in place": (lambda m, x: InPlace.apply(m.a(x)), NotYetSupported, "InPlace is not supported.*writes into its"),
    "a value that it has written into": (
        lambda m, x: [h := m.a(x), Shifted.apply(h) + h][1], NotYetSupported, "Shifted is not.*_functions.py:.*read ag",
    ),
    "what was detached of it before": (
        lambda m, x: [h := m.a(x), d := h.detach(), Shifted.apply(h) + d][2], NotYetSupported, "is read again afterwar",
    ),
    "another function of it": (
        lambda m, x: [h := m.a(x), Shifted.apply(h[:, :1]).sum() + Shifted.apply(h)][1], NotYetSupported, "read again",
    ),
    "a parameter that it writes into": (lambda m, x: m.a(x) * Shifted.apply(m.b.bias), NotYetSupported, "writes into"),
    "a backward in place": (
        lambda m, x: InPlaceBackward.apply(m.a(x)), NotYetSupported, "writes into a tensor that it is given",
    ),
    "a list": (lambda m, x: Nested.apply(m.a(x), "list")[0], NotYetSupported, "returns a tensor within something"),
    "the batch size as a result": (
        lambda m, x: Nested.apply(m.a(x), "size")[0], NotYetSupported, "it returns the batch size",
    ),
    "a question for the kind of a tensor": (
        lambda m, x: AsksForParameters.apply(m.a(x), m.b.weight), NotYetSupported, "asks whether a tensor is a Parame",
    ),
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
        lambda m, x: [h := m.a(x), v := h[..., 1:], cut(h.detach()), v.exp()][3], NotYetSupported, "does not see.*=",
    ),
    "a write into .detach() of zeros": (
        written(lambda t, h: t.detach()[:, 0].add_(h[:, 0]), grad=True), NotYetSupported, "does not see.*add_",
    ),
    "a read of what was written into .data with a gradient": (
        lambda m, x: [t := torch.zeros_like(x).data, t.add_(m.a(x)), m.b(t)][2], NotYetSupported, "not see.*add_",
    ),
    "a view of what is written into .data with a gradient": (
        lambda m, x: [t := torch.zeros_like(x).data, v := t[:, 1:], t.add_(m.a(x)), x[:, 1:] * v][3],
        NotYetSupported, "not see.*add_",
    ),
    "many that are written into .data at once": (
        lambda m, x: [t := torch.zeros_like(x).data, torch._foreach_add_([t], [m.a(x)]), t * x][2],
        NotYetSupported, "not see.*_foreach_add_",
    ),
    "a result that was written into .data with a gradient": (
        lambda m, x: [t := torch.zeros_like(x).data, t.add_(m.a(x))][0], NotYetSupported, "not see.*add_",
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
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    require_refused(Problem(Model(function).double(), X), kind, text)


def test_a_linear_backward_of_a_weight_at_two_places_and_any_at_one() -> None:
    for function in (
        lambda m, x: _twice(Passed, m, x),
        lambda m, x: m.b(x) @ Clipped.apply(m.a.weight).t(),  # type: ignore[no-untyped-call]
    ):
        check(Program("places", lambda function=function: Problem(Model(function).double(), X)), with_loss)  # type: ignore[misc]


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
    model = Model(lambda m, x: m.b(Scaled.apply(m.a(x)))).double()
    handle = model.a.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(NotYetSupported, match=r"a\.weight has a hook on its gradient"):
        with_loss(Problem(model, X))
    handle.remove()
    with_loss(Problem(model, X))


def test_a_backward_hook_on_a_module_is_refused() -> None:
    model = Model(lambda m, x: m.b(Scaled.apply(m.a(x)))).double()
    model.a.register_full_backward_hook(lambda m, i, o: (2 * i[0],))
    with pytest.raises(NotYetSupported, match="a module has a backward hook"):
        with_loss(Problem(model, X))
