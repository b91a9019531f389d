"""Example models, each with a loss and a batch of random data, for tests, benchmarks and the command line.

>>> from psg_fx import zoo
>>> ex = zoo.example("gpt", batch=2, layers=1, width=32, heads=2, tokens=8, vocabulary=50)
>>> ex.loss_fn(ex.model(ex.inputs), ex.targets).shape
torch.Size([])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.zoo.sequence import GPT, MLP, EncoderClassifier, LSTMClassifier, token_cross_entropy
from psg_fx.zoo.vision import ResNetGN, SimpleCNN, Stem, VisionTransformer

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


Parts = tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor, Any]
"""What a builder returns: model, loss, inputs, targets, batch_dim."""


def _simplecnn(batch: int, *, image: int = 28, width: int = 32, hidden: int = 128, classes: int = 10) -> Parts:
    model = SimpleCNN(image=image, width=width, hidden=hidden, classes=classes)
    return model, F.nll_loss, torch.randn(batch, 1, image, image), torch.randint(classes, (batch,)), 0


def _resnet18gn(
    batch: int,
    *,
    image: int = 32,
    width: int = 64,
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    groups: int = 32,
    classes: int = 10,
    stem: Stem = "imagenet",
) -> Parts:
    model = ResNetGN(width=width, blocks=blocks, groups=groups, classes=classes, stem=stem)
    return model, F.cross_entropy, torch.randn(batch, 3, image, image), torch.randint(classes, (batch,)), 0


def _gpt(
    batch: int,
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    tokens: int = 128,
    max_tokens: int | None = None,
    vocabulary: int = 1000,
    tied: bool = False,
) -> Parts:
    longest = tokens if max_tokens is None else max_tokens
    model = GPT(layers=layers, width=width, heads=heads, max_tokens=longest, vocabulary=vocabulary, tied=tied)
    ids = torch.randint(vocabulary, (batch, tokens + 1))
    return model, token_cross_entropy, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 0


def _vit(
    batch: int,
    *,
    image: int = 32,
    patch: int = 4,
    layers: int = 6,
    width: int = 192,
    heads: int = 3,
    classes: int = 10,
) -> Parts:
    model = VisionTransformer(image=image, patch=patch, layers=layers, width=width, heads=heads, classes=classes)
    return model, F.cross_entropy, torch.randn(batch, 3, image, image), torch.randint(classes, (batch,)), 0


def _lstm(
    batch: int,
    *,
    tokens: int = 32,
    vocabulary: int = 1000,
    width: int = 64,
    hidden: int = 128,
    layers: int = 2,
    classes: int = 4,
) -> Parts:
    model = LSTMClassifier(vocabulary=vocabulary, width=width, hidden=hidden, layers=layers, classes=classes)
    ids = torch.randint(vocabulary, (batch, tokens))
    return model, F.cross_entropy, ids, torch.randint(classes, (batch,)), 0


def _encoder(
    batch: int,
    *,
    tokens: int = 32,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    hidden: int = 128,
    classes: int = 4,
    dropout: float = 0.0,
    batch_first: bool = True,
) -> Parts:
    model = EncoderClassifier(
        width=width,
        heads=heads,
        layers=layers,
        hidden=hidden,
        classes=classes,
        dropout=dropout,
        batch_first=batch_first,
    )
    shape = (batch, tokens, width) if batch_first else (tokens, batch, width)
    batch_dim = 0 if batch_first else (1, 0)
    return model, F.cross_entropy, torch.randn(shape), torch.randint(classes, (batch,)), batch_dim


def _mlp(batch: int, *, inputs: int = 16, hidden: int = 32, classes: int = 4) -> Parts:
    model = MLP(inputs=inputs, hidden=hidden, classes=classes)
    return model, F.cross_entropy, torch.randn(batch, inputs), torch.randint(classes, (batch,)), 0


_EXAMPLES: dict[str, tuple[Callable[..., Parts], int]] = {
    "simplecnn": (_simplecnn, 64),
    "resnet18gn": (_resnet18gn, 16),
    "gpt": (_gpt, 8),
    "vit": (_vit, 16),
    "lstm": (_lstm, 32),
    "encoder": (_encoder, 16),
    "mlp": (_mlp, 32),
}
"""Name -> (builder, default batch size)."""


def names() -> list[str]:
    """The names that `example` knows."""
    return list(_EXAMPLES)


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
    if name not in _EXAMPLES:
        raise ValueError(f"no example is called {name!r}; there are: {', '.join(_EXAMPLES)}")
    build, default_batch = _EXAMPLES[name]
    known = [key for key in signature(build).parameters if key != "batch"]
    if unknown := [key for key in sizes if key not in known]:
        raise ValueError(f"{name} has no size called {unknown[0]!r}; it has: {', '.join(known)}")
    count = default_batch if batch is None else batch
    if count < 1:
        raise ValueError(f"batch must be at least 1, got {count}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, loss_fn, inputs, targets, batch_dim = build(count, **sizes)
    inputs = inputs.to(device=device, dtype=dtype if inputs.is_floating_point() else None)
    return Example(name, model.to(device=device, dtype=dtype), loss_fn, inputs, targets.to(device), batch_dim)
