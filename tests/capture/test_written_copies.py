"""A write into what is a copy for several samples, and the value itself for one: refused where that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, NotYetSupported
from psg_fx.passes.alone.alone import Alone
from support import oracle

Code = Callable[[Tensor], Tensor]


class Written(nn.Module):
    """h `[B, T, 3]` seen as t `[T, B, 3]`, which is contiguous for B = 1 only."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.cat([self.code(h.transpose(0, 1)).transpose(0, 1), h], 1)


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


REFUSED: dict[str, Code] = {
    "contiguous": lambda t: t.contiguous().relu_(),
    "a view of it": lambda t: t.contiguous()[0].mul_(2.0)[None],
    "reshape": lambda t: t.reshape(-1, 3).relu_().reshape(t.shape),
    "twice": lambda t: t.contiguous().add_(1.0).relu_(),
}
ANSWERED: dict[str, Code] = {
    "clone": lambda t: t.clone().relu_(),
    "not in place": lambda t: t.contiguous().relu(),
    "another value": lambda t: (t.contiguous() + 1.0).relu_(),
    "itself": lambda t: t.relu_(),
}


def data() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 2, 3, dtype=torch.float64)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    step = psg_fx.transform(Written(REFUSED[name]).double(), loss, quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match="a write in place treats a batch of one sample differently") as caught:
        step(data())
    assert "test_written_copies.py:" in str(caught.value)


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name: str) -> None:
    model, x = Written(ANSWERED[name]).double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


class Both(nn.Module):
    """Code that has h `[B, T, 3]` and what may be a copy of it."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.code = code
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.layer(x))


def masked(t: Tensor) -> Tensor:
    t[t.abs() > 1e3] = 0.0
    return t


COPIES: dict[str, Code] = {
    "a slice": lambda h: h[:, :1].contiguous(),
    "a step": lambda h: h[:, 0].contiguous(),
    "without a gradient": lambda h: h[:, 1:].detach().contiguous(),
    "a view of it": lambda h: h[:, 1:].contiguous()[..., :2],
    "transposed": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "reshape": lambda h: h.transpose(0, 1).reshape(-1, 3).view(2, -1, 3).transpose(0, 1),
    "flatten": lambda h: h.transpose(0, 1).flatten(0, 1).view(2, -1, 3).transpose(0, 1),
    "a copy of a copy": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1)[:, :1].contiguous(),
}
NO_COPIES: dict[str, Code] = {
    "clone": lambda h: h[:, :1].clone(),
    "contiguous as it lies": lambda h: h.contiguous(),
    "a copy of one sample, too": lambda h: h[..., :2].contiguous(),
    "reshaped as it lies": lambda h: h[:, :1].reshape(-1, 3),
    "flattened as it lies": lambda h: h[:, :1].flatten(1),
    "another dtype": lambda h: h[:, :1].to(torch.float32),
    "the same dtype": lambda h: h[:, :1].to(torch.float64),
    "a view": lambda h: h[:, 1:],
}
NOTHING_WRITTEN: dict[str, Code] = {
    "clamp_": lambda t: t.clamp_(-1e3, 1e3),
    "hardtanh": lambda t: nn.functional.hardtanh(t, -1e3, 1e3, inplace=True),
    "masked_fill_": lambda t: t.masked_fill_(t > 1e3, 0.0),
    "by a mask": masked,
    "mul_": lambda t: t.mul_(1.0),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("write", [lambda h: h.mul_(2.0), lambda h: h.clamp_(-1e3, 1e3)], ids=["mul_", "clamp_"])
def test_a_copy_that_is_read_after_a_write_into_the_value_is_refused(name: str, write: Code) -> None:
    """With a draw, for which no first answer is compared."""

    def code(h: Tensor) -> Tensor:
        t = COPIES[name](h)
        write(h)
        return t.flatten(1).sin().sum(1) + h.square().sum((1, 2)) + 0.0 * torch.rand_like(h).sum((1, 2))

    with pytest.raises(NotYetSupported, match="a write in place treats a batch of one sample differently") as caught:
        psg_fx.transform(Both(code).double(), loss, quantities=Grads(), backend="eager")(data())
    assert "test_written_copies.py:" in str(caught.value)


@pytest.mark.parametrize("name", NO_COPIES)
def test_what_is_a_copy_or_none_for_any_number_of_samples_is_not_tried(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Alone, "single")

    def code(h: Tensor) -> Tensor:
        t = NO_COPIES[name](h)
        h.mul_(2.0)
        return t.flatten(1).sin().sum(1) + h.square().sum((1, 2))

    model, x = Both(code).double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


@pytest.mark.parametrize("name", NOTHING_WRITTEN)
def test_a_write_that_changes_nothing_of_the_first_batch_is_refused(name: str) -> None:
    def code(h: Tensor) -> Tensor:
        t = NOTHING_WRITTEN[name](h.transpose(0, 1).contiguous())
        return t.sin().sum((0, 2)) + h.square().sum((1, 2))

    with pytest.raises(NotYetSupported, match=r"where pow [^\0]*reads what is written before for a batch of one alone"):
        psg_fx.transform(Both(code).double(), loss, quantities=Grads(), backend="eager")(data())


def other_places(h: Tensor) -> Tensor:
    t = h[:, :1].contiguous()
    h[:, 1:].mul_(2.0)
    return t.sin().sum((1, 2)) + h.square().sum((1, 2))


def before_it_is_written(h: Tensor) -> Tensor:
    t = h[:, :1].contiguous()
    first = t.sum((1, 2))
    return first + h.mul_(2.0).square().sum((1, 2))


def only_its_shape(h: Tensor) -> Tensor:
    t = h.transpose(0, 1).contiguous().relu_()
    return t.sin().sum((0, 2)) / h.shape[1] + torch.zeros_like(h).sum((1, 2))


def put_back(h: Tensor) -> Tensor:
    t = h.transpose(0, 1).contiguous().clamp_(-0.5, 0.5)
    h.copy_(t.transpose(0, 1))
    return h.square().sum((1, 2))


@pytest.mark.parametrize("code", [other_places, before_it_is_written, only_its_shape, put_back])
def test_writes_that_nobody_else_reads_are_answered(code: Code) -> None:
    model, x = Both(code).double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_a_buffer_that_a_batch_of_one_would_write_is_refused(factor: float) -> None:
    """Whether or not the code writes it, too."""

    class Masked(Both):
        def forward(self, x: Tensor) -> Tensor:
            if factor != 1.0:
                self.table.mul_(factor)
            table = self.table.expand(x.shape[0], 2, 3).contiguous()
            return self.layer(x) * table.masked_fill_(x > 1e3, 0.0)

    step = psg_fx.transform(Masked(lambda h: h).double(), loss, quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match="where the next call reads what is written before"):
        step(data())


def test_refused_where_the_first_batch_hides_it() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            h = self.layer(x)
            k = h.transpose(0, 1).contiguous().mul_(2.0).transpose(0, 1)
            return k.sin().flatten(1).sum(1) + (w > 0.5) * h.sum((1, 2))

    step = psg_fx.transform(Weighted().double(), lambda out: out.square().sum(), quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"where sum \(test_written_copies.py:[^\0]*\) gives another value"):
        step((data(), torch.zeros(4, dtype=torch.float64)))


def test_answered_where_nothing_reads_the_value_any_more() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).transpose(0, 1).contiguous().relu_().transpose(0, 1)  # type: ignore[no-any-return]

    model, x = Last().double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


class Forward(torch.autograd.Function):
    """Writes into what `copied` makes of x in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copied: Code) -> Tensor:
        t = copied(x)
        t.clamp_(-1e3, 1e3)
        return torch.cat([t.flatten().view(x.shape[0], -1), x.flatten(1)], 1).sum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[:, None, None].expand(-1, 2, 3), None


class Backward(torch.autograd.Function):
    """Writes into what `copied` makes of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copied: Code) -> Tensor:
        ctx.copied = copied
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        t = ctx.copied(g)
        t.clamp_(-1e3, 1e3)
        return g + t.sum(), None


@pytest.mark.parametrize("function", [Forward, Backward])
@pytest.mark.parametrize("name", ["transposed", "a slice", "a step"])
def test_inside_of_a_custom_function_it_is_refused(function: type[torch.autograd.Function], name: str) -> None:
    model = Both(lambda h: function.apply(h, COPIES[name]))  # type: ignore[no-untyped-call]
    with pytest.raises(NotYetSupported, match=r"a write in place in the custom function \w+ treats a batch of one"):
        psg_fx.transform(model.double(), loss, quantities=Grads(), backend="eager")(data())


class Halved(torch.autograd.Function):
    """Writes into copies that are such for one sample, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        t = x[..., :2].contiguous()
        t.mul_(2.0)
        return torch.cat([t, x.clone().mul_(0.5)], 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x = g[..., 2:].clone()
        x.mul_(0.5)
        t = g[..., :2].contiguous()
        t.mul_(2.0)
        return torch.cat([x[..., :2] + t, x[..., 2:]], 2)


def test_a_custom_function_that_writes_into_copies_of_one_sample_too_is_answered() -> None:
    model, x = Both(lambda h: Halved.apply(h)).double(), data()  # type: ignore[no-untyped-call]
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


def test_a_write_by_out_is_refused() -> None:
    def code(h: Tensor) -> Tensor:
        t = h.detach().transpose(0, 1).contiguous()
        torch.clamp(t, -1e3, 1e3, out=t)
        return t.sin().sum((0, 2)) + h.square().sum((1, 2))

    with pytest.raises(NotYetSupported, match="a write in place treats a batch of one sample differently"):
        psg_fx.transform(Both(code).double(), loss, quantities=Grads(), backend="eager")(data())


def test_a_result_by_out_lies_where_it_is_written() -> None:
    """Not in the memory of what it is computed of."""

    def code(h: Tensor) -> Tensor:
        t = h.detach().transpose(0, 1).contiguous()
        torch.clamp(t, -1.0, 1.0, out=(other := torch.empty_like(t)))
        other.mul_(2.0)
        return other.sin().sum((0, 2)) + h.square().sum((1, 2))

    model, x = Both(code).double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10
