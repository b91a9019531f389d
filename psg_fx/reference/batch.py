"""A batch taken apart into its samples, by the definition of `batch_dim`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from psg_fx.errors import BadArgument
from psg_fx.plain_objects import looked_into

_CALL = "step(inputs, targets)"


@dataclass(frozen=True)
class Batch:
    """A batch taken apart: the leaves of `(inputs, targets)`, the sample dim of each (None: shared; any of a packed
    sequence), and B.
    """

    leaves: tuple[Any, ...]
    dims: tuple[int | None, ...]
    spec: TreeSpec
    size: int

    @classmethod
    def of(cls, inputs: Any, targets: Any, batch_dim: Any = 0) -> Batch:
        """Finds each tensor's sample dim from `batch_dim`: an int, or a prefix `(inputs_dims, targets_dims)`."""
        whole = batch_dim if isinstance(batch_dim, (tuple, list)) else (batch_dim, batch_dim)
        if len(whole) != 2:
            raise _misfit(f"batch_dim has {len(whole)} parts", "pass an int or (inputs_dims, targets_dims)")
        inputs, targets = as_tree(inputs), as_tree(targets)
        leaves, spec = tree_flatten((inputs, targets), is_leaf=is_packed)
        said = [*spread(whole[0], inputs, "inputs"), *spread(whole[1], targets, "targets")]
        if any(map(is_rows, said)):
            raise _misfit("samples are rows, which lie anywhere", "give the samples a dim of their own")
        carries = [isinstance(leaf, Tensor) or is_packed(leaf) for leaf in leaves]
        dims = [dim if holds else None for holds, dim in zip(carries, said, strict=True)]
        sizes = {_size(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
        if len(sizes) != 1:
            found = "no tensor carries samples" if not sizes else f"the tensors have {sorted(sizes)} samples"
            raise _misfit(found, "let batch_dim name the sample dim of each tensor, None for those that are shared")
        return cls(tuple(leaves), tuple(dims), spec, sizes.pop())

    def tree(self, leaves: Sequence[Any] | None = None) -> tuple[Any, Any]:
        """`(inputs, targets)` made of `leaves`, by default the batch's own."""
        inputs, targets = tree_unflatten(list(self.leaves if leaves is None else leaves), self.spec)
        return inputs, targets

    def sample(self, i: int) -> tuple[Any, Any]:
        """`(inputs, targets)` of sample i alone, as a batch of one."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return self.tree([leaf if dim is None else _one(leaf, dim, i) for leaf, dim in pairs])

    def to(self, dtype: torch.dtype | None) -> Batch:
        """The batch with its floating-point tensors in `dtype` (None: as they are)."""
        return replace(self, leaves=tuple(cast(leaf, dtype) for leaf in self.leaves))


def as_tree(value: Any) -> Any:
    """Mappings of other classes (a tokenizer's output) are no trees, nor are objects that hold tensors."""
    return looked_into(dict(value) if isinstance(value, Mapping) else value)


def _misfit(why: str, fix: str) -> BadArgument:
    return BadArgument("batch_dim does not fit the batch", where=_CALL, why=why, fix=fix)


def cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    """A floating-point tensor or packed sequence in `dtype`; anything else, and all for None, as it is."""
    if isinstance(leaf, Tensor) and leaf.is_inference() and not torch.is_inference_mode_enabled():
        leaf = leaf.clone()  # autograd keeps none of that mode
    values = leaf.data if is_packed(leaf) else leaf
    floating = isinstance(values, Tensor) and values.is_floating_point()
    return leaf.to(dtype) if dtype is not None and floating else leaf


def is_packed(leaf: Any) -> TypeGuard[PackedSequence]:
    """Whether it is a packed sequence, which is a tuple, too."""
    return isinstance(leaf, PackedSequence)


def _one(leaf: Any, dim: int, i: int) -> Any:
    """Sample i of a tensor, or its own steps in a packed sequence."""
    if not is_packed(leaf):
        return leaf.narrow(dim, i, 1)
    padded, lengths = pad_packed_sequence(leaf)
    return pack_padded_sequence(padded[: lengths[i], i : i + 1], lengths[i : i + 1])


def _size(leaf: Any, dim: int) -> int:
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])
    if not -leaf.dim() <= dim < leaf.dim():
        raise _misfit(f"a tensor of shape {tuple(leaf.shape)} has no dim {dim}", "give None for what samples share")
    return int(leaf.shape[dim])


def is_rows(dim: Any) -> bool:
    """Whether it is a `psg_fx.Rows`."""
    return hasattr(dim, "ids")


def has_rows(batch_dim: Any) -> bool:
    """Whether rows are among what says where the samples lie."""
    return any(map(is_rows, tree_leaves(batch_dim)))


def spread(dims: Any, tree: Any, where: str) -> Iterator[Any]:
    """One dim per leaf of `tree` from the prefix `dims`."""
    if dims is None or isinstance(dims, int) or is_rows(dims):
        yield from (dims for _ in tree_flatten(tree, is_leaf=is_packed)[0])
    elif isinstance(dims, Mapping) and isinstance(tree, Mapping) and set(dims) == set(tree):
        for key, part in tree.items():
            yield from spread(dims[key], part, f"{where}[{key!r}]")
    elif isinstance(dims, (tuple, list)) and isinstance(tree, (tuple, list)) and len(dims) == len(tree):
        for k, (sub, part) in enumerate(zip(dims, tree, strict=True)):
            yield from spread(sub, part, f"{where}[{k}]")
    elif isinstance(dims, (tuple, list)) and isinstance(tree, Tensor) and len(dims) == 1:  # the only argument
        yield from spread(dims[0], tree, where)
    else:
        raise _misfit(f"{where} is a {type(tree).__name__}, its batch_dim is {dims!r}", "give it the same structure")
