"""States that a module keeps, and makes anew of zeros at every call: of the sizes of the last batch, or of this one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

X = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, 1])


class Leaky(nn.Module):
    """A leaky neuron as snnTorch writes it."""

    mem: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def begin(self) -> Tensor:
        self.mem = torch.zeros_like(self.mem)
        return self.mem

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        self.mem = mem
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        self.mem = 0.8 * self.mem + x
        return self.mem


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.neuron, self.last = nn.Linear(5, 4).double(), Leaky(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        mem, out = self.neuron.begin(), torch.zeros((), dtype=x.dtype)
        for t in range(x.shape[1]):
            mem = self.neuron(self.first(x[:, t]), mem)
            out = out + self.last(mem.tanh())
        return out


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("sizes", [(4, 4, 2, 2, 4), (1, 4, 1), (4, 1, 1)], ids=str)
def test_whatever_batch_was_the_last(sizes: tuple[int, ...]) -> None:
    model, plain = Spiking(), Spiking()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for size in sizes:
        found = step(X[:size], Y[:size])
        losses, grads = oracle.loop_grads(Spiking(), F.cross_entropy, X[:size], Y[:size])
        torch.testing.assert_close((found.losses, found.grads), (losses, grads))
        plain(X[:size])
        torch.testing.assert_close(model.neuron.mem, plain.neuron.mem.detach())


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("size", [4, 1])
def test_after_an_ordinary_call(size: int) -> None:
    """The state that is there has a gradient then, and nothing but its sizes is read."""
    model = Spiking()
    model(X[:size])
    assert model.neuron.mem.requires_grad
    found = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")(X, Y)
    losses, grads = oracle.loop_grads(Spiking(), F.cross_entropy, X, Y)
    torch.testing.assert_close((found.losses, found.grads), (losses, grads))


def test_no_more_captures_once_the_batch_stays() -> None:
    step = psg_fx.transform(Spiking(), F.cross_entropy, backend="eager")
    step(X, Y)
    with pytest.warns(UserWarning, match="one graph for each batch size"):
        step(X, Y)
    captures = step.captures
    step(X, Y)
    assert step.captures == captures
