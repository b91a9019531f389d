"""Masks that pick as many places of each sample, and rows put into samples again: `x[~mask].reshape(B, -1, C)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, Grads, PsgError
from support import oracle


class Masked(nn.Module):
    """A masked autoencoder of tokens `[B, N, 4]`; `visible(x, mask)` are those that it sees."""

    def __init__(self, visible: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.visible, self.embed, self.mix, self.head = visible, nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.places = nn.Parameter(torch.randn(1, 6, 8))
        self.masked = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B = x.shape[0]
        places = self.places.expand(B, -1, -1)
        h = self.visible(self.embed(x) + places, mask)
        h = h + torch.softmax(h @ h.mT, -1) @ self.mix(h)
        hidden = self.masked + places[mask].reshape(B, -1, 8)
        out = self.head(torch.cat([h + self.visible(places, mask), hidden], 1))[:, h.shape[1] :]
        return (out - x[mask].reshape(B, -1, 4)).square().mean((1, 2))


def reshaped(x: Tensor, mask: Tensor) -> Tensor:
    return x[~mask].reshape(x.shape[0], -1, x.shape[2])


def viewed(x: Tensor, mask: Tensor) -> Tensor:
    B, _, C = x.shape
    return x[mask.logical_not()].view((B, -1, C))


def by_their_number(x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask == 0]
    return rows.view(x.shape[0], rows.shape[0] // x.shape[0], x.shape[2])


def unflattened(x: Tensor, mask: Tensor) -> Tensor:
    return x[~mask.bool()].unflatten(0, (x.shape[0], -1))


VISIBLE = [reshaped, viewed, by_their_number, unflattened]


def masks(count: int, each: int) -> Tensor:
    return torch.rand(count, 6).argsort(1) < each


def itself(loss: Tensor) -> Tensor:
    return loss


@pytest.mark.parametrize("visible", VISIBLE, ids=lambda f: f.__name__)
def test_gradients(visible: Any) -> None:
    torch.manual_seed(0)
    model = Masked(visible).double()
    step = psg_fx.transform(model, itself, quantities=Grads(), backend="eager")
    for count in (3, 1, 5):
        inputs = {"x": torch.randn(count, 6, 4, dtype=torch.float64), "mask": masks(count, 4)}
        oracle.check_call(step, model, itself, inputs)
    assert len(step.captures) == 1


def test_other_numbers_are_refused_at_the_call() -> None:
    step = psg_fx.transform(Masked(reshaped).double(), itself, quantities=Grads(), backend="eager")
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    step({"x": x, "mask": masks(3, 4)})
    with pytest.raises(BadArgument, match=r"test_equal_picks\.py.*\n.*\n.*another step"):
        step({"x": x, "mask": masks(3, 3)})
    uneven = masks(3, 4)
    uneven[1] = ~uneven[1]
    with pytest.raises(BadArgument, match="picks other numbers of places"):
        step({"x": x, "mask": uneven})


def test_uneven_masks_mix_samples() -> None:
    uneven = masks(4, 4)
    uneven[:2] = ~uneven[:2]  # as many of all samples together as before
    step = psg_fx.transform(Masked(reshaped).double(), itself, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError, match=r"test_equal_picks\.py"):
        step({"x": torch.randn(4, 6, 4, dtype=torch.float64), "mask": uneven})


def heads(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Rows stay rows."""
    out = torch.zeros(*x.shape[:2], 2, dtype=x.dtype)
    out[mask] = model.layer(x[mask]).reshape(-1, 2, 2).sum(1)
    return out


def written_since(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = model.layer(x)
    rows = h[mask]
    h = h.mul_(2)
    return rows.reshape(x.shape[0], -1, 4) + h.sum(1, keepdim=True)


def written_rows(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = model.layer(x)[mask]
    rows += 1
    return rows.reshape(x.shape[0], -1, 4)


def without_gradients(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        rows = model.layer(x)[mask]
    return model.layer(x).sum(1, keepdim=True) * rows.reshape(x.shape[0], -1, 4)


class Used(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use, self.layer = use, nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.use(self, x, mask).square().sum((1, 2))  # type: ignore[no-any-return]


def test_rows_that_stay_rows_may_be_any_number_later() -> None:
    torch.manual_seed(0)
    model = Used(heads).double()
    step = psg_fx.transform(model, itself, quantities=Grads(), backend="eager")
    for mask in (masks(3, 4), torch.rand(3, 6) < 0.5):
        inputs = {"x": torch.randn(3, 6, 4, dtype=torch.float64), "mask": mask}
        _, grads = oracle.loop_grads(model, itself, inputs, None, dtype=None)
        torch.testing.assert_close(step(inputs).grads["layer.weight"], grads["layer.weight"])


@pytest.mark.parametrize("use", [written_since, written_rows, without_gradients], ids=lambda f: f.__name__)
def test_what_happens_in_between_is_not_passed_over(use: Any) -> None:
    step = psg_fx.transform(Used(use).double(), itself, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError, match=r"test_equal_picks\.py"):
        step({"x": torch.randn(3, 6, 4, dtype=torch.float64), "mask": masks(3, 4)})


def test_rows_that_are_not_put_into_samples_may_be_any_number() -> None:
    """As many in the first call, and not in the next."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out = torch.zeros(*x.shape[:2], 2, dtype=x.dtype)
            out[mask] = self.layer(x[mask])
            return out.square().sum((1, 2))

    model = Mean().double()
    step = psg_fx.transform(model, itself, quantities=Grads(), backend="eager")
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    for mask in (masks(3, 4), torch.rand(3, 6) < 0.5):
        found = step({"x": x, "mask": mask})
        _, grads = oracle.loop_grads(model, itself, {"x": x, "mask": mask}, None, dtype=None)
        torch.testing.assert_close(found.grads["layer.weight"], grads["layer.weight"])


def test_a_mask_that_is_written_is_not_the_calls() -> None:
    class Written(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask = mask.clone()
            mask[:, 0] = True
            return super().forward(x, mask)

    step = psg_fx.transform(Written(reshaped).double(), itself, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError, match=r"test_equal_picks\.py"):
        step({"x": torch.randn(3, 6, 4, dtype=torch.float64), "mask": masks(3, 4)})
