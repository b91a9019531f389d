"""Example models, each with a loss and a batch of random data, for tests, benchmarks and the command line.

>>> from psg_fx import zoo
>>> ex = zoo.example("gpt", batch=2, layers=1, width=32, heads=2, tokens=8, vocabulary=50)
>>> ex.loss_fn(ex.model(ex.inputs), ex.targets).shape
torch.Size([])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.zoo.sequence import GPT, MLP, EncoderClassifier, LSTMClassifier, token_cross_entropy
from psg_fx.zoo.vision import ResNetGN, SimpleCNN, VisionTransformer

__all__ = [
    "GPT",
    "MLP",
    "EncoderClassifier",
    "Example",
    "LSTMClassifier",
    "ResNetGN",
    "SimpleCNN",
    "VisionTransformer",
    "example",
    "names",
    "token_cross_entropy",
]


@dataclass(frozen=True)
class Example:
    """A model, its loss (any reduction), a batch of samples, and where the samples lie in inputs and targets."""

    name: str
    model: nn.Module
    loss_fn: Callable[..., Tensor]
    inputs: Any
    targets: Any
    batch_dim: Any = 0


Drawn = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class _Kind:
    """How examples of one name are made.

    model: its keywords are sizes.  batch: the default.  draw: batch and sizes -> the data.  data: sizes of the data
    alone, with their defaults.
    """

    model: Callable[..., nn.Module]
    loss_fn: Callable[..., Tensor]
    batch: int
    draw: Callable[[int, SimpleNamespace], Drawn]
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, Any]:
        """All sizes by name, with their defaults."""
        return {**self.data, **{name: p.default for name, p in signature(self.model).parameters.items()}}


def _images(channels: int) -> Callable[[int, SimpleNamespace], Drawn]:
    return lambda batch, s: (torch.randn(batch, channels, s.image, s.image), _classes(batch, s))


def _classes(batch: int, s: SimpleNamespace) -> Tensor:
    return torch.randint(s.classes, (batch,))


def _next_tokens(batch: int, s: SimpleNamespace) -> Drawn:
    ids = torch.randint(s.vocabulary, (batch, s.tokens + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _features(batch: int, s: SimpleNamespace) -> Drawn:
    return torch.randn((batch, s.tokens, s.width) if s.batch_first else (s.tokens, batch, s.width)), _classes(batch, s)


_KINDS = {
    "simplecnn": _Kind(SimpleCNN, F.nll_loss, 64, _images(1)),
    "resnet18gn": _Kind(ResNetGN, F.cross_entropy, 16, _images(3), {"image": 32}),
    "gpt": _Kind(GPT, token_cross_entropy, 8, _next_tokens, {"tokens": 128}),
    "vit": _Kind(VisionTransformer, F.cross_entropy, 16, _images(3)),
    "lstm": _Kind(
        LSTMClassifier, F.cross_entropy, 32,
        lambda batch, s: (torch.randint(s.vocabulary, (batch, s.tokens)), _classes(batch, s)), {"tokens": 32},
    ),
    "encoder": _Kind(EncoderClassifier, F.cross_entropy, 16, _features, {"tokens": 32}),
    "mlp": _Kind(MLP, F.cross_entropy, 32, lambda batch, s: (torch.randn(batch, s.inputs), _classes(batch, s))),
}  # fmt: skip


def names() -> list[str]:
    """The names that `example` knows."""
    return list(_KINDS)


def example(
    name: str,
    batch: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **sizes: Any,
) -> Example:
    """The example called `name`, in train mode, with a batch of random samples.

    Everything is drawn on the CPU from `seed` and then moved, so that devices see equal numbers; the global random
    state is left alone. `sizes` are the example's own (`layers=1, width=32, ...`).
    """
    if name not in _KINDS:
        raise ValueError(f"no example is called {name!r}; there are: {', '.join(_KINDS)}")
    kind = _KINDS[name]
    known = kind.sizes
    if unknown := [key for key in sizes if key not in known]:
        raise ValueError(f"{name} has no size called {unknown[0]!r}; it has: {', '.join(known)}")
    for key, value in sizes.items():
        if isinstance(known[key], int) and not isinstance(value, int):
            raise ValueError(f"{key}={value} of {name} is no whole number")
    values = SimpleNamespace(**known | sizes)
    if "max_tokens" in known and sizes.get("max_tokens") is None:
        values.max_tokens = values.tokens
    count = kind.batch if batch is None else batch
    if count < 1:
        raise ValueError(f"batch must be at least 1, got {count}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.model(**{key: value for key, value in vars(values).items() if key not in kind.data})
        inputs, targets = kind.draw(count, values)
    inputs = inputs.to(device=device, dtype=dtype if inputs.is_floating_point() else None)
    batch_dim = 0 if getattr(values, "batch_first", True) else (1, 0)
    return Example(name, model.to(device=device, dtype=dtype), kind.loss_fn, inputs, targets.to(device), batch_dim)
