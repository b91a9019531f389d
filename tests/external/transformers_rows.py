"""How a program of a Hugging Face model is made: inputs, labels, configurations, weights, all in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from external.torchvision_import import torchvision  # isort: skip  # noqa: F401  (transformers imports it)

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from external.program import Problem, Program

B, T, V, H = 3, 6, 50, 16
LENGTHS = (6, 4, 3)


class Float64Throughout(TorchFunctionMode):
    """What the code casts to float32 stays in float64: norms, softmax, rotary angles and losses of the library."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = tuple(map(_double, args)), {k: _double(v) for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class InFloat64(nn.Module):
    """A model whose forward runs in float64 throughout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, **inputs: Any) -> Any:
        with Float64Throughout():
            return self.model(**inputs)


def ids(length: int = T, low: int = 3) -> Tensor:
    return torch.randint(low, V, (B, length))


def padding(length: int = T) -> Tensor:
    """A mask `[B, length]` of unequal lengths: ones, then zeros."""
    return (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()


def token_labels(length: int = T) -> Tensor:
    """Labels `[B, length]`, of which each sample ignores another number."""
    labels = ids(length)
    labels[0, 0] = labels[2, 1] = -100
    return labels.masked_fill(padding(length) == 0, -100)


Inputs = Callable[[], dict[str, Any]]


def tokens() -> dict[str, Any]:
    return {"input_ids": ids()}


def padded() -> dict[str, Any]:
    return {"input_ids": ids(), "attention_mask": padding()}


def positioned() -> dict[str, Any]:
    return {**padded(), "position_ids": torch.stack([torch.arange(T) + k for k in range(B)])}


def typed() -> dict[str, Any]:
    return {**padded(), "token_type_ids": torch.randint(2, (B, T))}


def pixels(size: int = 8) -> Inputs:
    return lambda: {"pixel_values": torch.randn(B, 3, size, size, dtype=torch.float64)}


def labelled(inputs: Inputs, **labels: Callable[[], Tensor]) -> Inputs:
    return lambda: {**inputs(), **{name: make() for name, make in labels.items()}}


def classes() -> Tensor:
    return torch.tensor([0, 2, 1])


NARROW = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**NARROW, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**NARROW, **UNDROPPED}


def problem(
    kind: str, config: dict[str, Any], inputs: Inputs, *, attention: str, inside: bool, train: bool, prepare: Any
) -> Problem:
    """The model `transformers.<kind>`, its config the one that goes with it."""
    model_class = getattr(transformers, kind)
    made = model_class.config_class(**config)
    made._attn_implementation = attention
    model = model_class(made).train(train)
    if prepare is not None:
        model = prepare(model)
    _disturb(model)
    return Problem(InFloat64(model), inputs(), loss_fn=(lambda out: out.loss) if inside else None)


def _disturb(model: nn.Module) -> None:
    """Zeros and ones of a fresh model become random: a zero bias or gate would hide what depends on it."""
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)


def row(
    name: str,
    kind: str,
    config: dict[str, Any],
    inputs: Inputs = padded,
    labels: dict[str, Callable[[], Tensor]] | None = None,
    *,
    attention: str = "eager",
    train: bool = True,
    prepare: Callable[[Any], nn.Module] | None = None,
    mixes: str = "",
    refused: str = "",
) -> Program:
    """labels: what makes the model compute its loss itself; without them the loss is outside."""
    chosen = inputs if labels is None else labelled(inputs, **labels)
    options = {"attention": attention, "inside": labels is not None, "train": train, "prepare": prepare}
    return Program(name, lambda: problem(kind, config, chosen, **options), mixes, refused, "transformers")


TOKENS = {"labels": token_labels}
CLASS = {"labels": classes}
