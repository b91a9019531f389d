"""Programs whose samples mix: per-sample gradients do not exist, and the only right answer is a refusal.

What a loop over single samples computes for them is the gradient of another loss than that of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from external.program import Problem, Program

B = 4
Loss = Callable[..., Tensor]


def programs() -> list[Program]:
    """Functions between two layers, layers that mix, and losses over the batch."""
    between = [made(name, lambda f=f: Problem(Between(f), torch.randn(B, 6))) for name, f in BETWEEN.items()]
    layers = [made(name, make) for name, make in LAYERS.items()]
    losses = [made(name, lambda f=f: with_targets(f), "mixing losses") for name, f in LOSSES.items()]
    return between + layers + losses


def made(name: str, make: Callable[[], Problem], family: str = "mixing") -> Program:
    """The row, in float64."""

    def doubled() -> Problem:
        problem = make()
        problem.model.double()
        inputs, targets = (x.double() if isinstance(x, Tensor) else x for x in (problem.inputs, problem.targets))
        return Problem(problem.model, inputs, targets, problem.loss_fn, problem.batch_dim, problem.out_dim)

    return Program(f"mixing/{name}", doubled, mixes="mix", family=family)


class Between(nn.Module):
    """A function of the batch `[B, 6]` between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(6, 6), function, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def whitened(h: Tensor) -> Tensor:
    """Decorrelated over the batch by the Cholesky factor of its covariance."""
    centred = h - h.mean(0)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(centred.t() @ centred + torch.eye(6, dtype=h.dtype)))


def sinkhorn(h: Tensor) -> Tensor:
    """Rows and columns normalised in turn, as in balanced assignment."""
    for _ in range(3):
        h = h.log_softmax(0).log_softmax(1)
    return h.exp()


def nearest(h: Tensor) -> Tensor:
    """Each sample plus its nearest other sample."""
    distances = torch.cdist(h, h) + 1e9 * torch.eye(h.shape[0], dtype=h.dtype)
    return h + h[distances.argmin(1)]


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "centred by the batch": lambda h: h - h.mean(0),
    "standardised by the batch": lambda h: (h - h.mean(0)) / (h.std(0) + 1e-3),
    "scaled by the norm of the batch": lambda h: h / h.norm(),
    "quantised by the batch maximum": lambda h: h + (h / h.detach().abs().max() * 7).round().detach(),
    "softmax over the batch": lambda h: h.softmax(0),
    "log-sum-exp over the batch": lambda h: h - h.logsumexp(0),
    "sorted over the batch": lambda h: h.sort(0)[0],
    "ranked over the batch": lambda h: h * h.argsort(0).argsort(0),
    "largest of the batch": lambda h: h.max(0)[0] - h,
    "cumulative sum over the batch": lambda h: h.cumsum(0),
    "flipped batch": lambda h: h.flip(0),
    "rolled batch": lambda h: h + h.roll(1, 0),
    "flat roll": lambda h: h.roll(1),
    "shuffled batch": lambda h: h[torch.randperm(h.shape[0])],
    "mixup": lambda h: 0.7 * h + 0.3 * h[torch.randperm(h.shape[0])],
    "sorted by score": lambda h: h[h.sum(1).argsort()],
    "fft over the batch": lambda h: torch.fft.fft(h, dim=0).real,
    "fft of both dims": lambda h: torch.fft.fft2(h).real,
    "Gram matrix": lambda h: h @ h.T @ h,
    "attention over the batch": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "outer differences": lambda h: (h.unsqueeze(0) - h.unsqueeze(1)).abs().sum(1),
    "nearest neighbour": nearest,
    "whitened": whitened,
    "Sinkhorn": sinkhorn,
    "first sample as reference": lambda h: h - h[:1],
    "layer norm over the batch": lambda h: F.layer_norm(h, h.shape),
    "fold in a wrong order": lambda h: h.reshape(2, -1, 3).transpose(0, 1).reshape(-1, 6),
    "transposed view": lambda h: h.t().reshape(-1, 6),
    "number of the sample": lambda h: h * torch.arange(h.shape[0])[:, None],
    "tokens of all samples in one list": lambda h: F.avg_pool1d(h.reshape(1, 1, -1), 3, 1, 1).reshape(h.shape),
    "dropped by the batch": lambda h: torch.where(h > h.median(), h, 0.0),
}
"""`[B, 6] -> [B, 6]`, of the samples together."""


class Queue(nn.Module):
    """A layer whose buffer follows a mean over the batch, and is taken from the output: a centre."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.centre.mul_(0.9).add_(0.1 * out.detach().mean(0))  # type: ignore[operator]
        return out - self.centre  # type: ignore[no-any-return]


class Discrimination(nn.Module):
    """Minibatch discrimination: the distances of a sample to all others are features."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.3 * torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.table
        return torch.exp(-(h[:, None] - h[None]).abs().sum(2)).sum(1, keepdim=True) * h


class Capacity(nn.Module):
    """Two experts; each takes only its two best samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        scores, out = self.router(x).softmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            best, rows = scores[:, k].topk(2)
            out = out.index_add(0, rows, best[:, None] * expert(x[rows]))
        return out


class Recurrent(nn.Module):
    """A recurrent layer that takes dim 0 for time, on a batch that has its samples there."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]  # type: ignore[no-any-return]


def stacked(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def images(*layers: nn.Module) -> Problem:
    return Problem(stacked(*layers), torch.randn(B, 2, 5, 5))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)


LAYERS: dict[str, Callable[[], Problem]] = {
    "BatchNorm1d": lambda: Problem(stacked(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(B, 6)),
    "BatchNorm2d": lambda: images(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
    "BatchNorm2d without statistics": lambda: images(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
    "BatchNorm2d without statistics, eval": lambda: images(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False).eval()
    ),
    "BatchNorm3d": lambda: Problem(stacked(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), torch.randn(B, 1, 3, 3, 3)),
    "running mean in a buffer": lambda: Problem(Queue(), torch.randn(B, 6)),
    "minibatch discrimination": lambda: Problem(Discrimination(), torch.randn(B, 6)),
    "experts with a capacity": lambda: Problem(Capacity(), torch.randn(B, 6)),
    "LSTM over the batch": lambda: Problem(Recurrent(nn.LSTM), torch.randn(B, 3, 6)),
    "encoder layer over the batch": lambda: Problem(encoder_layer(), torch.randn(B, 3, 6)),
    "softmax of the wrong dim": lambda: Problem(stacked(nn.Linear(6, 4), nn.Softmax(0)), torch.randn(B, 6)),
}
"""Models with their batch."""


def with_targets(loss: Loss) -> Problem:
    """A small network on two views of a batch, `[B, 6]`."""
    return Problem(stacked(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), torch.randn(B, 6), torch.randn(B, 6), loss)


def correlation(o: Tensor, y: Tensor) -> Tensor:
    """`[6, 6]`, over the batch."""
    o, y = ((v - v.mean(0)) / (v.std(0) + 1e-3) for v in (o, y))
    return o.t() @ y / o.shape[0]


def triplets(o: Tensor, y: Tensor) -> Tensor:
    """For each sample the hardest other one of the batch."""
    distances = torch.cdist(o, y)
    same = torch.eye(o.shape[0], dtype=torch.bool)
    return F.relu(distances.diagonal() - distances.masked_fill(same, 1e9).amin(1) + 1.0).mean()


def clip(o: Tensor, y: Tensor) -> Tensor:
    """Contrastive in both directions."""
    logits, own = F.normalize(o) @ F.normalize(y).t(), torch.arange(o.shape[0])
    return F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)


def weighted(o: Tensor, y: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
    """Losses of samples, weighted by what all of them are."""
    each = (o - y).square().mean(1)
    return (weights(each.detach()) * each).sum()


def concordance(o: Tensor, y: Tensor) -> Tensor:
    """1 - the concordance correlation coefficient of the batch."""
    joint = ((o - o.mean()) * (y - y.mean())).mean()
    return 1 - 2 * joint / (o.var() + y.var() + (o.mean() - y.mean()).square())


LOSSES: dict[str, Loss] = {
    "contrastive loss": clip,
    "cross-correlation loss": lambda o, y: (correlation(o, y) - torch.eye(6, dtype=o.dtype)).square().sum(),
    "covariance loss": lambda o, y: F.mse_loss(o, y) + (o.t() @ o).square().mean(),
    "hardest triplets": triplets,
    "divided by a batch statistic": lambda o, y: ((o - y).square() / (o - y).detach().std()).mean(),
    "explained variance": lambda o, y: (o - y).square().sum() / (y - y.mean(0)).square().sum(),
    "concordance": concordance,
    "pairwise ranking": lambda o, y: F.softplus(-(o[:, :1] - o[:, 0]) * (y[:, :1] - y[:, 0])).mean(),
    "weighted by its share": lambda o, y: weighted(o, y, lambda each: each / each.sum()),
    "weighted by a softmax": lambda o, y: weighted(o, y, lambda each: each.softmax(0)),
    "weighted by its rank": lambda o, y: weighted(o, y, lambda each: each.argsort().argsort().to(each.dtype)),
    "above the mean only": lambda o, y: weighted(o, y, lambda each: (each > each.mean()).to(each.dtype)),
    "Cox": lambda o, y: (o[:, 0].logsumexp(0) - o[:, 0]).mean(),
}
"""`loss(output, target)`, no sum or mean of losses of single samples."""
