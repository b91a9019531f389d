"""The op that `torch.autograd.grad` in the code of a model or loss is, until its backward pass is written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psg_fx.torch_private.modes import below_autograd

_LIBRARY = torch.library.Library("psg_fx", "FRAGMENT")
_LIBRARY.define("own_gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds) -> Tensor[]")


def _shapes(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(i) for i in inputs]


def _under_autograd(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> Any:
    """The gradients themselves, which have gradients, where there is a way from inputs to outputs."""
    if all(o.requires_grad for o in outputs):
        return list(torch.autograd.grad(outputs, inputs, seeds, retain_graph=True, create_graph=True))
    with below_autograd():
        return own_gradient(outputs, inputs, seeds)


def _under_vmap(
    info: Any, dims: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """Of inputs that have slices all at once, since a slice of an output depends on its own; of others one by one."""
    of_outputs, of_inputs, of_seeds = dims
    pairs = list(zip(outputs, of_outputs, seeds, of_seeds, strict=True))
    found: dict[int, Tensor] = {}
    if sliced := [k for k, dim in enumerate(of_inputs) if dim is not None]:
        heads = [(o, _in_slices(s, ds, o, do)) for o, do, s, ds in pairs if do is not None]
        made = own_gradient([o for o, _ in heads], [inputs[k] for k in sliced], [s for _, s in heads])
        found |= zip(sliced, made, strict=True)
    if shared := [k for k, dim in enumerate(of_inputs) if dim is None]:
        each = []
        for n in range(info.batch_size):
            heads = [(_slice(o, do, n), _slice(s, ds, n)) for o, do, s, ds in pairs]
            each.append(own_gradient([o for o, _ in heads], [inputs[k] for k in shared], [s for _, s in heads]))
        found |= {k: torch.stack(slices) for k, *slices in zip(shared, *each, strict=True)}
    return [found[k] for k in range(len(inputs))], [dim or 0 for dim in of_inputs]


def _in_slices(seed: Tensor, dim: int | None, output: Tensor, of_output: int) -> Tensor:
    return (seed.unsqueeze(of_output) if dim is None else seed.movedim(dim, of_output)).expand_as(output)


def _slice(tensor: Tensor, dim: int | None, n: int) -> Tensor:
    return tensor if dim is None else tensor.select(dim, n)


torch.library.register_fake("psg_fx::own_gradient", _shapes, lib=_LIBRARY)
torch.library.register_vmap("psg_fx::own_gradient", _under_vmap, lib=_LIBRARY)
_LIBRARY.impl("own_gradient", _under_autograd, "Autograd")
own_gradient: Any = torch.ops.psg_fx.own_gradient.default
