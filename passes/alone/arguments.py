"""What two calls of torch are given that should do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from psg_fx.graph import facts
from psg_fx.torch_private.modes import is_transformed

from .runs import WithoutDropout, undisturbed

Same = Callable[[Tensor, Tensor], bool]


@dataclass(frozen=True)
class Kind:
    """A tensor without its values.  throughout: the one number that it holds; None for several, or a single one."""

    like: Tensor
    throughout: float | None

    @property
    def shape(self) -> torch.Size:
        """As the tensor's."""
        return self.like.shape


@dataclass(frozen=True)
class Arguments:
    """A function and what it is given; of tensors with gradients their kind."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def tensors(self) -> list[Kind | Tensor]:
        """All of them, in their order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, (Kind, Tensor))]

    @property
    def shapes(self) -> list[torch.Size]:
        """Of all tensors."""
        return [tensor.shape for tensor in self.tensors]

    @property
    def numbers(self) -> list[Any]:
        """Those of Python."""
        return [leaf for leaf in self.leaves if isinstance(leaf, (int, float, complex))]

    def called(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the function gives, of these tensors."""
        rest = iter(tensors)
        leaves = [next(rest).clone() if isinstance(leaf, (Kind, Tensor)) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with undisturbed(tensors), WithoutDropout():
            found = self.function(*args, **kwargs)
        return [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
    """None for tensors that torch.func wraps."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if any(isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or is_transformed(leaf)) for leaf in leaves):
        return None
    return Arguments(function, tuple(_noted(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure)


def _noted(tensor: Tensor) -> Tensor | Kind:
    tensor = tensor.detach()
    if not facts.is_differentiable(tensor):
        return tensor.clone()
    return Kind(tensor.new_empty(tensor.shape, device="meta"), _throughout(tensor))


def _throughout(tensor: Tensor) -> float | None:
    if tensor.numel() < 2 or tensor.is_complex():
        return None
    first = tensor[(0,) * tensor.dim()]
    return first.item() if first == tensor[(-1,) * tensor.dim()] and bool((tensor == first).all()) else None


def other_numbers(here: Arguments, there: Arguments) -> bool:
    """Whether tensors of the same shapes meet other numbers of Python, such as sizes."""
    return here.shapes == there.shapes and here.numbers != there.numbers


def differ_at_random(here: Arguments, there: Arguments, same: Same, device: torch.device) -> bool:
    """Whether two calls give something else of random numbers, where a tensor that has another shape there holds one
    number throughout, of which neither shows what it does: a mask in front may have made it so.
    """
    same_count = len(here.tensors) == len(there.tensors)
    pairs = list(zip(here.tensors, there.tensors, strict=True)) if same_count else []
    if not any(a.shape != b.shape and _number_throughout(a) is not None for a, b in pairs):
        return False
    generator = torch.Generator().manual_seed(0)
    drawn = [_drawn(a, b, device, generator) for a, b in pairs]
    try:
        found, expected = (args.called([pair[i] for pair in drawn]) for i, args in enumerate((here, there)))
    except Exception:  # numbers that are not in its domain
        return False
    return len(found) != len(expected) or not all(map(same, found, expected))


def _number_throughout(tensor: Kind | Tensor) -> float | None:
    return tensor.throughout if isinstance(tensor, Kind) else _throughout(tensor)


def _drawn(
    here: Kind | Tensor, there: Kind | Tensor, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The same random numbers in both shapes: one of the other's elements, or with a padding behind it.  Whole numbers
    and masks as they are, unless they are one throughout and differ in shape.
    """
    number = _number_throughout(here)
    if isinstance(here, Tensor) and isinstance(there, Tensor) and (here.shape == there.shape or number is None):
        return here, there
    kind = here.like if isinstance(here, Kind) else here
    numbers = torch.randn(there.shape, generator=generator)
    second = (numbers if kind.is_floating_point() else numbers > 0).to(device, kind.dtype)
    if here.shape.numel() == there.shape.numel():
        return second.reshape(here.shape), second
    first = torch.full(here.shape, number or 0.0, dtype=kind.dtype, device=device)
    first[tuple(map(slice, there.shape))] = second
    return first, second


__all__ = ["Arguments", "arguments_of", "differ_at_random", "other_numbers"]
