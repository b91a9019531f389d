"""Models and losses of `psg_fx.zoo` in JAX, for one sample: pure functions of torch's parameters by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch.nn.functional as F
from jax import lax

from psg_fx import zoo
from psg_fx.benchmarking.peers.adapters import CannotBeAsked

Params = dict[str, Any]


def sample_loss(model: Any, loss_fn: Callable[..., Any]) -> Callable[[Params, Any, Any], Any]:
    """`(params, input, target)` -> the loss of one sample.  Raises `CannotBeAsked` for what is not written here."""
    if type(model) not in MODELS or loss_fn not in LOSSES:
        known = ", ".join(kind.__name__ for kind in MODELS)
        raise CannotBeAsked(f"{type(model).__name__} is not written in JAX here; {known} are")
    forward, loss = partial(MODELS[type(model)], model), LOSSES[loss_fn]
    return lambda params, x, y: loss(forward(params, x), y)


def linear(p: Params, name: str, x: Any) -> Any:
    """X Wᵀ + b."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def layer_norm(p: Params, name: str, x: Any) -> Any:
    """Over the last dim, ε = 1e-5."""
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def conv(p: Params, name: str, x: Any) -> Any:
    """A convolution of one image `[C, H, W]` without padding."""
    y = lax.conv_general_dilated(
        x[None], p[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return y[0] + p[f"{name}.bias"][:, None, None]


def mlp(model: zoo.MLP, p: Params, x: Any) -> Any:
    """`[inputs]` -> `[classes]`."""
    h = jnp.tanh(linear(p, "fc1", x))
    h = jnp.tanh(linear(p, "fc2", h))
    return linear(p, "fc3", h)


def simplecnn(model: zoo.SimpleCNN, p: Params, x: Any) -> Any:
    """`[1, S, S]` -> log-probabilities `[classes]`."""
    h = jax.nn.relu(conv(p, "conv1", x))
    h = jax.nn.relu(conv(p, "conv2", h))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")
    h = jax.nn.relu(linear(p, "fc1", h.reshape(-1)))
    return jax.nn.log_softmax(linear(p, "fc2", h))


def gpt(model: zoo.GPT, p: Params, ids: Any) -> Any:
    """Token ids `[T]` -> logits `[T, V]`."""
    h = p["embed.weight"][ids] + p["position"][0, : ids.shape[0]]
    for index, block in enumerate(model.blocks):
        h = causal_block(p, f"blocks.{index}", block.heads, h)  # type: ignore[arg-type]
    h = layer_norm(p, "norm", h)
    return h @ p["embed.weight" if model.head.weight is model.embed.weight else "head.weight"].T


def causal_block(p: Params, name: str, heads: int, x: Any) -> Any:
    """`[T, D]` -> `[T, D]`; attention runs on `[heads, T, D/heads]`."""
    t, d = x.shape
    qkv = linear(p, f"{name}.qkv", layer_norm(p, f"{name}.norm1", x))
    q, k, v = (z.reshape(t, heads, d // heads).transpose(1, 0, 2) for z in jnp.split(qkv, 3, axis=1))
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), q @ k.transpose(0, 2, 1) / (d // heads) ** 0.5, -jnp.inf)
    attended = jax.nn.softmax(scores) @ v
    x = x + linear(p, f"{name}.out", attended.transpose(1, 0, 2).reshape(t, d))
    h = jax.nn.gelu(linear(p, f"{name}.up", layer_norm(p, f"{name}.norm2", x)), approximate=False)
    return x + linear(p, f"{name}.down", h)


def nll_loss(log_probabilities: Any, target: Any) -> Any:
    """`[classes]`, one target."""
    return -log_probabilities[target]


def cross_entropy(logits: Any, target: Any) -> Any:
    """`[classes]`, one target."""
    return nll_loss(jax.nn.log_softmax(logits), target)


def token_cross_entropy(logits: Any, targets: Any) -> Any:
    """The mean over tokens: `[T, V]`, `[T]`."""
    return jax.vmap(cross_entropy)(logits, targets).mean()


MODELS: dict[type, Callable[..., Any]] = {zoo.MLP: mlp, zoo.SimpleCNN: simplecnn, zoo.GPT: gpt}
LOSSES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.nll_loss: nll_loss,
    F.cross_entropy: cross_entropy,
    zoo.token_cross_entropy: token_cross_entropy,
}
