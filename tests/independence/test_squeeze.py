"""A squeeze takes the sample dim of a batch of one: refused where that changes what the loss of a sample is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import NotYetSupported
from support import oracle

B = 3
X, Y = torch.randn(B, 6, dtype=torch.float64), torch.randn(B, dtype=torch.float64)
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """`[B, 6] -> [B, 1, *shape]`; the other sizes are equal to one another and to the batch."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer = nn.Linear(6, torch.Size(shape).numel())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, (1, *self.shape))


VECTOR, SQUARE = (B,), (B, B)
HARMLESS: dict[str, tuple[tuple[int, ...], Loss]] = {
    "elementwise, all summed": (VECTOR, lambda o, y: o.squeeze().tanh().sum()),
    "mean of all": (VECTOR, lambda o, y: o.squeeze().square().mean()),
    "from the right": (VECTOR, lambda o, y: o.squeeze().softmax(-1).square().sum()),
    "flat": (VECTOR, lambda o, y: o.squeeze().view(-1).square().sum()),
    "of a number": (VECTOR, lambda o, y: o.square().mean().squeeze(-1) * torch.tensor(2.0).squeeze(0).squeeze()),
    "against targets": ((1,), lambda o, y: F.mse_loss(o.squeeze(), y)),
    "last of two dims": (SQUARE, lambda o, y: o.squeeze().cumsum(-1).sin().sum()),
    "by its number": (SQUARE, lambda o, y: o.squeeze(1).cumsum(1).sin().sum()),
    "by its number from the right": (SQUARE, lambda o, y: o.squeeze(-3).cumsum(1).sin().sum()),
    "the sample dim": (SQUARE, lambda o, y: o.squeeze(0).sin().sum()),
}
DIFFERENT: dict[str, tuple[tuple[int, ...], Loss]] = {
    "sum over the batch": (VECTOR, lambda o, y: o.squeeze().sum(0).sin().mean()),
    "its size": (VECTOR, lambda o, y: o.squeeze().square().sum() / o.squeeze().shape[0]),
    "its number of dims": (VECTOR, lambda o, y: o.squeeze().square().sum() * o.squeeze().ndim),
    "dim 1 of two": (SQUARE, lambda o, y: o.squeeze().cumsum(1).sin().sum() + o.squeeze().sum(1).cos().sum()),
    "the sample dim by its number": (VECTOR, lambda o, y: o.squeeze(1).squeeze(0).sum(0).sin().mean()),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_squeeze_is_answered_exactly(name: str) -> None:
    shape, loss = HARMLESS[name]
    model = Net(*shape).double()
    found = psg_fx.transform(model, loss, backend="eager")(X, Y)
    losses, grads = oracle.loop_grads(model, loss, X, Y)
    assert oracle.relative_error(found.losses, losses) < 1e-12
    assert oracle.worst_error(found.grads, grads) < 1e-12


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_squeeze_that_means_something_else_for_one_sample_is_refused(name: str) -> None:
    shape, loss = DIFFERENT[name]
    with pytest.raises(NotYetSupported) as error:
        psg_fx.transform(Net(*shape).double(), loss, backend="eager")(X, Y)
    place, _, rest = str(error.value).partition(";  ")
    line, _, rest = rest.partition("\n")
    assert place == "squeeze treats a batch of one sample differently\n  where  %squeeze" + "_1" * (
        "number" in name and "dim by" in name
    )
    assert line.startswith("test_squeeze.py:")
    assert rest == (
        "  why    it takes the sample dim of a batch of one, and what follows then means something else: the loss of a "
        "sample is that of a batch of one\n"
        "  fix    name the dim: x.squeeze(1), or x.flatten(1)"
    )


def test_zero_parameters_hide_no_difference() -> None:
    model = Net(*VECTOR).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(NotYetSupported, match="squeeze treats a batch of one sample differently"):
        psg_fx.transform(model, lambda o, y: o.squeeze().sum(0).square().mean(), backend="eager")(X, Y)
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_mask_hides_no_difference(size: int) -> None:
    """A first batch to warm up, of which all is masked."""
    loss = lambda o, y, mask: (o * mask).squeeze().sum(0).square().mean()  # noqa: E731
    step = psg_fx.transform(Net(*VECTOR).double(), loss, backend="eager")
    with pytest.raises(NotYetSupported, match="squeeze treats a batch of one sample differently"):
        step(X[:size], (Y[:size], torch.zeros(size, 1, B, dtype=torch.bool)))


def test_what_a_label_hides_is_seen_at_the_call_on_the_way() -> None:
    """Of the first batch it is multiplied by zero."""
    loss = lambda o, y: o.square().mean() + (y == 2).sum() * o.squeeze().sum(0).sin().sum()  # noqa: E731
    step = psg_fx.transform(Net(*VECTOR).double(), loss, backend="eager")
    with pytest.raises(NotYetSupported, match=r"where sum \(test_squeeze.py:[^)]*\)[^\0]* gives another value"):
        step(X, torch.zeros(B, dtype=torch.int64))


def of_class(o: Tensor, y: Tensor) -> Tensor:
    """Nothing of samples of other classes."""
    return o.masked_fill((y != 2).reshape(-1, *[1] * (o.dim() - 1)), 0.0)


def by_size(code: Callable[[Tensor, int, Tensor], Tensor]) -> Loss:
    """Code that asks for the size of the first dim behind a squeeze, and sums over what it gives."""

    def loss(o: Tensor, y: Tensor) -> Tensor:
        h = o.squeeze()
        return code(h.reshape(-1, B, B).sum((1, 2)), h.shape[0], y)

    return loss


BEHIND_A_MASK: dict[str, Loss] = {
    "another dim": lambda o, y: of_class(o, y).squeeze().cumsum(1),
    "a dim of a sum": lambda o, y: of_class(o, y).squeeze().sum(1),
    "a label below a size": by_size(lambda h, size, y: torch.where(y - 7 < size, h, 0.0)),
    "a label up to a size": by_size(lambda h, size, y: h * y.clamp(max=size)),
    "a factor": by_size(lambda h, size, y: of_class(h, y) * size),
    "a squeeze for its size alone": lambda o, y: of_class(o, y) * o.squeeze().shape[0],
    "a view of one": lambda o, y: of_class(o, y) * o.squeeze().transpose(0, 1).shape[1],
    "a dim by its number": lambda o, y: of_class(o, y) * o[:, 0].squeeze(0).shape[0],
}
HARMLESS_BEHIND_A_MASK: dict[str, Loss] = {
    "from the right": lambda o, y: of_class(o, y).squeeze().cumsum(-1),
    "a dim by its number": lambda o, y: of_class(o, y).squeeze().cumsum(o.squeeze().dim() - 1),
    "a size that is the same": lambda o, y: of_class(o, y) * o.squeeze().shape[-1],
    "all summed": lambda o, y: of_class(o, y).squeeze().sin().sum(),
    "seen otherwise": lambda o, y: of_class(o, y).squeeze().reshape(*o.squeeze().shape[:-1], B, 1).sin(),
    "in its domain alone": lambda o, y: F.binary_cross_entropy(
        of_class(o.sigmoid(), y).squeeze(), 0.5 * o.sigmoid().squeeze().detach()
    ),
}


@pytest.mark.parametrize("name", BEHIND_A_MASK)
def test_what_a_mask_in_front_hides_is_seen_at_the_call(name: str) -> None:
    """No sample of the first batch is of the class."""
    code = BEHIND_A_MASK[name]
    step = psg_fx.transform(Net(*SQUARE).double(), lambda o, y: code(o, y).square().sum(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"squeeze treats a batch of one sample differently"):
        step(X, torch.zeros(B, dtype=torch.int64))


@pytest.mark.parametrize("name", HARMLESS_BEHIND_A_MASK)
def test_what_a_mask_in_front_hides_and_is_the_same_is_answered(name: str) -> None:
    code = HARMLESS_BEHIND_A_MASK[name]
    model, loss = Net(*SQUARE).double(), lambda o, y: (code(o, y) + 1).square().sum()
    step = psg_fx.transform(model, loss, backend="eager")
    for y in (torch.zeros(B, dtype=torch.int64), torch.tensor([2, 0, 2])):
        losses, grads = oracle.loop_grads(model, loss, X, y)
        found = step(X, y)
        assert oracle.relative_error(found.losses, losses) < 1e-12
        assert oracle.worst_error(found.grads, grads) < 1e-12


def test_labels_that_are_checked_hide_no_difference() -> None:
    """Noise on them is refused by the code, so they are taken as they are."""

    def loss(o: Tensor, y: Tensor) -> Tensor:
        p = o.squeeze().sigmoid()
        overlap = (p * y).sum(0) / (p.sum(0) + y.sum(0) + 1)
        return F.binary_cross_entropy(p.view_as(y), y) + overlap.mean()

    step = psg_fx.transform(Net(*VECTOR).double(), loss, backend="eager")
    with pytest.raises(NotYetSupported, match="squeeze treats a batch of one sample differently"):
        step(X, torch.zeros(B, B, dtype=torch.float64))


def test_dims_that_are_put_back_are_harmless() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        o = o.squeeze()
        if o.dim() == 1:
            o = o.unsqueeze(0)
        return (o.cumsum(1) * y.unsqueeze(1)).sin().sum()

    model = Net(*VECTOR).double()
    losses, grads = oracle.loop_grads(model, loss, X, Y)
    found = psg_fx.transform(model, loss, backend="eager")(X, Y)
    assert oracle.relative_error(found.losses, losses) < 1e-12
    assert oracle.worst_error(found.grads, grads) < 1e-12


def test_a_buffer_that_each_run_writes_is_no_difference() -> None:
    class Decaying(Net):
        def __init__(self) -> None:
            super().__init__(*VECTOR)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(0.5)
            return super().forward(x) * self.scale

    model = Decaying().double()
    found = psg_fx.transform(model, lambda o, y: o.squeeze().sin().sum(), backend="eager")(X, Y)
    assert model.scale == 0.5
    expected = (Net.forward(model, X) * 0.5).sin().flatten(1).sum(1)
    assert oracle.relative_error(found.losses, expected.detach()) < 1e-12


def test_code_that_does_not_run_for_one_sample_is_noted() -> None:
    step = psg_fx.transform(Net(*VECTOR).double(), lambda o, y: o.squeeze().softmax(1).sin().sum(), backend="eager")
    step(X, Y)
    text = "takes the sample dim of a batch of one, on which the code does not run (IndexError); it is kept"
    assert text in " ".join(step.explain().split())


def test_without_a_loss() -> None:
    class Squeezed(Net):
        def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
            super().__init__(*SQUARE)
            self.after = after

        def forward(self, x: Tensor) -> Any:
            return self.after(super().forward(x).squeeze())

    psg_fx.transform(Squeezed(torch.tanh).double(), backend="eager", loss_reduction="sum")(X)
    with pytest.raises(NotYetSupported, match="squeeze treats a batch of one sample differently"):
        psg_fx.transform(Squeezed(lambda h: h.sum(1)).double(), backend="eager", loss_reduction="sum")(X)


def test_dropout_and_batches_of_none_and_one() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Conv1d(1, 4, 2), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(F.adaptive_avg_pool1d(self.layer(x[:, None]), 1).squeeze())

    before = torch.get_rng_state()
    for size in (2, 1, 0):
        step = psg_fx.transform(Pooled(), lambda o: o.square().sum(), backend="eager")
        assert step(torch.randn(size, 6)).losses.shape == (size,)
    torch.set_rng_state(before)
