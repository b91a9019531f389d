"""The gradient that the first answer of a graph shows is held against that of the user's own code on one sample."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.quantities.base import Quantity
from psg_fx.step.first_answer import OfOneSample
from support import oracle

SHOWN = [
    psg_fx.Grads(), psg_fx.Norms(), psg_fx.Norms(squared=True), psg_fx.Norms(per="parameter"),
    psg_fx.Norms(per="parameter", squared=True), psg_fx.ClippedSum(1.0), psg_fx.ClippedSum(1.0, per="parameter"),
    psg_fx.Gram(), psg_fx.MeanGrad(), psg_fx.SecondMoment(), psg_fx.WeightedSum(), psg_fx.Projection(rank=2),
    psg_fx.Dots(),
]  # fmt: skip
ALONE: bytearray = bytearray()
"""Grows at each run of the code on real tensors; no capture sees what lies in it."""


class Rounded(torch.autograd.Function):
    """Rounds, and passes the gradient on."""

    forward = staticmethod(lambda ctx, x: x.round())
    backward = staticmethod(lambda ctx, g: g)


def by_compiling(h: Tensor) -> Tensor:
    return h.round() if torch.compiler.is_compiling() else Rounded.apply(h)  # type: ignore[no-any-return]


def by_type(h: Tensor) -> Tensor:
    return Rounded.apply(h) if type(h) is Tensor else h.round()


def by_symbol(h: Tensor) -> Tensor:
    return h.round() if isinstance(h.shape[0], torch.SymInt) else Rounded.apply(h)


def by_sign(h: Tensor) -> Tensor:
    """The gradient of the other has the same norm."""
    return h if type(h) is Tensor else (2 * h).detach() - h


def by_nothing(h: Tensor) -> Tensor:
    """Where it is not the code's, the gradient is no number."""
    return h if type(h) is Tensor else torch.where(h.detach() > 1e9, (0 * h).sqrt(), h)


class Between(nn.Module):
    """Two layers, and something in between."""

    def __init__(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.change, self.b = nn.Linear(4, 4, dtype=dtype), change, nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.change(3 * self.a(x)))  # type: ignore[no-any-return]


def loss_fn(out: Tensor, y: Tensor) -> Tensor:
    return (out.sum(1) - y).square()


def batch(dtype: torch.dtype = torch.float32, size: int = 4) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(size, 4, generator=draws, dtype=dtype), torch.randn(size, generator=draws, dtype=dtype)


def stepped(model: nn.Module, *quantities: Quantity, **settings: Any) -> Callable[..., Any]:
    """A step, called with what its quantities read besides: weights, and directions."""
    step = psg_fx.transform(model, settings.pop("loss", loss_fn), quantities=quantities, backend="eager", **settings)
    read = {name for quantity in quantities for name in quantity.reads}
    named = {n: p for n, p in model.named_parameters() if fnmatch.fnmatch(n, settings.get("params", "*"))}
    directions = {name: torch.linspace(0.5, 1.5, p.numel()).view(p.shape) for name, p in named.items()}

    def called(x: Tensor, y: Tensor, **given: Any) -> Any:
        known = {"weights": torch.linspace(1, 2, len(x)), "directions": directions}
        return step(x, y, **{name: known[name] for name in read - given.keys()}, **given)

    return called


@pytest.mark.parametrize("shown", SHOWN, ids=repr)
@pytest.mark.parametrize("change", [by_compiling, by_type, by_symbol, by_nothing], ids=lambda f: f.__name__)
def test_a_gradient_that_no_op_shows_is_refused_at_every_call(
    change: Callable[[Tensor], Tensor], shown: Quantity
) -> None:
    step = stepped(Between(change), shown)
    for _ in range(2):
        with pytest.raises(psg_fx.NotYetSupported, match=r"gradient of sample 3 has norm .* alone, and .* in this"):
            step(*batch())


def test_gradients_of_one_norm_are_told_apart_where_they_are_shown() -> None:
    with pytest.raises(psg_fx.NotYetSupported, match=r"apart\n  where  a.weight in loss_fn\(model\(x\[3:\]\), y\[3:\]"):
        stepped(Between(by_sign), psg_fx.Norms(), psg_fx.Grads())(*batch())


def test_what_shows_no_gradient_of_a_sample_runs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise AssertionError("a backward has run")

    monkeypatch.setattr("psg_fx.step.first_answer.by_autograd", none)
    x, y = batch()
    assert stepped(Between(torch.tanh), psg_fx.SecondMoment(centered=True))(x, y).losses.shape == (4,)
    assert stepped(Between(torch.tanh), psg_fx.Norms())(x, y, groups=[0, 1, 1, 0]).norms.shape == (2,)
    assert psg_fx.transform(Between(torch.tanh), backend="eager")(x).shape == (4, 4)


@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
)
def test_it_runs_once_under_any_mode_and_leaves_nothing(
    mode: Callable[[], contextlib.AbstractContextManager[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[weakref.ref[Any]] = []

    class Prints(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            if type(x) is Tensor:
                print("backward")
                ALONE.append(2)
            return g / x.cosh().square()

    def change(h: Tensor) -> Tensor:
        if type(h) is Tensor:
            ALONE.append(1)
            held.append(weakref.ref(h))
        return Prints.apply(h)  # type: ignore[no-any-return]

    model, (x, y) = Between(change), batch()
    x.requires_grad_()
    ALONE.clear()
    with mode():
        out = stepped(model, psg_fx.Grads())(x, y)
    assert list(ALONE) == [1, 2]
    assert x.grad is None
    assert not out.losses.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert "backward" not in capsys.readouterr().out
    ALONE.clear()
    torch.testing.assert_close(out.grads, oracle.loop_grads(model, loss_fn, x.detach(), y, dtype=None)[1])


def test_no_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the step runs."""
    seen: list[bool] = []
    require = OfOneSample.require

    def noted(self: OfOneSample, *args: Any) -> None:
        assert self._gradient is not None
        kept = (*self._alone, *self._gradient._gradient.values())
        seen.extend(t.grad_fn is None and not t.requires_grad for t in kept)
        require(self, *args)

    monkeypatch.setattr(OfOneSample, "require", noted)
    stepped(Between(torch.tanh), psg_fx.Grads())(*batch())
    gc.collect()
    assert seen == [True] * 5


def test_hooks_of_parameters_that_are_not_asked_are_not_called() -> None:
    model, called = Between(torch.tanh), bytearray()
    model.a.weight.register_hook(lambda _: called.append(1))
    model.b.weight.register_post_accumulate_grad_hook(lambda _: called.append(2))
    assert set(stepped(model, psg_fx.Grads(), params="b.*")(*batch()).grads) == {"b.weight", "b.bias"}
    assert not called


def test_a_backward_that_fails_alone_says_nothing() -> None:
    class Fails(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.sin())

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if type(g) is Tensor:
                raise RuntimeError("on real tensors")
            return g

    step = stepped(Between(lambda h: Fails.apply(h)), psg_fx.Norms())
    assert step(*batch()).norms.shape == (4,)


class Shifted(nn.Module):
    """A softmax over places whose scores are all alike: adding one number to all of them changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.weights = nn.Linear(32, 32), nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        places = x.view(-1, 1, 32).expand(-1, 4, -1)
        return (self.scores(places).softmax(1) * self.weights).sum(1)


class Normalised(nn.Module):
    """The bias of a convolution before its channels are normalised."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.norm = nn.Conv2d(2, 4, 1), nn.GroupNorm(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.scores(x.view(-1, 2, 4, 4))).exp().flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shown", SHOWN, ids=repr)
@pytest.mark.parametrize(("model", "params"), [(Shifted, "scores.*"), (Normalised, "scores.bias")])
def test_a_gradient_of_nothing_but_rounding_is_no_difference(
    model: Callable[[], nn.Module], params: str, shown: Quantity
) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    assert stepped(model(), shown, params=params)(x, torch.arange(5.0)).losses.shape == (5,)


@pytest.mark.parametrize("shown", SHOWN, ids=repr)
def test_nor_is_that_of_a_fit_that_is_nearly_perfect(shown: Quantity) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 1))
    x = torch.randn(33, 64)
    with torch.no_grad():
        y = torch.stack([model(row[None])[0] for row in x])
    assert stepped(model, shown, loss=F.mse_loss)(x, y).losses.max() < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("shown", SHOWN, ids=repr)
def test_numbers_out_of_the_range_of_squares_tell_nothing(shown: Quantity, scale: float) -> None:
    step = stepped(Between(torch.tanh), shown, loss=lambda out, y: (out.sum(1) - y) * scale)
    assert step(*batch()).losses.shape == (4,)


class Several(nn.Module):
    """An embedding whose gradients are sparse, a table that is tied to it, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7)
        self.unread = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shown", SHOWN, ids=repr)
def test_parameters_that_are_sparse_tied_or_not_read(shown: Quantity, tied: bool) -> None:
    model, ids = Several(), torch.arange(15).view(5, 3) % 7
    if tied:
        model.table.sparse = False
        model.head.weight = model.table.weight
    y = torch.arange(5)
    out = stepped(model, *{shown, psg_fx.MeanGrad()}, loss=F.cross_entropy)(ids, y)
    assert out.losses.shape == (5,)


def test_half_precision_has_room_to_round() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert stepped(Between(torch.tanh, dtype), psg_fx.Grads(), psg_fx.Norms())(*batch(dtype)).norms.shape == (4,)
    with torch.autocast("cpu", torch.bfloat16):
        assert stepped(Between(torch.tanh), psg_fx.Norms())(*batch()).norms.shape == (4,)


class Stem(nn.Module):
    """Whose backward torch has wrong for a batch of one, on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4).eval(), nn.Linear(4, 4)
        self.norm.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2).contiguous()
        return self.head(tokens).sin().mul(torch.arange(9.0).unsqueeze(1)).sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shown", SHOWN, ids=repr)
def test_a_backward_that_torch_has_wrong_blames_nobody(shown: Quantity) -> None:
    model, x, y = Stem(), torch.randn(4, 3, 6, 6), torch.arange(4)
    out = stepped(model, *{shown, psg_fx.MeanGrad()}, loss=F.cross_entropy)(x, y)
    wanted = torch.autograd.grad(F.cross_entropy(model(x), y), [model.norm.bias])[0]  # of the batch it is right
    torch.testing.assert_close(out.mean_grad["norm.bias"], wanted)
