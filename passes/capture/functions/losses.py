"""Losses with a `reduction`, written with elementwise ops, gather, sum and mean, so that the reduction stands alone.

One function a loss, its formula in the docstring; `x` is the prediction, `t` the target, `reduction` 0, 1, 2 for none,
mean, sum.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.op_table import at_capture, decomposition
from psg_fx.torch_private.ops import adaptive_output

_NONE, _MEAN, _SUM = 0, 1, 2
_REDUCTIONS = {"none": _NONE, "mean": _MEAN, "sum": _SUM}


def _reduce(values: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return values
    return values.mean() if reduction == _MEAN else values.sum()


def _class_dim(x: Tensor) -> int:
    return 0 if x.dim() == 1 else 1


def _along_classes(weight: Tensor, x: Tensor) -> Tensor:
    """Class weights [C] shaped to multiply x [N, C, ..]."""
    shape = [1] * x.dim()
    shape[_class_dim(x)] = -1
    return weight.view(shape)


@decomposition("mse_loss.default")
def mse_loss(x: Tensor, t: Tensor, reduction: int = _MEAN) -> Tensor:
    """(x - t)²."""
    return _reduce((x - t) ** 2, reduction)


@decomposition("l1_loss.default")
def l1_loss(x: Tensor, t: Tensor, reduction: int = _MEAN) -> Tensor:
    """|x - t|."""
    return _reduce((x - t).abs(), reduction)


@decomposition("smooth_l1_loss.default")
def smooth_l1_loss(x: Tensor, t: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """d²/2β where d = |x - t| < β, d - β/2 elsewhere."""
    d = (x - t).abs()
    return _reduce(d if beta == 0 else torch.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta), reduction)


@decomposition("huber_loss.default")
def huber_loss(x: Tensor, t: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    """d²/2 where d = |x - t| < δ, δ(d - δ/2) elsewhere."""
    d = (x - t).abs()
    return _reduce(torch.where(d < delta, 0.5 * d * d, delta * (d - 0.5 * delta)), reduction)


@decomposition("binary_cross_entropy.default")
def binary_cross_entropy(x: Tensor, t: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Any:
    """-w (t log x + (1 - t) log(1 - x)), by torch's own op: finite gradient at x = 0 and 1."""
    if reduction == _NONE:
        return NotImplemented
    return _reduce(torch.ops.aten.binary_cross_entropy.default(x, t, weight, _NONE), reduction)


@decomposition("binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    x: Tensor, t: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """(1 - t) x - (1 + (p - 1) t) log σ(x), times w."""
    scale = 1.0 if pos_weight is None else (pos_weight - 1) * t + 1
    values = (1 - t) * x - scale * torch.nn.functional.logsigmoid(x)
    return _reduce(values if weight is None else values * weight, reduction)


@decomposition("kl_div.default")
def kl_div(x: Tensor, t: Tensor, reduction: int = _MEAN, *, log_target: bool = False) -> Tensor:
    """T (log t - x), or e^t (t - x) where t is a logarithm."""
    return _reduce(t.exp() * (t - x) if log_target else torch.xlogy(t, t) - t * x, reduction)


@decomposition("soft_margin_loss.default")
def soft_margin_loss(x: Tensor, t: Tensor, reduction: int = _MEAN) -> Tensor:
    """log(1 + e^{-t x})."""
    return _reduce(torch.log1p(torch.exp(-t * x)), reduction)


@decomposition("poisson_nll_loss.default")
def poisson_nll_loss(x: Tensor, t: Tensor, log_input: bool, full: bool, eps: float, reduction: int) -> Tensor:
    """e^x - t x, or x - t log(x + ε); full adds Stirling's t log t - t + log(2πt)/2 where t > 1."""
    values = x.exp() - t * x if log_input else x - t * (x + eps).log()
    if full:
        stirling = t * t.log() - t + 0.5 * (2 * math.pi * t).log()
        values = values + stirling.masked_fill(t <= 1, 0)
    return _reduce(values, reduction)


@decomposition("margin_ranking_loss.default")
def margin_ranking_loss(a: Tensor, b: Tensor, t: Tensor, margin: float = 0.0, reduction: int = _MEAN) -> Tensor:
    """max(0, -t (a - b) + m)."""
    return _reduce((-t * (a - b) + margin).clamp_min(0), reduction)


@decomposition("hinge_embedding_loss.default")
def hinge_embedding_loss(x: Tensor, t: Tensor, margin: float = 1.0, reduction: int = _MEAN) -> Tensor:
    """X where t = 1, max(0, m - x) where t = -1."""
    zero = torch.zeros_like(x)
    far = torch.where(t != 1, (margin - x).clamp_min(0), zero)
    return _reduce(far + torch.where(t != -1, x, zero), reduction)


@decomposition("cosine_embedding_loss.default")
def cosine_embedding_loss(a: Tensor, b: Tensor, t: Tensor, margin: float = 0.0, reduction: int = _MEAN) -> Tensor:
    """1 - cos(a, b) where t = 1, max(0, cos(a, b) - m) where t = -1."""
    dim = 0 if t.dim() == 0 else 1
    cosine = (a * b).sum(dim) / (((a * a).sum(dim) + 1e-12) * ((b * b).sum(dim) + 1e-12)).sqrt()
    zero = torch.zeros_like(cosine)
    values = torch.where(t == 1, 1 - cosine, zero) + torch.where(t == -1, (cosine - margin).clamp_min(0), zero)
    return _reduce(values, reduction)


@decomposition("triplet_margin_loss.default")
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = _MEAN,
) -> Tensor:
    """max(0, m + ‖a - p‖ - ‖a - n‖); swap: the smaller of ‖a - n‖ and ‖p - n‖."""

    def distance(a: Tensor, b: Tensor) -> Tensor:
        gap: Tensor = torch.linalg.vector_norm(a - b + eps, p, dim=-1)
        return gap

    far = distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return _reduce((margin + distance(anchor, positive) - far).clamp_min(0), reduction)


@decomposition("multi_margin_loss.default")
def multi_margin_loss(
    x: Tensor, t: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """Σ_{c≠t} w[t] max(0, m - x[t] + x[c])^p / C."""
    rows = t.unsqueeze(-1)
    terms = torch.relu(margin - x.gather(-1, rows) + x)
    terms = terms if p == 1 else terms**p
    if weight is not None:
        terms = terms * weight[rows]
    classes = torch.arange(x.shape[-1], device=x.device)
    return _reduce(torch.where(classes != rows, terms, torch.zeros_like(terms)).sum(-1) / x.shape[-1], reduction)


@at_capture(F.multi_margin_loss)
def multi_margin(
    input: Tensor, target: Tensor, p: float = 1, margin: float = 1.0, weight: Tensor | None = None,
    size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The same: what export makes of it has another gradient where a term is zero (torch 2.13)."""
    odd = (size_average, reduce) != (None, None) or p not in (1, 2) or reduction not in _REDUCTIONS
    if odd or (weight is not None and weight.shape != input.shape[-1:]):  # which torch refuses
        return F.multi_margin_loss(input, target, p, margin, weight, size_average, reduce, reduction)  # type: ignore[arg-type]
    return multi_margin_loss(input, target, p, margin, weight, _REDUCTIONS[reduction])


def adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """log p[t] = log p[cluster of t] + log p[t | cluster], each of all rows; torch takes the rows of a cluster out.

    Where t is no class, torch's own raises.
    """
    if (input_.dim(), target_.dim()) not in ((2, 1), (1, 0)):
        return _ADAPTIVE(self, input_, target_)
    x, t = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    if ((t < 0) | (t >= self.n_classes)).any():
        raise RuntimeError(f"Target values should be in [0, {self.n_classes - 1}]")
    place, inside = t.clamp(max=self.shortlist_size - 1), torch.zeros_like(x[:, 0])
    for i, (low, high) in enumerate(itertools.pairwise(self.cutoffs)):
        here = (t >= low) & (t < high)
        of_cluster = F.log_softmax(self.tail[i](x), dim=1).gather(1, (t - low).clamp(0, high - low - 1).unsqueeze(1))
        inside = torch.where(here, of_cluster.squeeze(1), inside)
        place = torch.where(here, self.shortlist_size + i, place)
    output = inside + F.log_softmax(self.head(x), dim=1).gather(1, place.unsqueeze(1)).squeeze(1)
    loss = (-output).mean()
    return adaptive_output(output if target_.dim() else output.squeeze(0), loss)


_ADAPTIVE = nn.AdaptiveLogSoftmaxWithLoss.forward


@decomposition("multilabel_margin_loss.default")
def multilabel_margin_loss(x: Tensor, t: Tensor, reduction: int = _MEAN) -> Tensor:
    """Σ_{k, c∉t} max(0, 1 - x[t_k] + x[c]) / C over the labels t_k before the first -1."""
    count = x.shape[-1]
    places = torch.arange(count, device=x.device)
    end = torch.where(t == -1, places, count).amin(-1, keepdim=True)
    is_label = places < end
    labels = torch.where(is_label, t, 0)
    positive = ((labels.unsqueeze(-1) == places) & is_label.unsqueeze(-1)).any(-2)
    terms = torch.relu(1 - x.gather(-1, labels).unsqueeze(-1) + x.unsqueeze(-2)) / count
    wanted = is_label.unsqueeze(-1) & ~positive.unsqueeze(-2)
    return _reduce(torch.where(wanted, terms, torch.zeros_like(terms)).sum((-2, -1)), reduction)


def _negative_log_likelihood(
    x: Tensor, t: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(-w[t] x[t], Σ w[t]), both without the ignored targets; the mean divides the one by the other."""
    dim = _class_dim(x)
    kept = t != ignore_index
    safe = torch.where(kept, t, 0)
    values = -x.gather(dim, safe.unsqueeze(dim)).squeeze(dim)
    zero = torch.zeros_like(values)
    scale = torch.ones_like(values) if weight is None else weight[safe]
    values = torch.where(kept, values if weight is None else values * scale, zero)
    total = torch.where(kept, scale, zero).sum()
    if reduction == _NONE:
        return values, total
    return (values.sum() / total if reduction == _MEAN else values.sum()), total


@decomposition("nll_loss.default", "nll_loss_nd.default", "nll_loss2d.default")
def nll_loss(
    x: Tensor, t: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Tensor:
    """-w[t] x[t] for x [N, C, ..] and t [N, ..]; the mean is weighted by w[t]."""
    return _negative_log_likelihood(x, t, weight, reduction, ignore_index)[0]


@decomposition("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss_forward(
    x: Tensor, t: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """`nll_loss` and the total weight."""
    return _negative_log_likelihood(x, t, weight, reduction, ignore_index)


@decomposition("cross_entropy_loss.default")
def cross_entropy_loss(
    x: Tensor,
    t: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-Σ_c w[c] q[c] log softmax(x)[c], where q is t (probabilities), or onehot(t), smoothed to (1 - ε) q + ε/C."""
    dim = _class_dim(x)
    log_p = torch.log_softmax(x, dim)
    count = x.shape[dim]
    if t.is_floating_point():
        q = t if label_smoothing == 0 else t * (1 - label_smoothing) + label_smoothing / count
        terms = log_p * q if weight is None else log_p * q * _along_classes(weight, x)
        return _reduce(-terms.sum(dim), reduction)
    loss, total = _negative_log_likelihood(log_p, t, weight, reduction, ignore_index)
    if label_smoothing == 0:
        return loss
    smooth = -(log_p if weight is None else log_p * _along_classes(weight, x)).sum(dim)
    smooth = smooth.masked_fill(t == ignore_index, 0)
    if reduction != _NONE:
        smooth = smooth.sum()
    if reduction == _MEAN:
        smooth = smooth / total
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / count)
