"""`flex_attention` while a model is captured: the formula that it stands for, in ops that say where the samples are.

Torch's own is a higher-order op, compiled by itself, whose backward no CPU has.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flexible
from torch.overrides import TorchFunctionMode

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import users_line
from psg_fx.torch_private.modes import indexing_by_places
from psg_fx.torch_private.patching import code_replaced_here, patched_here

Mod = Callable[..., Tensor]


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """softmax(m(s(Q Kᵀ c, ..), ..)) V with s = score_mod, and -∞ where the mask is False (Dong et al. 2024,
    arXiv:2412.05496); 0 where all keys are masked.

    query `[B, H, L, E]`, key `[B, H', S, E]`, value `[B, H', S, E']` -> `[B, H, L, E']`; scores are in float32 at
    least.  The kernels' options and the blocks of a mask change no value.
    """
    _check(query, key, block_mask, enable_gqa)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    if score_mod is not None:
        scores = _of_places(score_mod, (0,))(scores, *places).to(wide)
    if block_mask is not None:
        scores = torch.where(_of_places(block_mask.mask_mod, ())(*places), scores, -math.inf)
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ value.to(query.dtype)
    if return_aux is not None:
        lse = scores.logsumexp(-1) if return_aux.lse else None
        return out, flexible.AuxOutput(lse, scores.amax(-1) if return_aux.max_scores else None)
    return (out, scores.logsumexp(-1)) if return_lse else out


def _of_places(mod: Mod, first: tuple[int, ...]) -> Mod:
    """The function of one score and its place (sample, head, query, key), for all of them."""
    for own in range(3, -1, -1):
        mod = torch.vmap(mod, in_dims=(*first, *(0 if k == own else None for k in range(4))))

    def run(*arguments: Tensor) -> Tensor:
        with _ByPlace():
            return mod(*arguments)

    return run


class _ByPlace(TorchFunctionMode):
    """`x[i, j]` with places that are tensors, which torch would read as numbers, is an op on all of them."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            x, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            like = next((place for place in places if isinstance(place, Tensor)), None)
            if like is not None and all(isinstance(place, (Tensor, int)) for place in places):
                given = [p if isinstance(p, Tensor) else torch.full_like(like, p) for p in places]
                return torch.ops.aten.index(x, given)
        return func(*args, **(kwargs or {}))


class _Mask(flexible.BlockMask):
    """A mask by its function alone: which blocks of it are empty says a value, and changes none."""

    def __init__(self, mask_mod: Mod, size: tuple[int, ...]) -> None:
        self.mask_mod, self.size = mask_mod, size

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples, heads, queries, keys."""
        return self.size

    def to(self, device: Any) -> _Mask:
        """The mask itself: it holds no tensor."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in flexible.BlockMask.__annotations__:
            raise AttributeError(name)
        raise NotYetSupported(
            f"the code reads {name} of a BlockMask that it has made", where=users_line(sys._getframe(1)),
            why="a mask is captured by its function, without the blocks that are empty on some values",
            fix="make the mask outside of the model, or compute with its mask_mod",
        )  # fmt: skip


def create_block_mask(
    mask_mod: Mod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, *_: Any, **__: Any
) -> flexible.BlockMask:
    """A mask that knows its function and its shape."""
    return _Mask(mask_mod, (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN))


@contextlib.contextmanager
def attention_as_formula() -> Iterator[None]:
    """While open, `flex_attention` in this thread is what is written here, also inside `torch.compile`; and the mode of
    torch in which other code makes such masks by `vmap` records plain ops.
    """
    with (
        patched_here(indexing_by_places(), "__torch_function__", _ByPlace.__torch_function__),
        code_replaced_here(flexible.flex_attention, lambda _: flex_attention),
        code_replaced_here(flexible.create_block_mask, lambda _: create_block_mask),
    ):
        yield


def _check(query: Tensor, key: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise NotImplementedError("flex_attention: query, key and value have 4 dims")
    heads, own = query.shape[1], key.shape[1]
    if heads % own if enable_gqa else heads != own:
        raise ValueError(f"flex_attention: {heads} heads of queries and {own} of keys (enable_gqa={enable_gqa})")
    if block_mask is not None and tuple(block_mask.shape[-2:]) != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"flex_attention: the mask is for {tuple(block_mask.shape[-2:])} queries and keys, and there are "
            f"{(query.shape[-2], key.shape[-2])}"
        )
