"""Batches without samples, which DP-SGD draws, too, and of which functions that collate samples do not know."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from psg_fx.generators import generators_kept


class Collate:
    """What a loader collates samples by, and what it gives for none."""

    def __init__(self, of_samples: Callable[[list[Any]], Any], of_none: Any) -> None:
        self.of_samples, self.of_none = of_samples, of_none

    def __call__(self, samples: list[Any]) -> Any:
        return self.of_samples(samples) if samples else pytree.tree_map(_fresh, self.of_none)


def show_empty(loader: DataLoader[Any]) -> bool:
    """Let the loader collate an empty batch whose samples are left out where they lie, and that keeps what all samples
    share.  False where the function does not show what that is: then Opacus makes one, of no entries in the first dim,
    in the form of the first batch that it has seen, which may be empty itself.
    """
    collate = loader.collate_fn
    if isinstance(collate, Collate):
        return True
    with contextlib.suppress(Exception), generators_kept():
        sample = loader.dataset[0]
        two, three = (collate([copy.deepcopy(sample) for _ in range(count)]) for count in (2, 3))
        loader.collate_fn = Collate(collate, _without_samples(two, three))
        return True
    if getattr(collate, "first_batch", collate) is None:
        with contextlib.suppress(LookupError), generators_kept():  # a data set by keys has none of this number
            collate([loader.dataset[0]])
    return False


def _without_samples(two: Any, three: Any) -> Any:
    """The batch of no samples, from batches of two and of three alike ones: a dim whose size differs is of samples."""
    leaves, form = pytree.tree_flatten(two)
    others, same_form = pytree.tree_flatten(three)
    if form != same_form:
        raise ValueError("the form depends on the number of samples")
    pairs = [*zip(leaves, others, strict=True)]
    if all(leaf.shape == other.shape for leaf, other in pairs if isinstance(leaf, torch.Tensor)):
        raise ValueError("no size depends on the number of samples")
    found = [_left_out(leaf, other) for leaf, other in pairs]
    return pytree.tree_unflatten(found, form)


def _left_out(leaf: Any, other: Any) -> Any:
    """Zeros in place of what is shared, too: nothing of a batch without samples may tell of one."""
    if isinstance(leaf, torch.Tensor):
        sizes = zip(leaf.shape, other.shape, strict=True)
        return leaf.new_zeros([size if size == of_three else 0 for size, of_three in sizes])
    if isinstance(leaf, (int, float, str, type(None))) and leaf == other:
        return leaf
    raise ValueError("what it is of no samples is not known")


def _fresh(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
