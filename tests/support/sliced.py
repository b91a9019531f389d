"""Models and plans that slice them, for tests on several processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import psg_fx

ROWS = ("losses", "norms", "clip_factors")
SUMS = ("clipped_sum", "weighted_sum", "mean_grad", "second_moment")
QUANTITIES = (
    psg_fx.ClippedSum(max_norm=0.3), psg_fx.WeightedSum(), psg_fx.MeanGrad(), psg_fx.SecondMoment(centered=True),
)  # fmt: skip


class Perceptron(nn.Module):
    """A norm and a head that are whole, a layer cut by columns before one cut by rows, and a scale of what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(self.up(self.norm(x)).tanh())).mean(1)


class RMSNorm(nn.RMSNorm):
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 0.5, 1.5)


class Attention(nn.Module):
    """Causal, with rotated queries and keys; as many heads as its slices have."""

    def __init__(self, width: int, each: int) -> None:
        super().__init__()
        self.each = each
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for f in (self.q, self.k, self.v))
        angles = torch.arange(q.shape[2], dtype=x.dtype)[:, None] / torch.arange(1, self.each // 2 + 1)
        q, k = rotated(q, angles), rotated(k, angles)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(h.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, width: int, each: int) -> None:
        super().__init__()
        self.before, self.attention, self.after = RMSNorm(width), Attention(width, each), RMSNorm(width)
        self.gate, self.up, self.down = (
            nn.Linear(*s, bias=False) for s in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A small one."""

    def __init__(self, layers: int = 2, width: int = 8, each: int = 4, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, each) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Embeddings(nn.Module):
    """One cut by columns, one by rows with a row that takes no part, and one whole; a layer that reads cut values."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rows, self.whole = nn.Embedding(6, 4), nn.Embedding(6, 4, padding_idx=4), nn.Embedding(6, 4)
        self.mix, self.out = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mix(self.columns(ids) + self.rows(ids) + self.whole(ids)).tanh())


def perceptron() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """The model, a loss, and a batch of 6."""
    return Perceptron(), F.cross_entropy, torch.randn(6, 4, 6, dtype=torch.float64), torch.randint(3, (6,))


def of_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def llama(layers: int = 1) -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Llama(layers), of_tokens, torch.randint(12, (6, 6)), torch.randint(12, (6, 6))


def embeddings() -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Embeddings(), of_tokens, torch.randint(6, (6, 5)), torch.randint(6, (6, 5))


def of_perceptron() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def of_llama() -> dict[str, Any]:
    each = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
    each |= {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    blocks = {f"blocks.*.{name}": style for name, style in each.items()}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return blocks | ends


def of_sequences() -> dict[str, Any]:
    """That of the llama, with values that are cut along their sequences between layers."""
    cut = Shard(1)
    each: dict[str, Any] = {f"attention.{name}": ColwiseParallel(input_layouts=cut) for name in "qkv"}
    each |= {name: ColwiseParallel(input_layouts=cut) for name in ("gate", "up")}
    each |= {name: RowwiseParallel(output_layouts=cut) for name in ("attention.o", "down")}
    each |= {name: SequenceParallel(use_local_output=True) for name in ("before", "after")}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }
    return {f"blocks.*.{name}": style for name, style in each.items()} | ends


def of_embeddings() -> dict[str, Any]:
    return {
        "columns": ColwiseParallel(output_layouts=Replicate()),
        "rows": RowwiseParallel(input_layouts=Replicate()),
        "mix": ColwiseParallel(output_layouts=Replicate()),
        "out": RowwiseParallel(input_layouts=Replicate()),
    }


UP, DOWN = {"up": ColwiseParallel()}, {"down": RowwiseParallel()}

CASES: dict[str, tuple[int, Any, Any]] = {
    "perceptron": (2, perceptron, of_perceptron),
    "embeddings": (2, embeddings, of_embeddings),
    "llama": (2, partial(llama, layers=2), of_llama),
    "llama, cut sequences": (2, llama, of_sequences),
    "deeper llama, cut sequences": (2, partial(llama, layers=2), of_sequences),
    "llama, fully sharded": (4, llama, of_llama),
}
"""How many processes (4: in two dims), the model, and its plan."""


def parallel(model: Any, plan: Mapping[str, Any], world: int) -> slice:
    """The model is sliced, on four processes sharded over pairs as well; of 6 samples, those of this process."""
    if world == 2:
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        return slice(None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("samples", "slices"))
    parallelize_module(model, mesh["slices"], plan)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["samples"])
    fully_shard(model, mesh=mesh["samples"])
    return (slice(0, 4), slice(4, 6))[mesh.get_local_rank("samples")]


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == expected.shape
    return float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def transformed(model: nn.Module, loss_fn: Any, quantities: Any, backend: str = "eager") -> Any:
    return psg_fx.transform(model, loss_fn, quantities=quantities, backend=backend, progress=False)
