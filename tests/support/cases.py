"""The rows of the test matrix: one small program for each way in which a parameter can meet the samples.

A row is a function of data and parameters. It becomes a module with those parameters, and a fixed nonlinear loss turns
its output into one number for each sample. A new rule needs a row here, and gets every quantity, tree and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.case import B, Case, Shape, wavy
from support.traps import TRAPS

__all__ = ["CASES", "B", "Case", "wavy"]


# --- linear layers and matrix products ------------------------------------------------------------------------------


def _folded_linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    b, t, i = x.shape
    return F.linear(x.reshape(b * t, i), w, bias).view(b, t, -1)


def _time_major_fold(x: Tensor, w: Tensor) -> Tensor:
    t, b, i = x.shape
    return F.linear(x.reshape(t * b, i), w).view(t, b, -1)


def _folded_addmm(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    b, t, i = x.shape
    return torch.addmm(bias, x.reshape(b * t, i), w).view(b, t, -1)


def _heads(x: Tensor, w: Tensor) -> Tensor:
    """`[T, B, 2, 4]` with the heads folded behind the samples, as nn.MultiheadAttention does."""
    t, b, e = x.shape
    folded = x.reshape(t, b * 2, e // 2).transpose(0, 1)
    return torch.matmul(folded, w).transpose(0, 1).reshape(t, b, -1)


_W = {"weight": (6, 4), "bias": (6,)}

LINEAR = [
    Case("linear/2d", F.linear, params=_W),
    Case("linear/no-bias", F.linear, params={"weight": (6, 4)}, loss="sum"),
    Case("linear/seq", F.linear, x=(B, 5, 4), params=_W),
    Case("linear/two-middle-dims", F.linear, x=(B, 2, 5, 4), params=_W, loss="none"),
    Case("linear/one-in-one-out", F.linear, x=(B, 5, 1), params={"weight": (1, 1), "bias": (1,)}),
    Case("linear/one-position", F.linear, x=(B, 1, 4), params=_W),
    Case("linear/time-major", F.linear, x=(5, B, 4), params=_W, batch_dim=1, out_dim=1),
    Case("linear/samples-last", lambda x, w: F.linear(x.permute(2, 0, 1), w), x=(5, 4, B), params={"w": (6, 4)},
         batch_dim=2),
    Case("linear/folded", _folded_linear, x=(B, 5, 4), params={"w": (6, 4), "bias": (6,)}),
    Case("linear/folded-time-major", _time_major_fold, x=(5, B, 4), params={"w": (6, 4)}, batch_dim=1, out_dim=1),
    Case("linear/bias-only", F.linear, params=_W, frozen=("weight",)),
    Case("linear/frozen-bias", F.linear, params=_W, frozen=("bias",)),
    Case("linear/relu-stack", lambda x, w, v: F.linear(F.linear(x, w).relu(), v), params={"w": (6, 4), "v": (2, 6)}),
    Case("mm/right", lambda x, w: torch.mm(x, w), params={"w": (4, 6)}),
    Case("mm/left", lambda x, w: torch.mm(w, x), x=(4, B), params={"w": (6, 4)}, batch_dim=1, out_dim=1),
    Case("addmm/2d", lambda x, w, bias: torch.addmm(bias, x, w), params={"w": (4, 6), "bias": (6,)}, covers=("addmm",)),
    Case("addmm/alpha-beta", lambda x, w, bias: torch.addmm(bias, x, w, alpha=0.5, beta=2.0),
         params={"w": (4, 6), "bias": (6,)}),
    Case("addmm/folded", _folded_addmm, x=(B, 5, 4), params={"w": (4, 6), "bias": (6,)}),
    Case("addmm/bias-row", lambda x, w, bias: torch.addmm(bias, x, w), params={"w": (4, 6), "bias": (1, 6)}),
    Case("addmm/bias-one", lambda x, w, bias: torch.addmm(bias, x, w), params={"w": (4, 6), "bias": (1,)}),
    Case("addmm/param-left", lambda x, w, bias: torch.addmm(bias, w, x.t()), params={"w": (6, 4), "bias": (6, 1)},
         out_dim=1),
    Case("expand/bmm", lambda x, w: torch.bmm(x, w.expand(x.shape[0], 4, 6)), x=(B, 5, 4), params={"w": (4, 6)}),
    Case("bmm/groups", lambda x, w: torch.bmm(x.transpose(0, 1), w), x=(B, 2, 4), params={"w": (2, 4, 6)}, out_dim=1),
    Case("bmm/groups-left", lambda x, w: torch.bmm(w, x.permute(1, 2, 0)), x=(B, 2, 4), params={"w": (2, 6, 4)},
         out_dim=2),
    Case("baddbmm/groups", lambda x, w, bias: torch.baddbmm(bias, x.transpose(0, 1), w), x=(B, 2, 4),
         params={"w": (2, 4, 6), "bias": (2, 1, 6)}, out_dim=1),
    Case("baddbmm/vector-bias", lambda x, w, bias: torch.baddbmm(bias, x.transpose(0, 1), w, alpha=0.5, beta=3.0),
         x=(B, 2, 4), params={"w": (2, 4, 6), "bias": (6,)}, out_dim=1),
    Case("matmul/right", lambda x, w: x @ w, x=(B, 5, 4), params={"w": (4, 6)}, covers=("matmul",)),
    Case("matmul/left", lambda x, w: w @ x, x=(B, 4, 5), params={"w": (6, 4)}),
    Case("matmul/vector", lambda x, w: x @ w, x=(B, 5, 4), params={"w": (4,)}),
    Case("matmul/vector-2d", lambda x, w: x @ w, params={"w": (4,)}),
    Case("matmul/vector-left", lambda x, w: w @ x, x=(B, 4, 5), params={"w": (4,)}),
    Case("matmul/batched", lambda x, w: x @ w, x=(B, 2, 5, 4), params={"w": (2, 4, 6)}),
    Case("matmul/batched-left", lambda x, w: w @ x, x=(B, 2, 4, 5), params={"w": (2, 6, 4)}),
    Case("matmul/broadcast-one", lambda x, w: x @ w, x=(B, 2, 5, 4), params={"w": (1, 4, 6)}, fallback=("w",)),
    Case("matmul/new-batch-dim", lambda x, w: x.unsqueeze(1) @ w, x=(B, 5, 4),
         params={"w": (2, 4, 6)}, fallback=("w",)),
    Case("matmul/more-param-dims", lambda x, w: x @ w, x=(B, 4), params={"w": (2, 4, 6)}, out_dim=1),
    Case("matmul/heads", _heads, x=(5, B, 8), params={"w": (4, 3)}, batch_dim=1, out_dim=1),
    Case("matmul/outer", lambda x, w: x.unsqueeze(2) @ w, params={"w": (1, 6)}),
    Case("mv/samples", lambda x, w: torch.mv(x, w), params={"w": (4,)}),
    Case("einsum/linear", lambda x, w: torch.einsum("bti,oi->bto", x, w), x=(B, 5, 4), params={"w": (6, 4)},
         covers=("einsum",)),
    Case("einsum/param-first", lambda x, w: torch.einsum("oi,bti->bto", w, x), x=(B, 5, 4), params={"w": (6, 4)}),
    Case("einsum/heads", lambda x, w: torch.einsum("bti,hio->bhto", x, w), x=(B, 5, 4), params={"w": (2, 4, 3)}),
    Case("einsum/groups", lambda x, w: torch.einsum("bgi,goi->bgo", x, w), x=(B, 2, 4), params={"w": (2, 3, 4)}),
    Case("einsum/diagonal", lambda x, w: torch.einsum("bti,i->bti", x, w), x=(B, 5, 4), params={"w": (4,)}),
    Case("einsum/lonely-data-axis", lambda x, w: torch.einsum("bti,oi->bo", x, w), x=(B, 5, 4), params={"w": (6, 4)}),
    Case("einsum/lonely-param-axis", lambda x, w: torch.einsum("bti,oik->bto", x, w), x=(B, 5, 4),
         params={"w": (6, 4, 2)}, fallback=("w",)),
    Case("einsum/split-axes", lambda x, w: torch.einsum("bsiu,oi->bsou", x, w), x=(B, 2, 4, 3), params={"w": (6, 4)}),
    Case("einsum/letters-b-and-t", lambda x, w: torch.einsum("ntb,bc->ntc", x, w), x=(B, 5, 4), params={"w": (4, 6)}),
    Case("einsum/samples-inside", lambda x, w: torch.einsum("tbi,io->otb", x, w), x=(5, B, 4), params={"w": (4, 6)},
         batch_dim=1, out_dim=2),
    Case("einsum/ellipsis", lambda x, w: torch.einsum("...i,oi->...o", x, w), x=(B, 5, 4),
         params={"w": (6, 4)}, fallback=("w",)),
    Case("einsum/implicit", lambda x, w: torch.einsum("bi,ij", x, w), params={"w": (4, 6)}, fallback=("w",)),
    Case("einsum/three", lambda x, w, v: torch.einsum("bi,ij,jk->bk", x, w, v),
         params={"w": (4, 3), "v": (3, 2)}, fallback=("w", "v")),
    Case("einsum/repeated", lambda x, w: torch.einsum("bi,ii->bi", x, w), params={"w": (4, 4)}, fallback=("w",)),
    Case("bilinear", F.bilinear, x=(B, 4), more=((B, 5),), params={"weight": (6, 4, 5), "bias": (6,)}),
    Case("bilinear/seq", lambda x, y, w: F.bilinear(x, y, w), x=(B, 2, 4), more=((B, 2, 5),), params={"w": (3, 4, 5)}),
]  # fmt: skip


# --- convolutions ---------------------------------------------------------------------------------------------------


def _windows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Windows folded behind the samples: `[B, W, C, H, H]` -> `[B*W, C, H, H]`."""
    b, n = x.shape[:2]
    out = F.conv2d(x.reshape(b * n, *x.shape[2:]), w, bias, padding=w.shape[-1] // 2)
    return out.view(b, n, *out.shape[1:])


def _windows_major(x: Tensor, w: Tensor) -> Tensor:
    """Windows folded before the samples: `[W, B, C, H]` -> `[W*B, C, H]`."""
    n, b = x.shape[:2]
    out = F.conv1d(x.reshape(n * b, *x.shape[2:]), w)
    return out.view(n, b, *out.shape[1:])


def _conv(name: str, shape: Shape, weight: Shape, bias: bool = True, **options: Any) -> Case:
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(weight)]
    params = {"weight": weight} | ({"bias": (weight[0],)} if bias else {})
    return Case(f"conv{len(weight) - 2}d/{name}", lambda x, **p: function(x, **p, **options), x=shape, params=params)


def _transposed(name: str, shape: Shape, weight: Shape, bias: bool = True, **options: Any) -> Case:
    function = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[len(weight)]
    params = {"weight": weight} | ({"bias": (weight[1] * options.get("groups", 1),)} if bias else {})
    call = f"conv_transpose{len(weight) - 2}d/{name}"
    return Case(call, lambda x, **p: function(x, **p, **options), x=shape, params=params)


CONVOLUTION = [
    _conv("plain", (B, 2, 8), (3, 2, 3)),
    _conv("stride-padding", (B, 2, 9), (3, 2, 4), stride=2, padding=1),
    _conv("same-even", (B, 2, 8), (3, 2, 4), padding="same"),
    _conv("dilation", (B, 2, 9), (3, 2, 3), dilation=2),
    _conv("groups", (B, 4, 8), (6, 2, 3), groups=2),
    _conv("plain", (B, 2, 6, 6), (3, 2, 3, 3)),
    _conv("no-bias", (B, 2, 6, 6), (3, 2, 3, 3), bias=False),
    _conv("uneven-kernel", (B, 2, 6, 7), (3, 2, 2, 3), padding=(0, 1)),
    _conv("stride-leftover", (B, 2, 8, 7), (3, 2, 3, 3), stride=2),
    _conv("stride-padding", (B, 2, 7, 8), (3, 2, 3, 3), stride=(2, 3), padding=(1, 2)),
    _conv("same", (B, 2, 5, 6), (3, 2, 3, 3), padding="same"),
    _conv("same-even", (B, 2, 6, 5), (3, 2, 2, 4), padding="same"),
    _conv("same-dilated", (B, 2, 6, 6), (3, 2, 3, 2), padding="same", dilation=(2, 3)),
    _conv("valid", (B, 2, 5, 5), (3, 2, 3, 3), padding="valid"),
    _conv("dilation", (B, 2, 8, 8), (3, 2, 3, 3), dilation=2, padding=1),
    _conv("groups", (B, 4, 5, 5), (6, 2, 3, 3), groups=2, padding=1),
    _conv("depthwise", (B, 4, 5, 5), (4, 1, 3, 3), groups=4, padding=1),
    _conv("depthwise-twice", (B, 3, 5, 5), (6, 1, 3, 3), groups=3, stride=2),
    _conv("pointwise", (B, 4, 5, 5), (3, 4, 1, 1)),
    _conv("pointwise-stride", (B, 4, 5, 5), (3, 4, 1, 1), stride=2),
    _conv("pointwise-groups", (B, 4, 5, 4), (6, 2, 1, 1), groups=2, stride=(2, 3)),
    _conv("pointwise-padding", (B, 2, 3, 4), (3, 2, 1, 1), padding=1),
    _conv("depthwise-dilated", (B, 3, 6, 7), (6, 1, 3, 2), groups=3, padding=(2, 1), dilation=(2, 1)),
    _conv("one-output-pixel", (B, 2, 3, 3), (4, 2, 3, 3)),
    _conv("patchify", (B, 3, 6, 6), (5, 3, 3, 3), stride=3),
    _conv("large-kernel", (B, 1, 9, 9), (2, 1, 8, 8), padding=2),
    Case("conv2d/folded-windows", _windows, x=(B, 2, 2, 5, 5), params={"w": (3, 2, 3, 3), "bias": (3,)}),
    Case("conv2d/folded-pointwise", _windows, x=(B, 2, 4, 3, 3), params={"w": (3, 4, 1, 1), "bias": (3,)}),
    Case("conv1d/folded-windows-major", _windows_major, x=(2, B, 2, 6), params={"w": (3, 2, 3)}, batch_dim=1,
         out_dim=1),
    Case("conv2d/samples-last", lambda x, w: F.conv2d(x.permute(3, 0, 1, 2), w), x=(2, 5, 5, B),
         params={"w": (3, 2, 3, 3)}, batch_dim=3),
    Case("expand/image",
         lambda x, p: F.conv2d(p.expand(x.shape[0], 2, 5, 5), torch.ones(1, 2, 3, 3).to(x)) * x,
         x=(B, 1, 3, 3), params={"p": (2, 5, 5)}),
    _conv("plain", (B, 2, 4, 4, 4), (3, 2, 2, 3, 2)),
    _conv("mixed", (B, 2, 5, 4, 5), (4, 1, 3, 2, 3), groups=2, stride=2, padding=1),
    _conv("dilation-padding", (B, 2, 4, 5, 3), (2, 2, 2, 3, 2), dilation=(1, 2, 1), padding=(1, 2, 0)),
    _conv("depthwise", (B, 2, 3, 4, 3), (2, 1, 2, 3, 3), groups=2, padding=1),
    _conv("pointwise", (B, 2, 3, 2, 3), (3, 2, 1, 1, 1), stride=(2, 1, 1)),
    _transposed("plain", (B, 3, 5), (3, 2, 3)),
    _transposed("stride", (B, 3, 4), (3, 2, 3), stride=2, padding=1, output_padding=1),
    _transposed("plain", (B, 3, 4, 4), (3, 2, 3, 3)),
    _transposed("no-bias", (B, 3, 4, 4), (3, 2, 2, 2), bias=False, stride=2),
    _transposed("groups", (B, 4, 3, 4), (4, 2, 3, 3), groups=2, stride=2, output_padding=(1, 0), padding=1),
    _transposed("dilation", (B, 2, 4, 4), (2, 3, 3, 2), dilation=(2, 3), stride=(1, 2)),
    _transposed("pointwise", (B, 4, 3, 3), (4, 3, 1, 1), stride=2, groups=2, output_padding=(1, 0)),
    _transposed("pointwise-leftover", (B, 2, 3, 2), (2, 3, 1, 1), stride=(1, 2), dilation=3, output_padding=2),
    _transposed("depthwise", (B, 3, 4, 4), (3, 1, 3, 3), groups=3, padding=1),
    _transposed("plain", (B, 2, 3, 3, 3), (2, 2, 2, 2, 2), stride=2),
]  # fmt: skip


# --- embeddings and tables ------------------------------------------------------------------------------------------


class PositionTable(nn.Module):
    """Token embedding and an `nn.Embedding` of positions, which reads no data."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(9, 4, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class TiedHead(nn.Module):
    """The token embedding is the head: two unlike uses of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def _embed(name: str, ids: Shape, **options: Any) -> Case:
    vmap = options.pop("vmap", True)
    function = lambda ids, w: F.embedding(ids, w, **options)  # noqa: E731
    return Case(f"embedding/{name}", function, x=None, ids=ids, params={"w": (7, 4)}, vmap=vmap)


def _experts(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Each token by the matrix of the expert that it names."""
    return torch.bmm(x.reshape(-1, 1, 4), w[ids.reshape(-1)]).view(*ids.shape, -1)


EMBEDDING = [
    _embed("seq", (B, 5)),
    _embed("one-token", (B,)),
    _embed("one-position", (B, 1)),
    _embed("two-middle-dims", (B, 2, 3)),
    _embed("padding", (B, 5), padding_idx=2),
    _embed("negative-padding", (B, 5), padding_idx=-3),
    Case("embedding/repeated", lambda ids, w: F.embedding(ids, w), x=None, ids=(B, 6), classes=2, params={"w": (7, 4)}),
    Case("embedding/time-major", lambda ids, w: F.embedding(ids, w), x=None, ids=(5, B), params={"w": (7, 4)},
         batch_dim=1, out_dim=1),
    Case("embedding/twice", lambda ids, w: F.embedding(ids, w) * F.embedding(ids.flip(1), w), x=None, ids=(B, 5),
         params={"w": (7, 4)}),
    Case("embedding/scaled", lambda ids, w: F.embedding(ids, w * 2.0), x=None, ids=(B, 5), params={"w": (7, 4)}),
    Case("embedding/position-table", x=None, ids=(B, 5), module=PositionTable),
    Case("embedding/padded-position-table", x=None, ids=(B, 5), module=lambda: PositionTable(padding=1)),
    Case("embedding/raw-positions", lambda ids, w, pos: F.embedding(ids, w) + pos[:, : ids.shape[1]], x=None,
         ids=(B, 5), params={"w": (7, 4), "pos": (1, 9, 4)}),
    Case("embedding/tied-head", x=None, ids=(B, 5), module=TiedHead),
    Case("embedding/tied-head-one-position", x=None, ids=(B, 1), module=TiedHead),
    Case("embedding_bag/sum", lambda ids, w: F.embedding_bag(ids, w, mode="sum"), x=None, ids=(B, 5),
         params={"w": (7, 4)}, vmap=False, covers=("embedding",)),
    Case("embedding_bag/mean", lambda ids, w: F.embedding_bag(ids, w, mode="mean"), x=None, ids=(B, 5),
         params={"w": (7, 4)}, vmap=False, covers=("embedding",)),
    Case("embedding_bag/max-padding", lambda ids, w: F.embedding_bag(ids, w, mode="max", padding_idx=2), x=None,
         ids=(B, 5), params={"w": (7, 4)}, vmap=False, covers=("embedding",)),
    Case("index/rows", lambda ids, w: w[ids], x=None, ids=(B, 5), params={"w": (7, 4)}),
    Case("index/columns", lambda ids, w: w[:, ids], x=None, ids=(B, 5), params={"w": (4, 7)}, out_dim=1),
    Case("index/experts", _experts, x=(B, 5, 4), ids=(B, 5), classes=3, params={"w": (3, 4, 2)}),
    Case("index/pairs", lambda ids, w: w[ids, ids.flip(1)], x=None, ids=(B, 5), params={"w": (7, 7)}, fallback=("w",)),
    Case("index_select/rows", lambda ids, w: w.index_select(0, ids), x=None, ids=(B,), params={"w": (7, 4)},
         vmap=False),
    Case("expand/gathered-columns", lambda ids, w: w.expand(ids.shape[0], 4, 7).gather(2, ids), x=None, ids=(B, 4, 2),
         params={"w": (4, 7)}),
    Case("gather/vector", lambda ids, w: w.gather(0, ids) * w.sum(), x=None, ids=(B,), params={"w": (7,)}, vmap=False),
    Case("gather/rows", lambda ids, w: w.gather(0, ids), x=None, ids=(B, 4), params={"w": (7, 4)}, vmap=False),
    Case("gather/fewer-columns", lambda ids, w: w.gather(-2, ids), x=None, ids=(2, B, 3), params={"w": (2, 7, 4)},
         vmap=False, batch_dim=1, out_dim=1),
    Case("take/pairs", lambda ids, w: torch.take(w, ids - 3), x=None, ids=(B, 5), params={"w": (3, 4)}, vmap=False),
    Case("one_hot/matmul", lambda ids, w: F.one_hot(ids, 7).to(w.dtype) @ w, x=None, ids=(B, 5), params={"w": (7, 4)},
         vmap=False, covers=("matmul",)),
]  # fmt: skip


# --- normalisations -------------------------------------------------------------------------------------------------


def _folded_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    b, t, d = x.shape
    return F.layer_norm(x.reshape(b * t, d), (d,), weight, bias).view(b, t, d)


def _folded_group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    b, n = x.shape[:2]
    return F.group_norm(x.reshape(b * n, *x.shape[2:]), 2, weight, bias).view(x.shape)


def _two_norms(ndim: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[ndim](4)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        return norm

    return make


_CHANNELS = {"weight": (4,), "bias": (4,)}

NORM = [
    Case("layer_norm/2d", lambda x, **p: F.layer_norm(x, (4,), **p), params=_CHANNELS, covers=("layer_norm",)),
    Case("layer_norm/seq", lambda x, **p: F.layer_norm(x, (4,), **p), x=(B, 5, 4), params=_CHANNELS),
    Case("layer_norm/no-bias", lambda x, weight: F.layer_norm(x, (4,), weight), x=(B, 5, 4), params={"weight": (4,)}),
    Case("layer_norm/several-dims", lambda x, **p: F.layer_norm(x, (3, 4), **p), x=(B, 5, 3, 4),
         params={"weight": (3, 4), "bias": (3, 4)}),
    Case("layer_norm/dim-of-one", lambda x, **p: F.layer_norm(x, (1, 4), **p), x=(B, 5, 1, 4),
         params={"weight": (1, 4), "bias": (1, 4)}),
    Case("layer_norm/folded", _folded_norm, x=(B, 5, 4), params=_CHANNELS),
    Case("layer_norm/time-major", lambda x, **p: F.layer_norm(x, (4,), **p), x=(5, B, 4), params=_CHANNELS, batch_dim=1,
         out_dim=1),
    Case("rms_norm/seq", lambda x, weight: F.rms_norm(x, (4,), weight, 1e-6), x=(B, 5, 4), params={"weight": (4,)},
         covers=("rms_norm",)),
    Case("rms_norm/default-eps", lambda x, weight: F.rms_norm(x, (3, 4), weight), x=(B, 3, 4),
         params={"weight": (3, 4)}),
    Case("group_norm/2d", lambda x, **p: F.group_norm(x, 2, **p), x=(B, 4, 5, 5), params=_CHANNELS,
         covers=("group_norm",)),
    Case("group_norm/no-space", lambda x, **p: F.group_norm(x, 2, **p), params=_CHANNELS),
    Case("group_norm/weight-only", lambda x, weight: F.group_norm(x, 4, weight), x=(B, 4, 5), params={"weight": (4,)}),
    Case("group_norm/folded", _folded_group_norm, x=(B, 2, 4, 3, 3), params=_CHANNELS),
    Case("instance_norm/2d", lambda x, **p: F.instance_norm(x, **p), x=(B, 4, 5, 5), params=_CHANNELS,
         covers=("instance_norm",), vmap=False),
    Case("instance_norm/1d", lambda x, **p: F.instance_norm(x, **p), x=(B, 4, 5), params=_CHANNELS, vmap=False),
    Case("batch_norm/eval-2d", x=(B, 4), module=_two_norms(2), train=False, covers=("batch_norm_eval",)),
    Case("batch_norm/eval-1d", x=(B, 4, 5), module=_two_norms(3), train=False),
    Case("batch_norm/eval-images", x=(B, 4, 3, 3), module=_two_norms(4), train=False),
    Case("batch_norm/eval-volumes", x=(B, 4, 2, 2, 2), module=_two_norms(5), train=False),
]  # fmt: skip


# --- elementwise ops and broadcasting -------------------------------------------------------------------------------

POINTWISE = [
    Case("add/row", lambda x, p: x + p, x=(B, 5, 4), params={"p": (4,)}, covers=("pointwise",)),
    Case("add/full", lambda x, p: x + p, x=(B, 5, 4), params={"p": (5, 4)}),
    Case("add/leading-one", lambda x, p: x + p, x=(B, 5, 4), params={"p": (1, 5, 4)}),
    Case("add/middle-one", lambda x, p: x + p, x=(B, 5, 4), params={"p": (5, 1)}),
    Case("add/scalar", lambda x, p: x + p, x=(B, 5, 4), params={"p": ()}),
    Case("add/one", lambda x, p: x + p, params={"p": (1,)}),
    Case("add/alpha", lambda x, p: torch.add(x, p, alpha=-0.7), x=(B, 5, 4), params={"p": (4,)}),
    Case("add/param-is-larger", lambda x, p: x.unsqueeze(1) + p, x=(B, 4), params={"p": (5, 4)}),
    Case("add/data-broadcasts", lambda x, p: x + p, x=(B, 1, 4), params={"p": (5, 1)}),
    Case("add/samples-last", lambda x, p: x + p, x=(4, B), params={"p": (4, 1)}, batch_dim=1, out_dim=1),
    Case("add/new-leading-dims", lambda x, p: x + p, x=(B, 4), params={"p": (2, 1, 4)}, out_dim=1),
    Case("add/scalar-to-scalar-samples", lambda x, p: x + p, x=(B,), params={"p": ()}),
    Case("sub/data-first", lambda x, p: x - p, x=(B, 5, 4), params={"p": (4,)}),
    Case("sub/param-first", lambda x, p: p - x, x=(B, 5, 4), params={"p": (5, 4)}),
    Case("sub/reversed-number", lambda x, p: torch.rsub(x, p, alpha=2), x=(B, 5, 4),
         params={"p": (4,)}, fallback=("p",)),
    Case("mul/row", lambda x, p: x * p, x=(B, 5, 4), params={"p": (4,)}),
    Case("mul/column", lambda x, p: x * p, x=(B, 5, 4), params={"p": (5, 1)}),
    Case("mul/scalar", lambda x, p: x * p, x=(B, 5, 4), params={"p": ()}),
    Case("mul/full", lambda x, p: x * p, x=(B, 5, 4), params={"p": (5, 4)}),
    Case("mul/folded", lambda x, p: (x.reshape(-1, 4) * p).view(x.shape), x=(B, 5, 4), params={"p": (4,)}),
    Case("mul/squared-use", lambda x, p: x * p * p, x=(B, 5, 4), params={"p": (4,)}),
    Case("div/denominator", lambda x, p: x / p, x=(B, 5, 4), params={"p": (4,)}, shift=3.0),
    Case("div/numerator", lambda x, p: p / (x.square() + 1.0), x=(B, 5, 4), params={"p": (4,)}),
    Case("pow/base", lambda x, p: p ** x, x=(B, 5, 4), params={"p": (4,)}, shift=3.0),
    Case("pow/exponent", lambda x, p: (x.abs() + 0.5) ** p, x=(B, 5, 4), params={"p": (4,)}),
    Case("where/chosen", lambda x, p: torch.where(x > 0, x, p), x=(B, 5, 4), params={"p": (4,)}),
    Case("where/first", lambda x, p: torch.where(x > 0, p, 0.5), x=(B, 5, 4), params={"p": (5, 4)}, fallback=("p",)),
    Case("maximum", lambda x, p: torch.maximum(x, p), x=(B, 5, 4), params={"p": (4,)}),
    Case("clamp/bound", lambda x, p: torch.clamp(x, min=p), x=(B, 5, 4), params={"p": (4,)}),
    Case("lerp/weight", lambda x, y, p: torch.lerp(x, y, p), x=(B, 5, 4), more=((B, 5, 4),), params={"p": (4,)}),
    Case("addcmul", lambda x, y, p: torch.addcmul(x, y, p, value=0.3), x=(B, 5, 4), more=((B, 5, 4),),
         params={"p": (4,)}),
    Case("atan2", lambda x, p: torch.atan2(p, x), x=(B, 5, 4), params={"p": (4,)}),
    Case("masked_fill/value", lambda x, p: x.masked_fill(x > 0, p), x=(B, 5, 4), params={"p": ()}),
    Case("prelu/one", F.prelu, x=(B, 4, 5), params={"weight": (1,)}, covers=("prelu",)),
    Case("prelu/channels", F.prelu, x=(B, 4, 5), params={"weight": (4,)}),
    Case("prelu/images", F.prelu, x=(B, 4, 3, 3), params={"weight": (4,)}),
    Case("prelu/2d", F.prelu, x=(B, 4), params={"weight": (4,)}),
    Case("expand/class-token", lambda x, p: torch.cat([p.expand(x.shape[0], 1, 4), x], 1), x=(B, 5, 4),
         params={"p": (1, 1, 4)}, covers=("expand",)),
    Case("expand/new-dim", lambda x, p: torch.cat([p.expand(x.shape[0], -1, -1), x], 1), x=(B, 5, 4),
         params={"p": (2, 4)}),
    Case("expand/samples-inside", lambda x, p: torch.cat([p.expand(2, x.shape[1], 4), x], 0), x=(5, B, 4),
         params={"p": (2, 1, 4)}, batch_dim=1, out_dim=1),
    Case("repeat/class-token", lambda x, p: torch.cat([p.repeat(x.shape[0], 1, 1), x], 1), x=(B, 5, 4),
         params={"p": (1, 1, 4)}, fallback=("p",)),
    Case("expand/initial-state", lambda x, p: torch.tanh(p.expand(x.shape[0], 4)) * x, params={"p": (4,)}),
    Case("expand_as", lambda x, p: p.expand_as(x) * x.sin(), x=(B, 5, 4), params={"p": (5, 4)}, covers=("expand",)),
    Case("new_zeros/plus-param", lambda x, p: (x.new_zeros(x.shape) + p) * x, x=(B, 4),
         params={"p": (4,)}, covers=("pointwise",)),
]  # fmt: skip


# --- parameters on their way to a site ------------------------------------------------------------------------------


def _qkv_chunks(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A fused weight cut into three, each used at a site of its own."""
    q, k, v = (F.linear(x, w_, b_) for w_, b_ in zip(w.chunk(3), bias.chunk(3), strict=True))
    return F.scaled_dot_product_attention(q, k, v)


def _functional_weight_norm(x: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return F.linear(x, g * v / v.norm(dim=1, keepdim=True))


def _masked(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w * torch.tril(torch.ones(6, 4, dtype=w.dtype)))


def _written_over(x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    """A weight of which some rows are written over: a slice with zeros, every second row, one row."""
    made = w.clone()
    made[:2].zero_()
    made[3::2] = rows
    made[-2] = rows[0].sin()
    return F.linear(x, made)


def _convolved_positions(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Positions that a convolution makes of a constant, repeated for every sample."""
    fixed = torch.linspace(-1, 1, 4 * 4 * 7, dtype=w.dtype).reshape(1, 4, 4, 7).sin()
    made = F.conv2d(fixed, w, bias, stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2)
    return x * made.tanh()[..., :3].repeat(x.shape[0], 1, 1, 1)[:, :, :3]


def _prompt(x: Tensor, w: Tensor) -> Tensor:
    """Rows of a table for the first of numbers that all samples share, then repeated for every sample."""
    rows = torch.arange(5).unsqueeze(0).expand(x.shape[0], -1)[:1]
    return x * F.embedding(rows, w).sin().repeat(x.shape[0], 1, 1)


def _lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w + b @ a)


def _weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 6))


def _orthogonal_like() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class TwiceUsed(nn.Module):
    """One layer used twice in a row, and its weight once more transposed."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.layer, self.transposed = nn.Linear(4, 4), transposed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return F.linear(h, self.layer.weight.t()) if self.transposed else self.layer(h)


class PartlyUsed(nn.Module):
    """A parameter that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


PREFIX = [
    Case("prefix/transpose", lambda x, w: F.linear(x, w.t()), x=(B, 5, 4), params={"w": (4, 6)}),
    Case("prefix/slice", lambda x, w: F.linear(x, w[1:5, ::2]), x=(B, 5, 4), params={"w": (6, 8)}),
    Case("prefix/view", lambda x, w: F.linear(x, w.view(6, 4)), x=(B, 5, 4), params={"w": (24,)}),
    Case("prefix/select", lambda x, w: F.linear(x, w[1]), x=(B, 5, 4), params={"w": (2, 6, 4)}),
    Case("prefix/unbind", lambda x, w: F.linear(F.linear(x, w[0]), w[1]), x=(B, 5, 4), params={"w": (2, 4, 4)}),
    Case("prefix/written-over", _written_over, x=(B, 5, 4), params={"w": (6, 4), "rows": (2, 4)}),
    Case("prefix/convolved", _convolved_positions, x=(B, 6, 3, 3), params={"w": (6, 2, 2, 3), "bias": (6,)},
         fallback=("w", "bias")),
    Case("prefix/one-row-for-all", _prompt, x=(B, 5, 4), params={"w": (7, 4)}, fallback=("w",)),
    Case("prefix/scaled", lambda x, w: F.linear(x, w * 0.3), x=(B, 5, 4), params={"w": (6, 4)}),
    Case("prefix/cat", lambda x, w, v: F.linear(x, torch.cat([w, v])), x=(B, 5, 4), params={"w": (2, 4), "v": (3, 4)}),
    Case("prefix/stack-self", lambda x, w: F.linear(x, torch.cat([w, w * w])), x=(B, 5, 4), params={"w": (2, 4)}),
    Case("prefix/overlapping-slices", lambda x, w: F.linear(x, w[:4]) + F.linear(x, w[2:]), x=(B, 5, 4),
         params={"w": (6, 4)}),
    Case("prefix/third-overlaps-second",
         lambda x, w: F.linear(x, w[:3]) + F.linear(x, w[3:6]).sin() + F.linear(x, w[4:]),
         x=(B, 5, 4), params={"w": (7, 4)}),
    Case("prefix/expanded-row", lambda x, w: F.linear(x, w.expand(6, 4)), x=(B, 5, 4), params={"w": (1, 4)}),
    Case("prefix/functional-weight-norm", _functional_weight_norm, x=(B, 5, 4), params={"v": (6, 4), "g": (6, 1)}),
    Case("prefix/weight-norm", x=(B, 5, 4), module=_weight_norm),
    Case("prefix/symmetric", x=(B, 5, 4), module=_orthogonal_like),
    Case("prefix/masked", _masked, x=(B, 5, 4), params={"w": (6, 4)}),
    Case("prefix/lora", _lora, x=(B, 5, 4), params={"w": (6, 4), "a": (2, 4), "b": (6, 2)}, frozen=("w",)),
    Case("prefix/lora-activations", lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b), x=(B, 5, 4),
         params={"w": (6, 4), "a": (2, 4), "b": (6, 2)}, frozen=("w",)),
    Case("prefix/qkv-chunks", _qkv_chunks, x=(B, 5, 4), params={"w": (12, 4), "bias": (12,)}),
    Case("prefix/flipped", lambda x, w: F.linear(x, w.flip(0)), x=(B, 5, 4), params={"w": (6, 4)}),
    Case("prefix/softmax", lambda x, w: F.linear(x, w.softmax(-1)), x=(B, 5, 4), params={"w": (6, 4)}),
    Case("prefix/conv-weight", lambda x, w: F.conv1d(x, w.transpose(0, 1) * 2.0), x=(B, 2, 6), params={"w": (2, 3, 3)}),
    Case("prefix/float32-cast", lambda x, w: F.linear(x.float(), w.float()).to(x.dtype), x=(B, 5, 4),
         params={"w": (6, 4)}),
    Case("uses/twice", x=(B, 5, 4), module=TwiceUsed),
    Case("uses/straight-and-transposed", x=(B, 5, 4), module=lambda: TwiceUsed(transposed=True)),
    Case("uses/both-operands", lambda x, w: F.linear(x, w) * w.sum(1), x=(B, 5, 4), params={"w": (6, 4)}),
    Case("uses/different-ops", lambda x, w: F.linear(x, w).sum(-1, keepdim=True) + x @ w.mean(0, keepdim=True).t(),
         x=(B, 5, 4), params={"w": (6, 4)}),
    Case("uses/one-op-twice", lambda x, w: (x @ w) @ w, x=(B, 5, 4), params={"w": (4, 4)}),
    Case("uses/weight-as-bias", lambda x, w: F.linear(x, w, w.diagonal()), x=(B, 5, 4), params={"w": (4, 4)}),
    Case("uses/different-lengths", lambda x, w: F.linear(x, w).mean(1) + F.linear(x[:, :2], w).sum(1), x=(B, 5, 4),
         params={"w": (6, 4)}),
    Case("uses/conv-twice", lambda x, w: F.conv1d(F.conv1d(x, w, padding=1).tanh(), w), x=(B, 2, 6),
         params={"w": (2, 2, 3)}),
    Case("uses/unused", x=(B, 5, 4), module=PartlyUsed),
    Case("uses/penalty", F.linear, x=(B, 5, 4), params=_W, penalty="weight", vmap=False),
    Case("uses/penalty-only", lambda x, w, p: F.linear(x, w), x=(B, 5, 4), params={"w": (6, 4), "p": (3,)}, penalty="p",
         vmap=False),
    Case("uses/no-grad", lambda x, w: F.linear(x, w) * F.linear(x, w).detach(), x=(B, 5, 4), params={"w": (6, 4)}),
]  # fmt: skip


# --- ops without a rule, and whole layers ---------------------------------------------------------------------------


class LastHidden(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on itself, samples in dim 0 or 1."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


OTHER = [
    Case("expand/attention-key", lambda x, k: F.scaled_dot_product_attention(x, k.expand(x.shape[0], 5, 4), x),
         x=(B, 5, 4), params={"k": (5, 4)}),
    Case("fallback/attention-memory", lambda x, k, v: F.scaled_dot_product_attention(x, k.unsqueeze(0), v.unsqueeze(0)),
         x=(B, 5, 4), params={"k": (3, 4), "v": (3, 4)}, fallback=("k", "v")),
    Case("fallback/cdist", lambda x, c: torch.cdist(x, c.unsqueeze(0)), x=(B, 5, 4), params={"c": (3, 4)},
         fallback=("c",)),
    Case("fill/parameter", lambda x, p: x * torch.zeros_like(x).fill_(p), params={"p": ()}),
    Case("fallback/cosine", lambda x, c: F.cosine_similarity(x.unsqueeze(1), c, dim=-1), params={"c": (3, 4)},
         fallback=("c",)),
    Case("expand/cat-params-and-data", lambda x, p: torch.cat([x, p.expand(x.shape[0], 2, 4)], 1).cumsum(1),
         x=(B, 5, 4), params={"p": (2, 4)}),
    Case("add/grid-bias", lambda x, p: F.pad(x, (1, 1)) + F.pad(p, (1, 1)), x=(B, 4), params={"p": (4,)}),
    Case("layers/lstm", x=(B, 4, 4), module=lambda: LastHidden(nn.LSTM, batch_first=True), vmap=False),
    Case("layers/lstm-two-ways", x=(4, B, 4), module=lambda: LastHidden(nn.LSTM, num_layers=2, bidirectional=True),
         batch_dim=1, out_dim=1, vmap=False),
    Case("layers/gru", x=(B, 4, 4), module=lambda: LastHidden(nn.GRU, batch_first=True), vmap=False),
    Case("layers/rnn", x=(B, 4, 4), module=lambda: LastHidden(nn.RNN, batch_first=True, nonlinearity="relu"),
         vmap=False),
    Case("layers/attention", x=(B, 5, 4), module=lambda: SelfAttention(True)),
    Case("layers/attention-time-major", x=(5, B, 4), module=lambda: SelfAttention(False), batch_dim=1, out_dim=1),
    Case("layers/attention-bias-kv", x=(5, B, 4), module=lambda: SelfAttention(False, add_bias_kv=True), batch_dim=1,
         out_dim=1, fallback=("attention.bias_k", "attention.bias_v")),
    Case("layers/bilinear", x=(B, 4), more=((B, 5),), module=lambda: nn.Bilinear(4, 5, 2)),
]  # fmt: skip

CASES = [*LINEAR, *CONVOLUTION, *EMBEDDING, *NORM, *POINTWISE, *PREFIX, *OTHER, *TRAPS]
"""Every row."""
