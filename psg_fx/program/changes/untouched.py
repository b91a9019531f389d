"""What code leaves at a model's tensors while it is captured: refused, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from psg_fx.errors import NotYetSupported


@dataclass(frozen=True)
class _Tensor:
    """A parameter or buffer, its `.grad`, and the attributes that Python keeps for it."""

    name: str
    value: torch.Tensor
    grad: torch.Tensor | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    def put_back(self) -> str:
        """Where it is changed, "" if it is not."""
        found = ""
        if self.value.is_leaf and self.value.grad is not self.grad:
            self.value.grad, found = self.grad, f"{self.name}.grad"
        held = vars(self.value)
        for key in {*held, *self.attributes}:
            if key in held and key in self.attributes and held[key] is self.attributes[key]:
                continue
            if key in self.attributes:
                held[key] = self.attributes[key]
            else:
                del held[key]
            found = f"{self.name}.{key}"
        return found


@contextlib.contextmanager
def untouched(*roots: Any) -> Iterator[None]:
    """Gradients and attributes of the modules' tensors are afterwards what they were.

    Raises:
        NotYetSupported: the code that ran meanwhile has changed some, such as a custom backward that adds to `.grad`
            of a parameter in place of returning its gradient.
    """
    named = {
        id(t): (name, t)
        for root in roots
        if isinstance(root, nn.Module)
        for name, t in (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    }
    before = [_Tensor(name, t, t.grad if t.is_leaf else None, dict(vars(t))) for name, t in named.values()]
    changed: list[str] = []
    try:
        yield
    finally:
        changed += filter(None, [tensor.put_back() for tensor in before])
    if changed:
        raise NotYetSupported(
            f"the code writes to {changed[0]}", where=changed[0],
            why="a graph runs no Python, so this would happen once, while the model is captured; what a backward "
            "leaves there would be in no sample's gradient",
            fix="let a custom function take the parameter as an argument and return its gradient",
        )  # fmt: skip
