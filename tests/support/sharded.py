"""Models, ways to cut them by `fully_shard`, and the samples of each process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_activations
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import psg_fx
from psg_fx import zoo

SUMS = ("clipped_sum", "weighted_sum", "mean_grad", "second_moment")
QUANTITIES = (
    psg_fx.ClippedSum(max_norm=0.3), psg_fx.WeightedSum(), psg_fx.MeanGrad(), psg_fx.SecondMoment(centered=True),
)  # fmt: skip


class Tied(nn.Module):
    """A tied embedding and head, a layer used twice, a frozen layer, and odd sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.frozen, self.few = nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inner(self.norm(self.inner(self.embedding(ids))).tanh())
        h = self.frozen(h) + F.pad(self.few(h), (0, 5))
        return h @ self.embedding.weight.T


def tied() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """The model, a loss, and a batch of 7."""
    ids = torch.randint(11, (7, 5))
    return Tied(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), ids, torch.randint(11, (7, 5))


def gpt() -> tuple[nn.Module, Any, Tensor, Tensor]:
    ex = zoo.example("gpt", batch=7, layers=1, width=16, heads=2, tokens=6, vocabulary=20)
    return ex.model, ex.loss_fn, ex.inputs, ex.targets


class Blocks(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.head(x)
        return out


def small() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """For what does not depend on the layers."""
    return Blocks(), F.cross_entropy, torch.randn(7, 6), torch.randint(3, (7,))


def by_blocks(model: Any, **options: Any) -> None:
    """As it is usually done: every block, then the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def together(model: Any, **options: Any) -> None:
    """Some modules share one message, and the root another."""
    fully_shard([model.norm, model.few], **options)
    fully_shard(model, **options)


def without_one(model: Any, **options: Any) -> None:
    """A parameter stays whole in every process."""
    fully_shard(model, ignored_params={model.norm.weight}, **options)


def parts_only(model: Any, **options: Any) -> None:
    """The root's own parameters stay whole."""
    fully_shard(model.inner, **options)
    fully_shard(model.few, **options)


def along_columns(model: Any, **options: Any) -> None:
    """Cut along the second dim where the mesh divides it."""
    size = dist.get_world_size()

    def placement(p: Tensor) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % size == 0 else None

    fully_shard(model, shard_placement_fn=placement, **options)


def checkpointed(model: Any, **options: Any) -> None:
    """With torch's hooks for activation checkpointing beside those of fully_shard."""
    checkpoint_activations(model.inner)
    fully_shard(model.inner, **options)
    fully_shard(model, **options)


def hybrid(shard: Callable[..., None], model: Any, **options: Any) -> None:
    """Sharded over pairs of processes, replicated over the pairs."""
    shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")), **options)


CASES: dict[str, tuple[int, Any, Any]] = {
    "gpt by blocks": (2, gpt, by_blocks),
    "kept after forward": (2, tied, partial(parts_only, reshard_after_forward=False)),
    "along columns": (2, tied, along_columns),
    "one parameter whole": (2, tied, without_one),
    "checkpointed": (2, tied, checkpointed),
    "tied and odd": (4, tied, fully_shard),
    "modules together": (4, tied, together),
    "parts only": (4, tied, parts_only),
    "hybrid": (4, tied, partial(hybrid, fully_shard)),
    "hybrid, along columns": (4, small, partial(hybrid, along_columns)),
    "hybrid, tied along columns": (4, tied, partial(hybrid, along_columns)),
}
"""How many processes, the model, and how it is sharded."""
LEFT = {
    "along columns",
    "kept after forward",
    "parts only",
    "modules together",
    "hybrid",
    "tied and odd",
    "hybrid, tied along columns",
    "one parameter whole",
    "checkpointed",
}
"""What the other cases are made of, or the tests below: for `make test-all`."""


def share(rank: int, world: int) -> slice:
    """Of 7 samples: the first process has more than others, and of 4 the third has none."""
    bounds = {1: (0, 7), 2: (0, 5, 7), 4: (0, 4, 6, 6, 7)}[world]
    return slice(bounds[rank], bounds[rank + 1])


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == expected.shape
    return float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def transformed(model: nn.Module, loss_fn: Any, quantities: Any = QUANTITIES) -> Any:
    return psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager", progress=False)
