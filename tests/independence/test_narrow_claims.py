"""Programs at the edge of what a rule claims: each is what the loop says, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported, PsgError, SamplesMixed
from support import oracle

torch.manual_seed(0)
X = torch.randn(4, 5, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]]).bool()
TABLE = torch.arange(12, dtype=torch.float64).view(3, 4)
CLASSES = torch.tensor([[0, 1, -100], [2, -100, -100], [1, 1, 0], [-100, 2, 1]])
PLACES = torch.randint(0, 4, (4, 3))
WEIGHTS = torch.randn(12, dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, after: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(5, width).double(), after

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.after(self.layer(x), *more)


def summed(output: Tensor, *_: Tensor) -> Tensor:
    return output.sin().sum()


def with_its_own_row(h: Tensor) -> Tensor:
    whole = torch.zeros(2 * h.shape[0], 8, dtype=torch.long)
    return h * whole.slice_scatter(h.detach() * 3, 0, 0, h.shape[0]).view(2, -1, 8).sum(0)


def of_ignored(output: Tensor, classes: Tensor, places: Tensor) -> Tensor:
    valid = classes >= 0
    boxes = output.view(-1, 3, 2)[valid].sum(1)
    return (boxes * TABLE[classes[valid], places[valid]]).sin().sum()


def rows_below_a_number(output: Tensor, ids: Tensor) -> Tensor:
    return output[ids.unsqueeze(-1).expand_as(output) < output.shape[0]].view(-1, 4).sin().sum()


EXACT: dict[str, tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a write to the end": (Model(lambda h: h.cos() + torch.slice_scatter(torch.zeros_like(h), h)), summed, ()),
    "a write that casts": (Model(with_its_own_row), summed, ()),
    "a mean over no dims, which are all": (
        Model(lambda h: h.view(-1, 4, 2)), lambda o, m: o.sin()[m].mean(()), (MASK,),
    ),
    "kthvalue of a mean": (
        Model(lambda h: h.view(-1, 2, 4)), lambda o: o.mean(0).kthvalue(1, dim=1).values.sin().sum(), (),
    ),
    "kthvalue over the samples": (Model(lambda h: h), lambda o: o.T.kthvalue(1, dim=1).values.sin().sum(), ()),
    "ignored classes and places": (Model(lambda h: h, 6), of_ignored, (CLASSES, PLACES)),
    "rows by a number": (Model(lambda h: h.view(-1, 2, 4)), rows_below_a_number, (torch.randint(0, 9, (4, 2)),)),
    "clamped on both sides": (
        Model(lambda h: h),
        lambda o, c: o.view(-1, 2)[torch.arange(o.shape[0]) * 4 + c.clamp(min=0).clamp(max=3)].sin().sum(),
        (torch.tensor([0, 3, 9, -1]),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_what_the_loop_says(name: str) -> None:
    model, loss, targets = EXACT[name]
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    oracle.check_batches(step, model, loss, X, targets, (4, 3, 1))


def test_labels_that_are_floats_are_cast_where_they_are_picked() -> None:
    x, labels = torch.randn(3, 6, 5, dtype=torch.float64), torch.tensor([[1.0, 2, -1], [3, -1, -1], [1, 3, 2]])
    model = Model(lambda h: h.log_softmax(-1).transpose(0, 1), 4)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((output.shape[1],), 6)
        return F.ctc_loss(output, y[y >= 0].long(), lengths, (y >= 0).sum(-1), reduction="sum")

    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    oracle.check_batches(step, model, loss, x, (labels,), (3,))


def test_a_mean_of_half_precision_times_a_number_of_another_dtype() -> None:
    model, scale = Model(lambda h: h).half(), torch.tensor(65536.0)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return ((output - y).square().mean() * scale).log()

    x, y = X.half(), torch.randn(4, 8).half()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    oracle.check_call(step, model, loss, x, y)


def test_a_count_times_a_number_of_more_bits() -> None:
    model, large = Model(lambda h: h), torch.tensor(3_000_000_000)

    def loss(output: Tensor) -> Tensor:
        return output.sum() * ((output > -9).sum(dtype=torch.int32) * large).double() / 1e9

    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    oracle.check_call(step, model, loss, X)


class Squeezes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x[:, None].squeeze().sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g.reshape(ctx.shape)


class ByCount(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * WEIGHTS.to(g).kthvalue(g.shape[0]).values


def hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def after(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(change)
        return 2 * h

    return after


def rounded_places(h: Tensor, places: Tensor) -> Tensor:
    return h.reshape(-1)[torch.arange(h.shape[0]) * 400 + places.clamp(0, 399).long()]


REFUSED: dict[str, tuple[nn.Module, Callable[..., Tensor], type[PsgError], str]] = {
    "squeeze in a function": (Model(Squeezes.apply), lambda o: o.sum(0).sin().sum(), NotYetSupported, "squeeze in"),
    "squeeze_copy": (
        Model(lambda h: torch.squeeze_copy(h, 0)), lambda o: o.sum(0).sin().sum(), NotYetSupported, "squeeze treats",
    ),
    "a place that follows B, in a backward": (Model(ByCount.apply), summed, NotYetSupported, "computes with the batch"),
    "a hook for one size": (
        Model(hooked(lambda g: g * WEIGHTS[g.shape[0] : g.shape[0] + 8])), summed, NotYetSupported,
        "does not run for all batch sizes",
    ),
    "cross over three rows of a sample": (
        Model(lambda h: h[:, :6].reshape(-1, 2)[:, :, None].expand(-1, 2, 3)),
        lambda o: torch.cross(o, (o * TABLE[0, :3]).cos()).sin().sum(), SamplesMixed, "dim 0, the sample dim",
    ),
    "a correction by the batch size": (
        Model(lambda h: h), lambda o: o.var(correction=o.shape[0]), NotYetSupported, "correction depends",
    ),
    "every other row from B on": (
        Model(lambda h: h.view(-1, 2)[2 * h.shape[0] :: 2]), summed, SamplesMixed, "one row in 2",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_shows_is_refused(name: str) -> None:
    model, loss, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        psg_fx.transform(model, loss, backend="eager")(X)


def test_places_that_are_rounded_up_are_of_the_next_sample() -> None:
    step = psg_fx.transform(Model(rounded_places, 400), summed, backend="eager")
    with pytest.raises(SamplesMixed, match=r"may lie outside of 0\.\.399"):
        step((X, torch.tensor([1000.0, 3, 5, 7]).bfloat16()))


POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda h: h * torch.arange(h.shape[0], h.shape[0] + 8),
    "select": lambda h: h * WEIGHTS[h.shape[0]],
    "roll": lambda h: h * WEIGHTS[:8].roll(h.shape[0]),
    "kthvalue": lambda h: h * WEIGHTS.kthvalue(h.shape[0]).values,
}


@pytest.mark.parametrize("name", POSITIONS)
def test_outputs_at_places_that_follow_the_batch_size_are_refused(name: str) -> None:
    with pytest.raises(SamplesMixed, match="the number of samples is among its values"):
        psg_fx.transform(Model(POSITIONS[name]), backend="eager")(X)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 4).double(), nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.norm.copy_(h.detach().squeeze(0).sum(0).norm())
        return h


def test_what_is_kept_of_a_batch_of_one_has_no_sample_dim() -> None:
    model = Keeps()
    ordinary = copy.deepcopy(model)
    step = psg_fx.transform(model, summed, backend="eager")
    step(X), ordinary(X)
    torch.testing.assert_close(model.norm, ordinary.norm)
    with pytest.raises(NotYetSupported, match="squeeze treats a batch of one sample differently"):
        step(X[:1])
    torch.testing.assert_close(model.norm, ordinary.norm)
