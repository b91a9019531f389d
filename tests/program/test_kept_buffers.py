"""Buffers that an op keeps for its backward pass, and that the forward writes to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

torch.manual_seed(0)
X = torch.randn(4, 3, dtype=torch.float64)
Y = torch.arange(4) % 2


class Model(nn.Module):
    """rescale: of an activation by `self.scale`, which it also writes to."""

    scale: Tensor

    def __init__(self, rescale: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.rescale = nn.Linear(3, 3), nn.Linear(3, 2), rescale
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rescale(self, self.first(x)))


def written_before(model: Model, h: Tensor) -> Tensor:
    model.scale.data.mul_(0.9)
    return h * model.scale


def copied(model: Model, h: Tensor) -> Tensor:
    scaled = h * model.scale.clone()
    model.scale.data.mul_(0.9)
    return scaled


def not_kept(model: Model, h: Tensor) -> Tensor:
    shifted = h + model.scale
    with torch.no_grad():
        model.scale.mul_(0.9)
    return shifted


def kept_without_a_gradient(model: Model, h: Tensor) -> Tensor:
    code = (h.detach() @ torch.diag(model.scale)).argmax(1)
    quantised = h + (model.scale[code][:, None] - h).detach()
    model.scale.data.mul_(0.9)
    return quantised + h


def replaced(model: Model, h: Tensor) -> Tensor:
    scaled = h * model.scale
    model.scale = model.scale * 0.9
    return scaled


@pytest.mark.parametrize("rescale", [written_before, copied, not_kept, kept_without_a_gradient, replaced])
def test_what_is_kept_is_there_in_the_backward_pass(rescale: Callable[[Model, Tensor], Tensor]) -> None:
    losses, grads = [], []
    for x, y in zip(X.split(1), Y.split(1), strict=True):
        alone = Model(rescale)
        loss = F.cross_entropy(alone(x), y)
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: p.grad for name, p in alone.named_parameters()})
    out = psg_fx.transform(Model(rescale), F.cross_entropy, backend="eager")(X, Y)
    assert oracle.relative_error(out.losses, torch.stack(losses)) < 1e-12
    assert oracle.worst_error(out.grads, {name: torch.stack([g[name] for g in grads]) for name in grads[0]}) < 1e-12


def through_data(model: Model, h: Tensor) -> Tensor:
    scaled = h * model.scale
    model.scale.data.mul_(0.9)
    return scaled


def without_gradients(model: Model, h: Tensor) -> Tensor:
    scaled = h / model.scale
    with torch.no_grad():
        model.scale.mul_(0.9)
    return scaled


def through_a_view(model: Model, h: Tensor) -> Tensor:
    scaled = torch.matmul(h, model.scale[:, None].expand(3, 3))
    model.scale.data.mul_(0.9)
    return scaled


LINES = [
    (through_data, "h * model.scale"), (without_gradients, "h / model.scale"), (through_a_view, "torch.matmul(h, "),
]  # fmt: skip


@pytest.mark.parametrize(("rescale", "line"), LINES)
def test_overwritten_ones_are_refused(rescale: Callable[[Model, Tensor], Tensor], line: str) -> None:
    """Torch's own gradient is that of the new value, or an error where autograd sees the write."""
    step = psg_fx.transform(Model(rescale), F.cross_entropy, backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match="'scale' is overwritten after an op has kept it") as refused:
        step(X, Y)
    assert line in str(refused.value)


def test_two_written_names_of_one_buffer_are_named() -> None:
    model = Model(not_kept)
    model.register_buffer("other", model.scale)
    with pytest.raises(psg_fx.CaptureFailed, match="two buffers share memory") as refused:
        psg_fx.transform(model, F.cross_entropy, backend="eager")(X, Y)
    assert "register one of them" in str(refused.value)


def test_an_input_that_is_a_buffer_which_is_written_is_refused() -> None:
    """Whether it is read before or after depends on the code."""
    model = Model(written_before)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    x = model.scale.expand(4, 3)
    with pytest.raises(psg_fx.BadArgument, match=r"input_0 lies in the memory of a buffer[^\0]*model\.scale"):
        step(x, Y)
    step(x.clone(), Y)
