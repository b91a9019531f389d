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


torch.library.register_fake("psg_fx::own_gradient", _shapes, lib=_LIBRARY)
_LIBRARY.impl("own_gradient", _under_autograd, "Autograd")
own_gradient: Any = torch.ops.psg_fx.own_gradient.default
