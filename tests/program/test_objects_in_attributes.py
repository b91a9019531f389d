"""Objects that the code makes of tensors and keeps, as agents do with distributions: `self.dist = Categorical(h)`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import psg_fx
from psg_fx import Grads, NotYetSupported
from support import oracle


class Head:
    """A distribution of actions, which is made at every call and read afterwards."""

    def __init__(self) -> None:
        self.dist: Any = None

    def make(self, h: Tensor) -> Head:
        self.dist = Categorical(logits=h)
        return self

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.dist.log_prob(actions)  # type: ignore[no-any-return]


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), Head()

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        return -self.head.make(self.layer(x)).log_prob(actions)


class Nested(Agent):
    """A distribution of a distribution, in an attribute of the module."""

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        self.last = Independent(Normal(self.layer(x), torch.ones(3, dtype=x.dtype)), 1)
        return -self.last.log_prob(nn.functional.one_hot(actions, 3))  # type: ignore[no-any-return]


@dataclass
class Found:
    h: Tensor
    sizes: tuple[int, ...]
    name: str


class OfOnesOwn(Agent):
    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        h = self.layer(x)
        self.found = [Found(h, h.shape, "h")]
        return nn.functional.cross_entropy(h, actions)


def itself(loss: Tensor) -> Tensor:
    return loss


def batch(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 4, dtype=torch.float64), "actions": torch.randint(3, (count,))}


@pytest.mark.parametrize("kind", [Agent, Nested, OfOnesOwn])
def test_gradients_and_what_is_left(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind().double()
    other = copy.deepcopy(model)
    step = psg_fx.transform(model, itself, quantities=Grads(), backend="eager")
    for count in (3, 3, 3, 5, 1):
        inputs = batch(count)
        losses, grads = oracle.loop_grads(other, itself, inputs, None, dtype=None)
        found = step(inputs)
        torch.testing.assert_close(found.losses, losses if found.losses.ndim else losses.mean())
        torch.testing.assert_close(found.grads["layer.weight"], grads["layer.weight"])
        other(**inputs)
        if kind is Agent:
            torch.testing.assert_close(model.head.dist.logits, other.head.dist.logits.detach())
            assert model.head.dist.sample().shape == (count,)
        elif kind is Nested:
            torch.testing.assert_close(model.last.base_dist.loc, other.last.base_dist.loc.detach())
            assert model.last.batch_shape == torch.Size([count])
        else:
            assert type(model.found[0]) is Found
            assert (model.found[0].sizes, model.found[0].name) == (torch.Size([count, 3]), "h")


def test_one_graph_serves_all_calls() -> None:
    model = Agent().double()
    step = psg_fx.transform(model, itself, quantities=Grads(), backend="eager")
    for _ in range(5):
        step(batch(3))
    assert len(step.captures) == 2  # there was none, and now there is one


def test_what_the_last_call_left_is_another_object() -> None:
    model = Agent().double()
    step = psg_fx.transform(model, itself, quantities=Grads(), backend="eager")
    step(batch(3))
    before = model.head.dist
    logits = before.logits.clone()
    step(batch(3))
    assert model.head.dist is not before
    assert torch.equal(before.logits, logits)


class Close(Agent):
    """Reads what the call before has left, of samples."""

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        old, h = self.head.dist, self.layer(x)
        self.head.make(h)
        shift = 0.0 if old is None else (h - old.logits.detach()).square().sum(1)
        return self.head.log_prob(actions) + shift


def test_samples_of_the_call_before_are_no_part_of_a_loss() -> None:
    step = psg_fx.transform(Close().double(), itself, quantities=Grads(), backend="eager")
    step(batch(3))
    with pytest.raises(psg_fx.PsgError, match=r"test_objects_in_attributes\.py"):
        step(batch(3))


class Moved(Agent):
    """Reads what the call before has left, of a parameter as it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.prior = nn.Parameter(torch.zeros(3)), None

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        old: Any = self.prior
        self.prior = Normal(self.mean.detach() * 2, torch.ones_like(self.mean).detach())  # type: ignore[assignment]
        loss = nn.functional.cross_entropy(self.layer(x) + self.mean, actions)
        return loss if old is None else loss + (self.mean - old.loc).square().sum()


def test_a_parameter_as_it_was_is_read_anew() -> None:
    torch.manual_seed(0)
    model = Moved().double()
    step, want = psg_fx.transform(model, itself, quantities=Grads(), backend="eager"), None
    for shift in range(5):
        with torch.no_grad():
            model.mean += shift + 1
        inputs = batch(3)
        found = step(inputs)
        of_layer = torch.softmax(model.layer(inputs["x"]) + model.mean, -1) - nn.functional.one_hot(
            inputs["actions"], 3
        )
        expected = of_layer if want is None else of_layer + 2 * (model.mean - want)
        torch.testing.assert_close(found.grads["mean"], expected.detach())
        want = model.mean.detach() * 2


def test_an_object_without_tensors_is_refused() -> None:
    class Counted(Agent):
        def forward(self, x: Tensor, actions: Tensor) -> Tensor:
            self.note = Head()
            return nn.functional.cross_entropy(self.layer(x), actions)

    step = psg_fx.transform(Counted().double(), itself, quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"the code changes Counted\.note"):
        step(batch(3))


class Late:
    """Looks like anything, and runs code for it, as names that packages import late do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no module for {name}")


class Helper:
    moved = Late()

    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


def test_objects_of_a_class_are_not_asked_for_attributes() -> None:
    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.helper = nn.Linear(4, 3), Helper()

        def forward(self, x: Tensor) -> Tensor:
            return self.helper.twice(self.layer(x))

    model, x = Helped().double(), torch.randn(3, 4, dtype=torch.float64)
    found = psg_fx.transform(model, itself_squared, quantities=Grads(), backend="eager")(x)
    torch.testing.assert_close((found.losses, found.grads), oracle.loop_grads(model, itself_squared, x))


def itself_squared(o: Tensor) -> Tensor:
    return o.square().sum()
