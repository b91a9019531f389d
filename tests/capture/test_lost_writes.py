"""Writes in place through views that the functional form of a graph does not follow: refused where that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, NotYetSupported
from support import oracle

Code = Callable[[Tensor], Any]


class Net(nn.Module):
    """Code that is given h `[B, 5, 4]`."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(self.layer(x) * 1.0)


def loss(out: Tensor) -> Tensor:
    return (out + out.square()).sum()


def data() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 5, 3, dtype=torch.float64)


def step_of(model: nn.Module) -> Any:
    return psg_fx.transform(model, loss, quantities=Grads(), backend="eager")


def written(view: Code) -> Code:
    """The value, read after a write through the view that changes nothing of this batch."""

    def code(h: Tensor) -> Tensor:
        view(h).clamp_(-1e3, 1e3)
        return h

    return code


def read(view: Code) -> Code:
    """The view, read after a write into the value."""

    def code(h: Tensor) -> Any:
        seen = view(h)
        h.clamp_(-1e3, 1e3)
        return seen

    return code


def by_einsum(h: Tensor) -> Tensor:
    return torch.einsum("btd->bdt", h)


def by_its_diagonal(h: Tensor) -> Tensor:
    return torch.einsum("bii->bi", h[:, :4])


HIDDEN: dict[str, Code] = {
    "einsum": by_einsum,
    "a diagonal": by_its_diagonal,
    "a view of einsum": lambda h: by_einsum(h)[:, 1],
    "unsafe_chunk": lambda h: torch.unsafe_chunk(h, 2, 1)[1],
    "meshgrid": lambda h: torch.meshgrid(h[:, 0, 0], torch.ones(2, dtype=h.dtype), indexing="ij")[0][:, 0],
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("way", [written, read])
def test_a_view_of_which_no_graph_is_told_is_refused(name: str, way: Callable[[Code], Code]) -> None:
    with pytest.raises(NotYetSupported, match="a write in place through a view that a graph does not follow") as caught:
        step_of(Net(way(HIDDEN[name])).double())(data())
    assert "test_lost_writes.py:" in str(caught.value)


@pytest.mark.parametrize(("size", "step"), [(2, 2), (1, 3)])
def test_windows_with_gaps_are_refused(size: int, step: int) -> None:
    with pytest.raises(NotYetSupported, match="writes through unfold, whose windows do not hold all"):
        step_of(Net(written(lambda h: h.unfold(1, size, step))).double())(data())


class Unfolded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x.unfold(1, 2, 2).mul_(2.0)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_windows_with_gaps_are_refused_in_custom_functions() -> None:
    with pytest.raises(NotYetSupported, match="writes through unfold, whose windows do not hold all"):
        step_of(Net(lambda h: Unfolded.apply(h)).double())(data())  # type: ignore[no-untyped-call]


def nobody_reads_the_value(h: Tensor) -> Tensor:
    return by_einsum(h).mul_(2.0)


def before_it_is_written(h: Tensor) -> Tensor:
    first = h.sum((1, 2))
    return first + by_einsum(h).mul_(2.0).sum((1, 2))


def of_two(h: Tensor) -> Tensor:
    return torch.einsum("bti,bsi->bts", h, h).mul_(2.0).sum((1, 2)) + h.sum((1, 2))


def all_windows(h: Tensor) -> Tensor:
    h[:, :4].unfold(1, 2, 2).mul_(2.0)
    return h


def windows_read(h: Tensor) -> Tensor:
    windows = h.unfold(1, 2, 2)
    h.mul_(2.0)
    return windows.sin()


def not_dropped(h: Tensor) -> Tensor:
    nn.functional.dropout1d(h, 0.5, training=False).mul_(2.0)
    return h


def made_of_numbers(h: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    scale.mul_(2.0)
    return h * scale


@pytest.mark.filterwarnings("ignore:one graph for each batch size")  # of what torch writes back to unfold
@pytest.mark.parametrize(
    "code",
    [nobody_reads_the_value, before_it_is_written, of_two, all_windows, windows_read, not_dropped, made_of_numbers],
)
def test_other_writes_are_answered(code: Code) -> None:
    model, x = Net(code).double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    assert oracle.worst_error(step_of(model)(x).grads, want) < 1e-10


VIEWS: dict[str, Code] = {
    "transpose": lambda h: h.transpose(0, 1),
    "diagonal": lambda h: h.diagonal(1, 1, 2),
    "slice": lambda h: h[:, ::2],
    "select": lambda h: h[:, 1],
    "split": lambda h: h.split([1, 4], 1)[1],
    "tensor_split": lambda h: h.tensor_split(2, 1)[1],
    "unbind": lambda h: h.unbind(1)[2],
    "view_as_complex": lambda h: torch.view_as_complex(h.view(3, 5, 2, 2)),
    "squeeze": lambda h: h[:, :1].squeeze(1),
    "expand": lambda h: h[:, None].expand(3, 1, 5, 4),
    "as_strided": lambda h: h.as_strided((3, 2, 2), (20, 8, 2), 1),
    "unfold": lambda h: h[:, :4].unfold(1, 2, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_torch_writes_through_other_views_as_it_does_without_a_graph(name: str) -> None:
    def run(x: Tensor) -> Tensor:
        h = x * 1.0
        VIEWS[name](h).mul_(2.0)
        return h

    x = torch.randn(3, 5, 4)
    assert torch.equal(torch.func.functionalize(run, remove="mutations_and_views")(x), run(x))
