"""A second opinion: `torch.func.vmap(grad_and_value)` over the samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.errors import NotYetSupported
from psg_fx.reference.batch import Batch, has_rows, is_packed
from psg_fx.reference.definitions import ByName
from psg_fx.reference.loop import Loss, WithLoss, tracked
from psg_fx.reference.state import called_with


def vmap_step(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    batch_dim: Any = 0,
    params: Sequence[str] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Callable[[], tuple[ByName, Tensor]]:
    """`vmap(grad_and_value)` of the model on this batch: a function of nothing -> (gradients, losses).

    values: name -> what stands for the parameter of that name, if not its own.
    """
    if has_rows(batch_dim):
        raise NotYetSupported(
            "vmap does not take samples that are rows", where="torch.func.vmap", why="no dim holds the samples",
            fix="the loop over samples does",
        )  # fmt: skip
    batch = Batch.of(inputs, targets, batch_dim)
    if any(map(is_packed, batch.leaves)):
        raise NotYetSupported(
            "vmap does not take packed sequences", where="torch.func.vmap", why="no dim of theirs holds the samples",
            fix="the loop over samples does",
        )  # fmt: skip
    places = {k: d for k, d in enumerate(batch.dims) if d is not None}
    weights = {f"model.{name}": p.detach() for name, p in (values or tracked(model, params)).items()}
    program = WithLoss(model, loss_fn)

    def sample_loss(named: dict[str, Tensor], *sample: Tensor) -> Tensor:
        leaves = list(batch.leaves)
        for (k, dim), part in zip(places.items(), sample, strict=True):
            leaves[k] = part.unsqueeze(dim)
        loss: Tensor = called_with(program, named, batch.tree(leaves))
        return loss.reshape(())

    each = torch.func.grad_and_value(sample_loss)
    step = torch.func.vmap(each, in_dims=(None, *places.values()), randomness="different")
    samples = [batch.leaves[k] for k in places]

    def run() -> tuple[ByName, Tensor]:
        grads, losses = step(weights, *samples)
        return {name.removeprefix("model."): g for name, g in grads.items()}, losses

    return run


def vmap_reference(*problem: Any, **options: Any) -> tuple[Tensor, ByName]:
    """Losses `[B]` and gradients by `vmap_step(*problem, **options)`, in the model's own dtype; raises what vmap
    raises.
    """
    run = vmap_step(*problem, **options)
    with quiet_vmap():
        grads, losses = run()
    return losses.detach(), {name: g.detach() for name, g in grads.items()}


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Drops vmap's warning that it loops over an op without a batching rule: slow is what a reference may be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        yield
