"""Packed sequences of `nn.utils.rnn`, as they are here: padded, with the lengths of their samples.

Torch packs the steps of all samples into one dim, in an order that depends on their lengths.  A `Kept` is a
`PackedSequence` to whoever asks, and holds samples in dims of their own.  Arguments of a call that are packed are taken
apart as such (`padded`), and are torch's again (`packed`) where the user's code runs outside of a capture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import users_line


class Kept(PackedSequence):
    """A packed sequence that is still padded: `[T, B, ..]`, and of how many steps each sample is, `[B]`.

    What torch's has beside, in its own order, is refused by name.
    """

    padded: Tensor
    lengths: Tensor

    def __new__(cls, padded: Tensor, lengths: Tensor) -> Kept:
        """Both in the order of the batch; lengths: int64."""
        made = tuple.__new__(cls, (None,) * 4)
        made.padded, made.lengths = padded, lengths
        return made

    def to(self, *args: Any, **named: Any) -> Kept:
        """The values as of another dtype or device."""
        return Kept(self.padded.to(*args, **named), self.lengths)

    def __iter__(self) -> Iterator[Any]:
        raise inside("taken apart")

    def __getitem__(self, key: Any) -> Any:
        raise inside("indexed")


def inside(what: str) -> NotYetSupported:
    """The refusal of what lies in the order of the lengths.  Called where the user's code asks for it."""
    return NotYetSupported(
        f"a packed sequence is {what}", where=users_line(sys._getframe(1)),
        why="there the steps of all samples lie in one dim, in an order that depends on their lengths",
        fix="do it before pack_padded_sequence; or after pad_packed_sequence(.., total_length=T), and mask what is "
        "beyond the lengths",
    )  # fmt: skip


def _refused(name: str) -> property:
    def read(_: Kept) -> Any:
        raise inside(f"asked for .{name}")

    return property(read)


Kept.__name__ = PackedSequence.__name__  # what messages call it
for _name in ("data", "batch_sizes", "sorted_indices", "unsorted_indices", "is_cuda"):
    setattr(Kept, _name, _refused(_name))


# --- arguments of a call ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member(pytree.MappingKey[str, Tensor]):
    """The path to a member of a `Pair`, and in which dim its samples lie."""

    samples: int

    def dim(self, said: Any) -> int:
        """That dim, which the type of the argument says.  said: its batch_dim, any int."""
        if isinstance(said, int):
            return self.samples
        raise NotYetSupported(
            f"a PackedSequence has batch_dim {said!r}", where="transform(batch_dim=...)",
            why="it holds a sequence of each sample" if said is None else "it says itself whose each step is",
            fix="batch_dim=0 for it; what all samples share is a tensor",
        )  # fmt: skip


_MEMBERS = Member("padded", 1), Member("lengths", 0)


@dataclass(frozen=True)
class Pair:
    """What a packed argument is while it is taken apart: a node of a pytree, which is a `Kept` when it is put together.

    (torch's pytrees take any named tuple, as a `Kept` is one, for its members.)
    """

    padded: Tensor
    lengths: Tensor


pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.padded, pair.lengths], None),
    lambda children, _: Kept(*children),
    serialized_type_name="psg_fx.PackedSequence",
    flatten_with_keys_fn=lambda pair: (list(zip(_MEMBERS, (pair.padded, pair.lengths), strict=True)), None),
)


def is_packed(value: Any) -> bool:
    """Whether it is a packed sequence, torch's or one kept padded."""
    return isinstance(value, PackedSequence)


def padded(structure: Any) -> Any:
    """A pytree with a `Pair` for each packed sequence: to its longest length, in the order of the batch.

    No device is waited for but where torch's `pad_packed_sequence` does, to bring lengths in order.
    """

    def pair(leaf: Any) -> Any:
        if isinstance(leaf, Kept):  # a part of a batch
            return Pair(leaf.padded, leaf.lengths)
        return Pair(*rnn.pad_packed_sequence(leaf)) if is_packed(leaf) else leaf

    if not any(map(is_packed, pytree.tree_leaves(structure, is_leaf=is_packed))):
        return structure
    return pytree.tree_map(pair, structure, is_leaf=is_packed)


def kept_in(structure: Any) -> list[Kept]:
    """The packed sequences of a pytree that are kept padded."""
    return [leaf for leaf in pytree.tree_leaves(structure, is_leaf=is_packed) if isinstance(leaf, Kept)]


def packed(structure: Any) -> Any:
    """A pytree with torch's packed sequences in the places of those kept padded: each sample is of its own length."""

    def packed_again(leaf: Any) -> Any:
        if not isinstance(leaf, Kept):
            return leaf
        return rnn.pack_padded_sequence(leaf.padded, leaf.lengths.cpu(), enforce_sorted=False)

    return pytree.tree_map(packed_again, structure, is_leaf=is_packed)
