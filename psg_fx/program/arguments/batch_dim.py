"""`batch_dim`: an int or a prefix of the arguments' structure -> the sample dim of every leaf."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.plain_objects import Given
from psg_fx.program.arguments.packed import Pair
from psg_fx.program.arguments.rows import Rows

BatchDim = Any
"""An int, None or `Rows`, or a prefix pytree of those."""


def dims_of(structure: Any, batch_dim: BatchDim, count: int) -> list[Any]:
    """The dim of every leaf, from an int or a prefix pytree."""
    if _is_leaf(batch_dim):
        return [batch_dim] * count
    (args, kwargs), (targets, target_kwargs) = structure
    has_targets = bool(targets or target_kwargs)
    if isinstance(batch_dim, (tuple, list)) and len(batch_dim) == 2:
        inputs_dims, targets_dims = batch_dim
    elif not has_targets:
        inputs_dims, targets_dims = batch_dim, None
    else:
        raise _bad_prefix(batch_dim, "it is neither an int nor a pair (inputs_dims, targets_dims)")
    return (
        _side(args, kwargs, inputs_dims, batch_dim)
        + _side(targets, target_kwargs, targets_dims, batch_dim)
    )  # fmt: skip


def _is_leaf(dim: Any) -> bool:
    return dim is None or isinstance(dim, (int, Rows))


def _side(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any, whole: Any) -> list[Any]:
    """Dims for positional and keyword values; a tuple goes with positions, a dict with names."""
    if _is_leaf(dims):
        return [dims] * len(pytree.tree_leaves((args, kwargs)))
    if isinstance(dims, dict):
        pairs = [(value, _get(dims, key, whole)) for key, value in kwargs.items()]
        if args:
            raise _bad_prefix(whole, "it names keyword arguments, and the inputs are positional")
    elif not isinstance(dims, (tuple, list)):
        raise _bad_prefix(whole, f"{dims!r} is no dim")
    else:
        named = [dims[-1]] if kwargs and len(dims) == len(args) + 1 and isinstance(dims[-1], dict) else []
        if len(dims) != len(args) + bool(kwargs) or len(named) != bool(kwargs):
            raise _bad_prefix(whole, _too_many(dims, args, kwargs), (*[0] * len(args), dict.fromkeys(kwargs)))
        pairs = list(zip(args, dims, strict=False))
        pairs += [(value, _get(each, key, whole)) for each in named for key, value in kwargs.items()]
    found: list[Any] = []
    for value, prefix in pairs:
        found += _expand(value, prefix, whole)
    return found


def _too_many(dims: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = f"{len(args)} positional argument{'s' * (len(args) != 1)}"
    given += f" and the keyword{'s' * (len(kwargs) != 1)} {', '.join(kwargs)}" if kwargs else ""
    return f"it has {len(dims)} {'entry' if len(dims) == 1 else 'entries'} for {given}"


def _get(dims: dict[str, Any], key: str, whole: Any) -> Any:
    if key not in dims:
        raise _bad_prefix(whole, f"it has no entry for {key!r}")
    return dims[key]


def _expand(value: Any, prefix: Any, whole: Any) -> list[Any]:
    if _is_leaf(prefix):
        return [prefix] * len(pytree.tree_leaves(value))
    if isinstance(value, Pair):
        raise _bad_prefix(whole, "it has several entries for a PackedSequence, which needs one")
    value = value.parts if isinstance(value, Given) else value
    if not isinstance(prefix, (tuple, list, dict)):
        raise _bad_prefix(whole, f"{prefix!r} is no dim")
    if not isinstance(value, (tuple, list, dict)) or (isinstance(value, dict) and not isinstance(prefix, dict)):
        raise _bad_prefix(whole, f"it has {prefix!r} for a {type(value).__name__}")
    parts: Any = prefix
    children = list(value.values()) if isinstance(value, dict) else list(value)
    prefixes = [_get(parts, k, whole) for k in value] if isinstance(value, dict) else list(parts)
    if len(children) != len(prefixes):
        raise _bad_prefix(whole, "its structure does not match the arguments")
    return [dim for child, p in zip(children, prefixes, strict=True) for dim in _expand(child, p, whole)]


def _bad_prefix(batch_dim: Any, why: str, like: tuple[Any, ...] = ()) -> BadArgument:
    named = f"; of a call with keywords, their dims come last: {like}" if like and like[-1] else ""
    return BadArgument(
        f"batch_dim={batch_dim!r} does not fit the arguments", where="transform(batch_dim=...)", why=why,
        fix="give one int for everything, or (inputs_dims, targets_dims), each an int, None, or ints and Nones "
        "arranged like the arguments" + named,
    )  # fmt: skip
