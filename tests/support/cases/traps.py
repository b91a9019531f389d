"""Rows for what other libraries get wrong or refuse, each as users write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from support.cases.case import B, Case


class Model(nn.Module):
    """A forward given as `function(self, *data)`, with named parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *data: Tensor) -> Any:
        return self.function(self, *data)


def model(function: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A maker of `Model`s: each part is made anew."""
    return lambda: Model(function, **{name: make() for name, make in parts.items()})


def linear(i: int = 4, o: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(i, o)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


# --- padding and positions ------------------------------------------------------------------------------------------


def _padded(mode: str) -> Case:
    layer = lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode=mode)  # noqa: E731
    return Case(f"traps/padding-{mode}", x=(B, 2, 5, 6), module=layer)


def _same_stride(m: Any, x: Tensor) -> Tensor:
    """Asymmetric padding by hand, as in networks ported from TensorFlow."""
    return m.conv(F.pad(x, (0, 1, 0, 1)))


def _positions(m: Any, ids: Tensor) -> Tensor:
    return m.tokens(ids) + m.positions(torch.arange(ids.shape[1], device=ids.device)[None])


def _positions_by_mask(m: Any, ids: Tensor) -> Tensor:
    mask = (ids != 0).long()
    return m.tokens(ids) + m.positions(mask.cumsum(1) * mask)


# --- shapes and orders ----------------------------------------------------------------------------------------------


def _in_turns(m: Any, x: Tensor) -> Tensor:
    """Two views of each sample, one after the other in one batch, compared."""
    z = m.layer(x.flatten(0, 1))
    return z[0::2] * z[1::2].tanh()


def _folded(m: Any, x: Tensor) -> Tensor:
    b, t, d = x.shape
    return m.layer(x.reshape(b * t, d)).reshape(b, t, -1).mean(1)


def _flattened_by_minus_one(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def _time_major_inside(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.transpose(0, 1)).transpose(0, 1)


def _windows(m: Any, x: Tensor) -> Tensor:
    """Window partition and its reverse, as in Swin: `[B, H, W, C]` -> `[B·n, w, w, C]`."""
    b, h, w, c = x.shape
    parts = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    seen = F.scaled_dot_product_attention(m.q(parts), m.k(parts), m.v(parts))
    back = seen.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5)
    return back.reshape(b, h, w, c)


# --- calls ----------------------------------------------------------------------------------------------------------


def _keywords(m: Any, x: Tensor) -> Tensor:
    return m.layer(input=x)


def _weight_itself(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.layer.weight) + m.layer.bias.sin()


def _add_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    h += m.bias
    h[:, 1:] *= 2.0
    return h.add_(x)


def _skip_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    h = h + m.relu(h)
    return m.second(h)


def _raw_beside_dropout(m: Any, x: Tensor) -> Tensor:
    return m.dropout(x * m.scale) + m.shift


# --- buffers --------------------------------------------------------------------------------------------------------


def _rotary(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    a, b = h.chunk(2, -1)
    cos, sin = m.cos[: x.shape[1]], m.sin[: x.shape[1]]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _angles(function: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: function(torch.arange(8.0)[:, None] / 10.0 ** torch.arange(2.0))


def _causal(m: Any, x: Tensor) -> Tensor:
    t = x.shape[1]
    q, k, v = m.qkv(x).chunk(3, -1)
    scores = (q @ k.transpose(1, 2) / math.sqrt(4)).masked_fill(~m.mask[:t, :t], float("-inf"))
    return scores.softmax(-1) @ v


def _counted(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.layer(x) * m.calls


# --- weights made of parameters -------------------------------------------------------------------------------------


def _adapted(m: Any, x: Tensor) -> Tensor:
    return m.base(x) + 0.5 * m.up(m.down(x))


def _joined(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch.cat([m.a, m.b], 0), torch.cat([m.c, m.c.exp()]))


class Standardised(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1 over its inputs (Qiao et al. 2019, arXiv:1903.10520)."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True)
        return F.conv2d(x, (self.weight - mean) / torch.sqrt(variance + 1e-5), self.bias, padding=1)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, w: Tensor) -> Tensor:
        return w.tanh() * 2.0


def _parametrized() -> nn.Module:
    layer = nn.Linear(4, 6)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def _spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(4, 6))


# --- recomputation and other code -----------------------------------------------------------------------------------


def _checkpointed(m: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    h: Any = checkpoint(lambda v: m.second(torch.tanh(m.first(v))), m.before(x), use_reentrant=reentrant)
    return h + x


class StraightThrough(torch.autograd.Function):
    """Rounds to multiples of 1/scale; its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _quantised(m: Any, x: Tensor) -> Tensor:
    """Activations and a weight rounded, as in training for low precision."""
    h = StraightThrough.apply(m.first(x), 8.0)
    return F.linear(h, StraightThrough.apply(m.second.weight, 16.0), m.second.bias)


class OwnLinear(torch.autograd.Function):
    """A linear layer with a backward of its own, which doubles the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, 2.0 * g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


def _spectrum(m: Any, x: Tensor) -> Tensor:
    """A global filter on the sequence (Rao et al. 2021, arXiv:2107.00645), its complex weight as two real ones."""
    f = torch.fft.rfft(x, dim=1, norm="ortho")
    return torch.fft.irfft(f * torch.complex(m.re, m.im), n=x.shape[1], dim=1, norm="ortho")


def _modes(m: Any, x: Tensor) -> Tensor:
    """A Fourier layer that keeps the lowest modes (Li et al. 2021, arXiv:2010.08895): complex values are written into
    slices, and at an index.
    """
    f = torch.fft.rfft(m.layer(x), dim=1, norm="ortho")
    kept = torch.zeros_like(f)
    kept[:, :2] = f[:, :2] * torch.complex(m.re, m.im)
    kept[..., 0] = f[..., 1].conj()
    return torch.fft.irfft(kept, n=x.shape[1], dim=1, norm="ortho")


def _filled(m: Any, x: Tensor) -> Tensor:
    """Constants of a fixed size, whose dtype and device are those of a sample."""
    causal = m.weight.masked_fill(x.new_ones(4, 4).tril() == 0, 0.0) * torch.full_like(x[0, :1], 2.0)
    first = m.layer(torch.cat([x.new_zeros(1, 2), m.weight[:1, 2:]], 1))
    out: Tensor = m.layer(x @ causal) + first
    return out


def _denoised(m: Any, x: Tensor) -> Tensor:
    """A mask on a spectrogram, back in time: the windows' sum, which torch divides by, is the same for all samples."""
    window = torch.hann_window(8, dtype=x.dtype)
    z = torch.stft(x, 8, 2, window=window, return_complex=True)
    return torch.istft(z * m.layer(z.abs().transpose(1, 2)).sigmoid().transpose(1, 2), 8, 2, window=window)


def _chosen(m: Any, x: Tensor) -> Tensor:
    return torch.where(m.layer(x) > m.threshold, m.high, m.low * x)


def _masked_tokens(m: Any, x: Tensor) -> Tensor:
    """Masked positions take a learned token, as in masked modelling; the first one a learned start."""
    h = m.layer(x)
    h[x[..., 0] > 0] = m.token
    h[x > 1] = m.scalar
    h[torch.arange(x.shape[0]), x[..., 0].argmax(1)] = m.start
    return m.head(h.tanh())


def _spatial_transformer(m: Any, x: Tensor) -> Tensor:
    theta = m.where(x.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, [x.shape[0], 2, 4, 4], align_corners=False)
    return F.grid_sample(m.layer(x), grid, align_corners=False)


def _gaussian(out: Any) -> Tensor:
    mean, raw, x = out
    return F.gaussian_nll_loss(mean, x, raw, eps=0.5) - torch.distributions.Normal(mean, raw.exp()).log_prob(x).mean()


# --- losses ---------------------------------------------------------------------------------------------------------


def _token_loss(**options: Any) -> Callable[[Any], Tensor]:
    """Cross entropy over tokens; the ids themselves are the targets, 0 is ignored."""

    def loss(out: tuple[Tensor, Tensor]) -> Tensor:
        logits, ids = out
        made = {k: v.to(logits) if isinstance(v, Tensor) else v for k, v in options.items()}
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0, **made)

    return loss


def _next_tokens(m: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    return m.head(m.embed(ids)), ids


def _language(name: str, **options: Any) -> Case:
    made = model(_next_tokens, embed=lambda: nn.Embedding(5, 4), head=linear(4, 5))
    return Case(f"traps/{name}", x=None, ids=(B, 6), classes=5, module=made, criterion=_token_loss(**options))


def _block(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **options)


SEQ = (B, 5, 4)
TRAPS = [
    _padded("circular"),
    _padded("reflect"),
    _padded("replicate"),
    Case("traps/asymmetric-padding", x=(B, 2, 6, 6),
         module=model(_same_stride, conv=lambda: nn.Conv2d(2, 3, 3, stride=2))),
    Case("traps/positions", x=None, ids=(B, 5),
         module=model(_positions, tokens=lambda: nn.Embedding(7, 4), positions=lambda: nn.Embedding(9, 4))),
    Case("traps/positions-by-mask", x=None, ids=(B, 5), classes=3,
         module=model(_positions_by_mask, tokens=lambda: nn.Embedding(3, 4),
                      positions=lambda: nn.Embedding(9, 4, padding_idx=0))),
    Case("traps/folded", x=SEQ, module=model(_folded, layer=linear())),
    Case("traps/pairs-in-turns", x=(B, 2, 4), module=model(_in_turns, layer=linear())),
    Case("traps/folded-by-minus-one", x=SEQ, module=model(_flattened_by_minus_one, layer=linear())),
    Case("traps/time-major-inside", x=SEQ, module=model(_time_major_inside, layer=linear())),
    Case("traps/windows", x=(B, 4, 4, 4), module=model(_windows, q=linear(), k=linear(), v=linear())),
    Case("traps/keyword-call", x=SEQ, module=model(_keywords, layer=linear())),
    Case("traps/weight-itself", x=SEQ, module=model(_weight_itself, layer=linear())),
    Case("traps/add-in-place", x=SEQ, module=model(_add_in_place, layer=linear(), bias=parameter(4))),
    Case("traps/relu-in-place", x=SEQ, module=lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(True), nn.Linear(6, 2))),
    Case("traps/skip-in-place", x=SEQ,
         module=model(_skip_in_place, first=linear(), relu=lambda: nn.SiLU(inplace=True), second=linear())),
    Case("traps/raw-beside-dropout", x=SEQ,
         module=model(_raw_beside_dropout, scale=parameter(4), shift=parameter(5, 4), dropout=lambda: nn.Dropout(0.0))),
    Case("traps/rotary-table", x=SEQ, module=model(_rotary, layer=linear(), cos=_angles(torch.cos),
                                                  sin=_angles(torch.sin))),
    Case("traps/causal-mask", x=SEQ, module=model(_causal, qkv=linear(4, 12),
                                                 mask=lambda: torch.ones(9, 9, dtype=torch.bool).tril())),
    Case("traps/counter", x=SEQ, module=model(_counted, layer=linear(), calls=lambda: torch.ones(())), vmap=False),
    Case("traps/adapters", x=SEQ, frozen=("base.weight", "base.bias"),
         module=model(_adapted, base=linear(), down=linear(4, 2), up=linear(2, 4))),
    Case("traps/joined-parameters", x=SEQ, module=model(_joined, a=parameter(2, 4), b=parameter(4, 4),
                                                       c=parameter(3))),
    Case("traps/weight-standardised", x=(B, 2, 5, 5), module=lambda: Standardised(2, 3, 3)),
    Case("traps/parametrized", x=SEQ, module=_parametrized),
    Case("traps/spectral-norm", x=SEQ, module=_spectral, train=False),
    Case("traps/spectral-norm-in-training", x=SEQ, module=_spectral, vmap=False),
    Case("traps/checkpoint", x=SEQ, vmap=False,
         module=model(_checkpointed, before=linear(), first=linear(), second=linear())),
    Case("traps/custom-backward", x=SEQ, vmap=False, module=model(_quantised, first=linear(), second=linear())),
    Case("traps/custom-backward-of-a-weight", x=SEQ, vmap=False,
         module=model(lambda m, x: OwnLinear.apply(m.first(x).tanh(), m.second.weight, m.second.bias), first=linear(),
                      second=linear()), fallback=("second.weight", "second.bias")),
    Case("traps/fills", x=SEQ, module=model(_filled, layer=linear(), weight=parameter(4, 4))),
    Case("traps/short-time-fourier", x=(B, 24), module=model(_denoised, layer=linear(5, 5))),
    Case("traps/fourier", x=SEQ, module=model(_spectrum, re=parameter(3, 4), im=parameter(3, 4)),
         fallback=("re", "im")),
    Case("traps/fourier-modes", x=SEQ, module=model(_modes, layer=linear(), re=parameter(2, 4), im=parameter(2, 4)),
         fallback=("re", "im")),
    Case("traps/where", x=SEQ, module=model(_chosen, layer=linear(), threshold=parameter(4), high=parameter(5, 1),
                                           low=parameter())),
    Case("traps/shared-input", x=SEQ, more=((5, 4),), batch_dim=(0, None),
         module=model(lambda m, x, table: m.layer(x) * m.layer(table), layer=linear())),
    Case("traps/samples-in-dim-1", x=(5, B, 4), batch_dim=1, out_dim=1, module=_block()),
    Case("traps/pre-norm-block", x=SEQ, module=_block(batch_first=True, norm_first=True)),
    Case("traps/masked-tokens", x=SEQ, module=model(_masked_tokens, layer=linear(), head=linear(), token=parameter(4),
                                                   scalar=parameter(), start=parameter(4)), vmap=False,
         fallback=("token", "scalar", "start")),
    Case("traps/spatial-transformer", x=(B, 2, 6, 6),
         module=model(_spatial_transformer, where=linear(2, 6), layer=lambda: nn.Conv2d(2, 2, 1))),
    Case("traps/gaussian", x=SEQ, criterion=_gaussian, vmap=False,
         module=model(lambda m, x: (m.mean(x), m.scale(x).sigmoid(), x), mean=linear(), scale=linear())),
    _language("tokens-ignored"),
    _language("class-weights", weight=torch.tensor([0.3, 2.0, 1.0, 0.7, 1.5])),
    _language("label-smoothing", label_smoothing=0.2),
    _language("smoothed-class-weights", label_smoothing=0.1, weight=torch.tensor([0.3, 2.0, 1.0, 0.7, 1.5])),
]  # fmt: skip
"""Every row."""
