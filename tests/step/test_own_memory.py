"""What a step returns and keeps lies in memory of its own: not in inputs, not in buffers that it writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Annealed(nn.Module):
    """What it computes with is read out of a buffer that it writes afterwards."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read = nn.Linear(4, 3).double(), read
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = self.read(self.count)
        self.count.mul_(2.0)
        return self.layer(x) * before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("read", [torch.clone, lambda count: torch.exp(-count / 2)], ids=["clone", "exp"])
def test_a_backward_reads_what_buffers_held(read: Callable[[Tensor], Tensor], backend: str) -> None:
    model = Annealed(read)
    step = psg_fx.transform(model, backend=backend)
    for _ in range(3):
        weights = read(model.count)
        step(X).sum().backward()
        want = X.unsqueeze(1).expand(5, 3, 4) * weights
        torch.testing.assert_close(model.layer.weight.grad_sample, want)
        step.zero_grad()
    assert model.count == 8


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze": lambda h: h[:, :1].squeeze(-1),
    "flat": lambda h: h.view(-1, 3, 1).flatten(1),
    "turned": torch.t,
    "of what is saved": lambda h: h.tanh().view(-1, 3, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VIEWS)
def test_outputs_may_be_written_into(name: str, backend: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    model = nn.Sequential(layer)
    model.forward = lambda x: VIEWS[name](layer(x))  # type: ignore[method-assign]
    step = psg_fx.transform(model, backend=backend)
    out = step(X)
    out.mul_(0.9).add_(0.05)
    out.square().sum().backward()

    def loss(output: Tensor) -> Tensor:
        return (output * 0.9 + 0.05).square().sum()

    _, want = oracle.loop_grads(model, loss, X)
    torch.testing.assert_close(layer.weight.grad_sample, want["0.weight"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_not_the_inputs(backend: str) -> None:
    """The gradient of x · w summed is x."""
    model = nn.Linear(4, 1, bias=False).double()
    step = psg_fx.transform(model, lambda out: out.sum(), backend=backend)
    x = X.clone()
    for size in (5, 3):
        step(x[:size]).grads["weight"].zero_()
    assert torch.equal(x, X)
    psg_fx.transform(model, backend=backend)(x).sum().backward()
    model.weight.grad_sample.zero_()
    assert torch.equal(x, X)


def test_torch_says_where_a_saved_output_is_written_into() -> None:
    """Or the output is a copy: no gradient is wrong in silence."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()).double()
    out = psg_fx.transform(model, backend="eager")(X)
    out.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.mse_loss(out, torch.zeros_like(out)).backward()
