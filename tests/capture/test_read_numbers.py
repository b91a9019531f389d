"""Numbers that code reads out of tensors and computes with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import CaptureFailed, PsgError
from support import oracle
from support.selection import on_two_backends

torch.manual_seed(0)
X, LABELS = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 4, (5, 6))
MASK = torch.tensor([[0, 0, 0, 0, 0, 0], [1] * 6, [1, 0, 0, 0, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 24).double()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, (6, 4)) * self.scale.item()  # type: ignore[operator]


def total(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return (F.cross_entropy(o.transpose(1, 2), y, reduction="none") * m).sum()


def at_least_one(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return total(o, y, m) / max(m.sum().item(), 1)


def a_little_more(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return total(o, y, m).div(m.sum().item() + 1e-6)


def large(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Larger than any integer of 64 bits."""
    n = (m.sum() * 10**10).item()
    return total(o, y, m) * (n * n * n / 1e30)


def of_two(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    n, k = m.sum().item(), y.sum().item()
    return total(o, y, m) * -(n - k) + 2 * n


def where_there_is_one(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    n = m.sum().item()
    return total(o, y, m) / n if n > 0 else total(o, y, m)


def without_a_gradient(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return total(o, y, m) / (1 + o.square().sum().item())


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: list[Loss] = [at_least_one, a_little_more, large, of_two, where_there_is_one, without_a_gradient]


@pytest.mark.parametrize(("loss", "backend"), on_two_backends(LOSSES))
def test_exact(loss: Loss, backend: str) -> None:
    sizes = (5, 2, 1) if backend == "eager" else (5,)
    model = Heads()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend=backend)
    oracle.check_batches(step, model, loss, X, (LABELS, MASK), sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_are_those_with_a_number(dtype: torch.dtype) -> None:
    """A count of more than 65504, and losses without dims."""
    model, x, w = nn.Linear(3, 2).to(dtype), X[:2].to(dtype), torch.full((2, 3), 1e5)

    def loss(o: Tensor, w: Tensor) -> Tensor:
        return o.sum() * 2 / w.sum().item()

    found = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")(x, w)
    expected = torch.stack([loss(model(x[i : i + 1]), w[i : i + 1]).detach() for i in range(2)])
    assert found.losses.dtype == dtype
    torch.testing.assert_close(found.losses, expected)


def test_statistics_of_the_batch_are_refused() -> None:
    def scaled(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return (o / o.detach().abs().max().item()).exp().mean()

    with pytest.raises(psg_fx.SamplesMixed, match=r"aten\.div mixes samples"):
        psg_fx.transform(Heads(), scaled, quantities=psg_fx.Grads(), backend="eager")(X, (LABELS, MASK))


def test_sizes_are_refused() -> None:
    def sized(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return total(o, y, m) + torch.ones(m.sum().item(), dtype=o.dtype).sum()  # type: ignore[arg-type]

    with pytest.raises(PsgError):
        psg_fx.transform(Heads(), sized, quantities=psg_fx.Grads(), backend="eager")(X, (LABELS, MASK))


def test_numbers_of_python_name_the_way_out() -> None:
    def loss(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return total(o, y, m) / (1 + float(m.sum()))

    with pytest.raises(CaptureFailed, match=r"float\(\) make a number of Python(?s:.*)\.item\(\) in place of"):
        psg_fx.transform(Heads(), loss, quantities=psg_fx.Grads(), backend="eager")(X, (LABELS, MASK))


@pytest.mark.parametrize("number", [-1, 0.5])
def test_numbers_that_decide_are_refused(number: float) -> None:
    """They are no sizes, which are whole and not negative."""

    def loss(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
        read = ((y - 3).sum() if number == -1 else o.detach().sum()).item()
        return total(o, y, m) * (2 if read == number else 1)

    with pytest.raises(CaptureFailed, match="branches on values of a tensor"):
        psg_fx.transform(Heads(), loss, quantities=psg_fx.Grads(), backend="eager")(X, (LABELS, MASK))
