"""Models without a loss that return objects with tensors: distributions, caches, classes of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, LogNormal, Normal

import psg_fx
from psg_fx import NotYetSupported

X = torch.randn(4, 3, dtype=torch.float64)


class Held:
    def __init__(self, h: Tensor, more: Any = None) -> None:
        self.h, self.more, self.size = h, more, h.shape[0]


@dataclasses.dataclass(slots=True)
class InSlots:
    h: Tensor


class Model(nn.Module):
    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.made = nn.Linear(3, 2), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.layer(x))


RETURNED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "an object": (Held, lambda o: o.h),
    "in another one": (lambda h: Held(h.detach(), [Held(h)]), lambda o: o.more[0].h),
    "in a tuple": (lambda h: (h, Held(h.exp())), lambda o: o[1].h),
    "a distribution": (lambda h: Normal(h, 1.0), lambda o: o.mean),
    "of independent ones": (lambda h: Independent(Normal(h, 1.0), 1), lambda o: o.log_prob(torch.ones(1, 2))),
    "transformed": (lambda h: LogNormal(h, 0.5), lambda o: o.mean),
}


@pytest.mark.parametrize(("made", "value"), RETURNED.values(), ids=RETURNED)
def test_their_tensors_are_those_of_the_call(made: Callable[..., Any], value: Callable[[Any], Tensor]) -> None:
    ordinary, model = Model(made).double(), Model(made).double()
    dropped = psg_fx.transform(model, backend="eager")
    for x in (X, 2 * X[:2], X[:1]):
        found, wanted = dropped(x), ordinary(x)
        assert type(found) is type(wanted)
        torch.testing.assert_close(value(found), value(wanted))
        value(found).sum().backward()
        loss = [torch.autograd.grad(value(ordinary(row[None])).sum(), ordinary.layer.weight)[0] for row in x]
        torch.testing.assert_close(model.layer.weight.grad_sample, torch.stack(loss))  # type: ignore[arg-type]
        del model.layer.weight.grad_sample, model.layer.bias.grad_sample


def test_numbers_in_them_follow_the_batch_size() -> None:
    dropped = psg_fx.transform(Model(Held).double(), backend="eager")
    assert [dropped(X[:n]).size for n in (4, 2, 1)] == [4, 2, 1]


@pytest.mark.parametrize(
    "made", [InSlots, lambda h: {h}, lambda h: (v for v in (h,)), lambda h: lambda: h, lambda h: {"h": h}.values()]
)
def test_others_are_refused(made: Callable[[Tensor], Any]) -> None:
    with pytest.raises(NotYetSupported, match=r"that holds tensors|an iterator"):
        psg_fx.transform(Model(made).double(), backend="eager")(X)
