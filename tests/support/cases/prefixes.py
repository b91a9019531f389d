"""Rows: parameters on their way to a site."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.cases.case import B, Case


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


class PromptLoop(nn.Module):
    """Tokens of a prompt that a recurrent layer computes, before the sample's own."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Parameter(torch.randn(1, 2, 2)), layer
        self.mix = nn.Linear(self.layer(self.tokens.detach().to(self.layer.weight_hh_l0.dtype))[0].shape[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        prompt, last = self.layer(self.tokens)
        scale = last[1].sum() if isinstance(last, tuple) else last.sum()
        return torch.cat([self.mix(prompt).expand(x.shape[0], -1, -1), x * scale], 1)


class MaskedEntries(nn.Module):
    """The entries of a parameter that a mask of the model's picks, along one dim and two."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.square = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(3, 4))
        self.register_buffer("mask", torch.arange(7) % 2 == 0)
        self.register_buffer("upper", torch.ones(3, 4).triu(1) > 0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w[self.mask] + x.sum(-1, keepdim=True) * self.square[self.upper].sum()


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
    Case("prefix/lstm", x=(B, 5, 4), module=lambda: PromptLoop(nn.LSTM(2, 3, batch_first=True))),
    Case("prefix/gru", x=(B, 5, 4), module=lambda: PromptLoop(nn.GRU(2, 3, batch_first=True))),
    Case("prefix/relu-rnn", x=(B, 5, 4),
         module=lambda: PromptLoop(nn.RNN(2, 3, batch_first=True, nonlinearity="relu"))),
    Case("prefix/masked-entries", x=(B, 5, 4), module=MaskedEntries),
    Case("prefix/unbatched-convolution", lambda x, a, w: x * F.conv1d(a, w).sin(), x=(B, 5, 4),
         params={"a": (2, 6), "w": (5, 2, 3)}),
    Case("prefix/cosine", lambda x, a, b: x * F.cosine_similarity(a, b, 1).sum(0), x=(B, 5, 4),
         params={"a": (6, 4), "b": (2, 6, 4)}),
    Case("prefix/weight-norm", x=(B, 5, 4), module=_weight_norm),
    Case("prefix/symmetric", x=(B, 5, 4), module=_orthogonal_like),
    Case("prefix/orthogonal", x=(B, 5, 4), module=lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))),
    Case("prefix/diagonal", lambda x, w: F.linear(x, w.clone().fill_diagonal_(-1.0)), x=(B, 5, 4),
         params={"w": (4, 4)}),
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
    Case("uses/penalty", F.linear, x=(B, 5, 4), params={"weight": (6, 4), "bias": (6,)}, penalty="weight",
         vmap=False),
    Case("uses/penalty-only", lambda x, w, p: F.linear(x, w), x=(B, 5, 4), params={"w": (6, 4), "p": (3,)}, penalty="p",
         vmap=False),
    Case("uses/no-grad", lambda x, w: F.linear(x, w) * F.linear(x, w).detach(), x=(B, 5, 4), params={"w": (6, 4)}),
]  # fmt: skip
