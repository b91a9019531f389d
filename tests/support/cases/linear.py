"""Rows: linear layers and matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from support.cases.case import B, Case


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


def _regular(w: Tensor) -> Tensor:
    return w + 3.0 * torch.eye(w.shape[-1], dtype=w.dtype)


_W = {"weight": (6, 4), "bias": (6,)}

LINEAR = [
    Case("linear/2d", F.linear, params=_W),
    Case("linear/no-bias", F.linear, params={"weight": (6, 4)}, loss="sum"),
    Case("linear/vector", F.linear, x=(B, 5, 4), params={"weight": (4,)}),
    Case("linear/seq", F.linear, x=(B, 5, 4), params=_W),
    Case("linear/two-middle-dims", F.linear, x=(B, 2, 5, 4), params=_W, loss="none"),
    Case("linear/one-in-one-out", F.linear, x=(B, 5, 1), params={"weight": (1, 1), "bias": (1,)}),
    Case("linear/one-position", F.linear, x=(B, 1, 4), params=_W),
    Case("linear/time-major", F.linear, x=(5, B, 4), params=_W, batch_dim=1, out_dim=1),
    Case("linear/samples-last", lambda x, w: F.linear(x.permute(2, 0, 1), w), x=(5, 4, B), params={"w": (6, 4)},
         batch_dim=2),
    Case("linear/folded", _folded_linear, x=(B, 5, 4), params={"w": (6, 4), "bias": (6,)}),
    Case("linear/folded-time-major", _time_major_fold, x=(5, B, 4), params={"w": (6, 4)}, batch_dim=1, out_dim=1),
    Case("linear/one-bias", F.linear, x=(B, 5, 4), params={"weight": (6, 4), "bias": (1,)}),
    Case("linear/bias-of-positions", F.linear, x=(B, 5, 4), params={"weight": (6, 4), "bias": (5, 6)}),
    Case("linear/bias-only", F.linear, params=_W, frozen=("weight",)),
    Case("linear/frozen-bias", F.linear, params=_W, frozen=("bias",)),
    Case("linear/relu-stack", lambda x, w, v: F.linear(F.linear(x, w).relu(), v), params={"w": (6, 4), "v": (2, 6)}),
    Case("mm/right", lambda x, w: torch.mm(x, w), params={"w": (4, 6)}),
    Case("mm/left", lambda x, w: torch.mm(w, x), x=(4, B), params={"w": (6, 4)}, batch_dim=1, out_dim=1),
    Case("addmm/2d", lambda x, w, bias: torch.addmm(bias, x, w), params={"w": (4, 6), "bias": (6,)}, covers=("addmm",)),
    Case("addmm/alpha-beta", lambda x, w, bias: torch.addmm(bias, x, w, alpha=0.5, beta=2.0),
         params={"w": (4, 6), "bias": (6,)}),
    Case("addmm/twice-alpha",
         lambda x, w: torch.addmm(h := torch.addmm(x, x, w, alpha=0.5).tanh(), h, w, alpha=2.0), x=(B, 4),
         params={"w": (4, 4)}),
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
    Case("solve/shared", lambda x, w: torch.linalg.solve(_regular(w), x), x=(B, 4, 2), params={"w": (4, 4)},
         fallback=("w",)),
    Case("solve/columns", lambda x, w: torch.linalg.solve(_regular(w), x.T), params={"w": (4, 4)}, out_dim=1,
         fallback=("w",)),
    Case("solve/rows", lambda x, w: torch.linalg.solve(_regular(w), x, left=False), x=(B, 2, 4), params={"w": (4, 4)},
         covers=("expand",)),
    Case("solve/vectors", lambda x, w: torch.linalg.solve(_regular(w) + torch.diag_embed(x.square()), x),
         params={"w": (4, 4)}, covers=("pointwise",)),
    Case("solve/triangular", lambda x, w: torch.linalg.solve_triangular(_regular(w), x, upper=True), x=(B, 2, 4, 3),
         params={"w": (4, 4)}, fallback=("w",)),
    Case("solve/cholesky", lambda x, w: torch.cholesky_solve(x, _regular(w).tril()), x=(B, 4, 2),
         params={"w": (4, 4)}, fallback=("w",)),
    Case("solve/factors", lambda x, w: torch.linalg.lu_solve(*torch.linalg.lu_factor(_regular(w)), x), x=(B, 4, 2),
         params={"w": (4, 4)}, fallback=("w",)),
]  # fmt: skip
