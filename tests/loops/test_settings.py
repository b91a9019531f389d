"""What a store was made of, beyond parameters and names: settings, code, and the modes around a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import Norms
from psg_fx.algebra.asks import SquaredNorm
from psg_fx.errors import BadArgument
from support.batches import loader
from support.small import WithLayer, mlp
from support.stores import interrupted, own_step


def refused(folder: Path, first: Any, second: Any, text: str) -> None:
    """The second does not go on where the first was interrupted; the first does."""
    interrupted(folder, first)
    with pytest.raises(BadArgument, match=text):
        psg_fx.over(loader(11, 3), second, store=folder, progress=False)
    assert len(psg_fx.over(loader(11, 3), first, store=folder, progress=False)) == 11


def sum_of(value: float) -> Callable[..., torch.Tensor]:
    return lambda output, target: F.cross_entropy(output, target, reduction="sum") * value


def with_default(output: torch.Tensor, target: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return factor * F.cross_entropy(output, target)


@dataclass
class Kept:
    """A loss that is no function, with a list."""

    weights: list[float]

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.weights[0] * F.cross_entropy(output, target)


class Plain:
    """The same with a tensor and without fields."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight=self.weight)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


def copied(function: Any, default: float) -> Any:
    """The same function with another default."""
    found = type(function)(function.__code__, function.__globals__, function.__name__, (default,))
    found.__qualname__ = function.__qualname__
    return found


W = torch.tensor([1.5, 2.25, 3.1])
LARGE = torch.ones(3000)
CHANGED = LARGE.clone()
CHANGED[10:30] = 100.0


def looked_up(output: torch.Tensor, target: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none") * table[target]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.3),
         r"other settings of loss\.label_smoothing\n.*\n  why    loss\.label_smoothing: 0\.0 there, 0\.3 here"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=1), r"loss\.ignore_index: -100 there, 1 here"),
        (nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(), r"loss\.reduction: 'sum' there, 'mean' here"),
        (functools.partial(F.cross_entropy, weight=W), functools.partial(F.cross_entropy, weight=W + 4e-5),
         "another loss"),
        (functools.partial(looked_up, table=LARGE), functools.partial(looked_up, table=CHANGED), "another loss"),
        (sum_of(2.0), sum_of(3.0), r"another loss\n.*\n.*with value=2\.0 there, .*with value=3\.0 here"),
        (with_default, copied(with_default, 3.0), r"default 2\.0 there, .*default 3\.0 here"),
        (Kept([1.0]), Kept([2.0]), r"Kept\(weights=list\(1\.0\)\) there"),
        (Plain(W), Plain(W + 4e-5), "another loss"),
        (Plain(W).loss, Plain(W + 4e-5).loss, "another loss"),
    ],
)  # fmt: skip
def test_other_settings_of_a_loss_are_refused(tmp_path: Path, first: Any, second: Any, text: str) -> None:
    refused(tmp_path, own_step(loss=first), own_step(loss=second), text)


def inherited(factor: int) -> nn.Module:
    """Models of one name whose forward is in a base class, and differs."""
    if factor == 1:

        class Base(WithLayer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x)
    else:

        class Base(WithLayer):  # type: ignore[no-redef]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.tanh(self.layer(x)) * factor

    class Net(Base):
        pass

    return Net()


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None] * torch.arange(1.0, 4.0)[:, None]
        return self.attention(h, h, h)[0].sum(1)[:, :3]


class Activated(WithLayer):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


def hooked(factor: float) -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, output: output * factor)
    return model


def own_forward(factor: float) -> nn.Module:
    model = mlp()
    model[1].forward = MethodType(lambda self, x: x * factor, model[1])  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (inherited(1), inherited(5), r"other code\n.*\n.*the code of .*inherited\.<locals>\.Base"),
        (mlp(), hooked(3.0), r"other settings of 0\.hooks\n.*\n.*nothing there"),
        (hooked(2.0), hooked(3.0), r"with factor=2\.0 there, .*with factor=3\.0 here"),
        (mlp(), own_forward(2.0), r"other settings of 1\.forward"),
        (own_forward(2.0), own_forward(3.0), r"1\.forward: .*factor=2\.0 of 1 there"),
        (Heads(2), Heads(1), r"attention\.num_heads: 2 there, 1 here"),
        (Activated(F.relu), Activated(F.gelu), r"function: torch.nn.functional.relu there, .*gelu here"),
        (Activated(nn.Tanh()), Activated(nn.Sigmoid()), "another model"),
    ],
)
def test_other_code_and_settings_of_a_model_are_refused(
    tmp_path: Path, first: nn.Module, second: nn.Module, text: str
) -> None:
    second.load_state_dict(first.state_dict())
    refused(tmp_path, own_step(Norms(), first), own_step(Norms(), second), text)


def factor() -> float:
    return 2.0


def of_model(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return factor() * F.cross_entropy(output, target)


def test_functions_of_the_same_file_belong_to_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, own_step(loss=of_model))
    monkeypatch.setitem(globals(), "factor", lambda: 3.0)
    with pytest.raises(BadArgument, match="other code"):
        psg_fx.over(loader(11, 3), own_step(loss=of_model), store=tmp_path, progress=False)


class Lazy(WithLayer):
    """Forward makes a table, and remembers how long it is: no setting."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.seen = None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._remember(x)
        return self.layer(x)

    def _remember(self, x: torch.Tensor) -> None:
        if self.length is None:
            self.length = x.shape[1]  # type: ignore[assignment]

    @functools.cached_property
    def wide(self) -> bool:
        return True


def test_what_forward_stores_is_no_setting(tmp_path: Path) -> None:
    model = Lazy()
    interrupted(tmp_path, own_step(Norms(), model))
    model.length = 4  # type: ignore[assignment]
    assert model.wide
    fresh = Lazy()
    fresh.load_state_dict(model.state_dict())
    whole = psg_fx.over(loader(11, 3), own_step(Norms(), model), store=tmp_path, progress=False)
    assert len(whole) == len(psg_fx.over(loader(11, 3), own_step(Norms(), fresh), store=tmp_path, progress=False)) == 11
    model.seen = 1
    with pytest.raises(BadArgument, match="seen: 0 there, 1 here"):
        psg_fx.over(loader(11, 3), own_step(Norms(), model), store=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast: off there, bfloat16 here"),
        (lambda: Precision("tf32"), "float32 products: ieee there, tf32 here"),
    ],
)
def test_another_arithmetic_is_refused(tmp_path: Path, mode: Any, text: str) -> None:
    own = own_step()
    interrupted(tmp_path, own)
    with mode(), pytest.raises(BadArgument, match=rf"another arithmetic\n.*\n  why    {text}\n"):
        psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)
    psg_fx.over(loader(11, 3), own, store=tmp_path, progress=False)


class Precision:
    """Products of float32 in another arithmetic for a while."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul.fp32_precision = self.name  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = self.before  # type: ignore[attr-defined]


def own_quantity(rooted: bool) -> Any:
    """Quantities of one name, which finish otherwise."""

    class Base(psg_fx.Quantity):
        field = "q"

        def asks(self) -> Any:
            return (SquaredNorm(),)

        def joins(self) -> Any:
            return {"q": "cat"}

    if rooted:

        @dataclass(frozen=True)
        class Own(Base):
            def finish(self, r: Any, weights: Any, batch: int) -> Any:
                return {"q": sum(r["sq_norms"].values()).sqrt()}
    else:

        @dataclass(frozen=True)
        class Own(Base):  # type: ignore[no-redef]
            def finish(self, r: Any, weights: Any, batch: int) -> Any:
                return {"q": sum(r["sq_norms"].values())}

    return Own()


def test_the_code_of_a_quantity_belongs_to_it(tmp_path: Path) -> None:
    refused(tmp_path, own_step(own_quantity(True)), own_step(own_quantity(False)), r"the code of .*own_quantity.*Own")


@dataclass
class Config:
    """The settings of a whole model, which its parts share."""

    scale: float = 2.0
    kind: str | None = None
    factor: float = 1.0


class Part(WithLayer):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.config.scale * self.layer(x)


class Configured(nn.Module):
    """Decides at its first call of what kind it is, and keeps a factor of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config(**settings)
        self.part = Part(self.config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "floats" if x.is_floating_point() else "ints"
        self.factor = 3.0
        return self.config.factor * self.factor * self.part(x)


def test_what_the_forward_stores_in_shared_settings_does_not_count(tmp_path: Path) -> None:
    first = own_step(model=Configured())
    interrupted(tmp_path, first)
    assert first.model.config.kind == "floats"
    assert len(psg_fx.over(loader(11, 3), first, store=tmp_path, progress=False)) == 11


@pytest.mark.parametrize("name", ["scale", "factor"])
def test_of_settings_that_parts_share_the_field_is_named(tmp_path: Path, name: str) -> None:
    """Once: the parts' are the model's."""
    refused(
        tmp_path, own_step(model=Configured(kind="floats")), own_step(model=Configured(**{name: 5.0})),
        rf"other settings of config.{name}\n.*\n  why    config.{name}: [12].0 there, 5.0 here\n",
    )  # fmt: skip
