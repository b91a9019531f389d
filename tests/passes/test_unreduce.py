"""The losses of the samples equal, to the last digits, a loop over single samples: per-sample losses by definition."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.passes.independence.batch import batch
from psg_fx.passes.unreduce.unreduce import unreduce
from support.graphs import called, captured
from support.selection import one_in

Loss = Callable[..., Tensor]
CLASSES, TOKENS = 4, 3
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)


def model(*, tokens: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    return layers if not tokens else nn.Sequential(layers, Transposed())


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def losses_agree(module: nn.Module, loss: Loss, draw: Callable[[int], tuple[Tensor, ...]]) -> torch.fx.GraphModule:
    """`draw(B)` gives the input and the targets; captured at B = 4, run at B = 5 and B = 1."""
    torch.manual_seed(3)
    x, *targets = draw(4)
    gm = unreduce(batch(captured(module, loss, (x,), tuple(targets))))
    for size in (5, 1):
        x, *targets = draw(size)
        found = called(gm, x, *targets)[-1]
        rows = [loss(module(x[i : i + 1]), *(t[i : i + 1] for t in targets)).reshape(()) for i in range(size)]
        torch.testing.assert_close(found, torch.stack(rows), rtol=1e-12, atol=1e-12, equal_nan=True)
    last = facts.outputs(gm)[-1]
    assert last is not None
    assert facts.fact(last).samples == SampleAxis(0)
    assert not any(facts.fact(n).reduced for n in gm.graph.nodes)
    assert facts.graph_facts(gm).batch in facts.shape(last.meta["val"])[0].free_symbols
    return gm


def flat_classes(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5).double(), torch.randint(CLASSES, (size,))


def token_classes(size: int) -> tuple[Tensor, Tensor]:
    """Class 1 is often; used as ignore_index it leaves samples with different counts, and one with none at B = 5."""
    targets = torch.randint(CLASSES, (size, TOKENS))
    targets[0] = torch.tensor([2, 1, 3])
    return torch.randn(size, TOKENS, 5).double(), targets


def probabilities(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, TOKENS, 5).double(), torch.randn(size, CLASSES, TOKENS).double().softmax(1)


def real(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5).double(), torch.randn(size, CLASSES).double()


def positive(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5).double(), torch.rand(size, CLASSES).double() * 3


def binary(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5).double(), torch.randint(2, (size, CLASSES)).double()


def signs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5).double(), torch.randint(2, (size, CLASSES)).double() * 2 - 1


def one_sign(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5).double(), torch.randint(2, (size,)).double() * 2 - 1


def labels(size: int) -> tuple[Tensor, Tensor]:
    """Lists of labels ended by -1."""
    rows = torch.stack([torch.randperm(CLASSES) for _ in range(size)])
    rows[:, 2] = -1
    return torch.randn(size, 5).double(), rows


SETTINGS = list(itertools.product((False, True), repeat=5))
PAIRWISE = {"-".join(map(str, s)) for s in SETTINGS if s[3] == s[0] ^ s[1] and s[4] == s[0] ^ s[2]}
"""Of any two settings every pair of values."""


@pytest.mark.parametrize(
    ("summed", "ignored", "weighted", "smoothed", "tokens"),
    one_in(len(SETTINGS), SETTINGS, always={*PAIRWISE, "False-True-True-True-True"}),
)
def test_cross_entropy(summed: bool, ignored: bool, weighted: bool, smoothed: bool, tokens: bool) -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            o, y, WEIGHT if weighted else None, reduction="sum" if summed else "mean",
            ignore_index=1 if ignored else -100, label_smoothing=0.1 * smoothed,
        )  # fmt: skip

    losses_agree(model(tokens=tokens), loss, token_classes if tokens else flat_classes)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this version does not export it for every batch size")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_of_probabilities(reduction: str, weight: Tensor | None, label_smoothing: float) -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, weight, reduction=reduction, label_smoothing=label_smoothing)

    losses_agree(model(tokens=True), loss, probabilities)


def flattened(o: Tensor, y: Tensor) -> Tensor:
    """The way language models call it: all tokens of all samples in one dim."""
    return F.cross_entropy(o.transpose(1, 2).reshape(-1, CLASSES), y.reshape(-1), ignore_index=1)


def shifted(o: Tensor, y: Tensor) -> Tensor:
    logits = o.transpose(1, 2)[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), y[:, 1:].contiguous().view(-1), label_smoothing=0.1)


def masked_mean(o: Tensor, y: Tensor) -> Tensor:
    kept = (y != 1).double()
    return (F.cross_entropy(o, y, reduction="none") * kept).sum() / kept.sum().clamp(min=1)


@pytest.mark.parametrize("loss", [flattened, shifted, masked_mean])
def test_token_losses(loss: Loss) -> None:
    losses_agree(model(tokens=True), loss, token_classes)


def batchmean(reduction: str) -> str:
    """The mean that is one for kl_div: it divides by the batch size alone."""
    return "batchmean" if reduction == "mean" else reduction


ELEMENTWISE: dict[str, tuple[Loss, Callable[[int], tuple[Tensor, ...]]]] = {
    "mse": (F.mse_loss, real),
    "l1": (F.l1_loss, real),
    "smooth_l1": (lambda o, y, reduction: F.smooth_l1_loss(o, y, reduction=reduction, beta=0.7), real),
    "smooth_l1, beta 0": (lambda o, y, reduction: F.smooth_l1_loss(o, y, reduction=reduction, beta=0.0), real),
    "huber": (lambda o, y, reduction: F.huber_loss(o, y, reduction=reduction, delta=0.7), real),
    "bce": (lambda o, y, reduction: F.binary_cross_entropy(o.sigmoid(), y, WEIGHT, reduction=reduction), binary),
    "bce of logits": (
        lambda o, y, reduction: F.binary_cross_entropy_with_logits(
            o, y, WEIGHT, pos_weight=2 * WEIGHT, reduction=reduction
        ),
        binary,
    ),
    "kl": (lambda o, y, reduction: F.kl_div(o.log_softmax(1), y.softmax(1), reduction=batchmean(reduction)), real),
    "kl of logs": (
        lambda o, y, reduction: F.kl_div(
            o.log_softmax(1), y.log_softmax(1), reduction=batchmean(reduction), log_target=True
        ),
        real,
    ),
    "soft margin": (F.soft_margin_loss, signs),
    "poisson": (lambda o, y, reduction: F.poisson_nll_loss(o, y, full=True, reduction=reduction), positive),
    "poisson of rates": (
        lambda o, y, reduction: F.poisson_nll_loss(o.exp(), y, log_input=False, reduction=reduction),
        positive,
    ),
    "margin ranking": (
        lambda o, y, reduction: F.margin_ranking_loss(o[:, 0], o[:, 1], y, margin=0.3, reduction=reduction),
        one_sign,
    ),
    "hinge embedding": (F.hinge_embedding_loss, signs),
    "cosine embedding": (
        lambda o, y, reduction: F.cosine_embedding_loss(o, o.flip(1), y, margin=0.1, reduction=reduction),
        one_sign,
    ),
    "triplet": (
        lambda o, y, reduction: F.triplet_margin_loss(o, y, y.flip(1), margin=2.0, swap=True, reduction=reduction),
        real,
    ),
    "multi margin": (
        lambda o, y, reduction: F.multi_margin_loss(o, y, p=2, margin=0.8, weight=WEIGHT, reduction=reduction),
        flat_classes,
    ),
    "multilabel margin": (F.multilabel_margin_loss, labels),
    "multilabel soft margin": (
        lambda o, y, reduction: F.multilabel_soft_margin_loss(o, y, WEIGHT, reduction=reduction),
        binary,
    ),
    "nll": (lambda o, y, reduction: F.nll_loss(o.log_softmax(1), y, WEIGHT, reduction=reduction), flat_classes),
}


def _skip_where_not_exported(name: str) -> None:
    if name == "bce" and torch.__version__ < "2.13":
        pytest.skip("this version does not export it for every batch size")


@pytest.mark.parametrize(
    ("name", "reduction"),
    [(name, "mean") for name in ELEMENTWISE] + one_in(9, [(name, "sum") for name in ELEMENTWISE], kinds=False),
)
def test_losses_with_a_reduction(name: str, reduction: str) -> None:
    _skip_where_not_exported(name)
    function, draw = ELEMENTWISE[name]
    losses_agree(model(), lambda o, y: function(o, y, reduction=reduction), draw)


@pytest.mark.parametrize("name", ["mse", "bce", "nll", "multi margin", "hinge embedding"])
def test_losses_without_reduction_pass_through(name: str) -> None:
    _skip_where_not_exported(name)
    function, draw = ELEMENTWISE[name]

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return (
            function(o, y, reduction="none").flatten(1).sum(1)
            if o.shape == y.shape
            else function(o, y, reduction="none")
        )

    losses_agree(model(), loss, draw)


def _with_a_part(v: Tensor, other: Tensor) -> Tensor:
    v[1:] = 2 * v[:-1]
    v[0] = other[1]
    return v


REDUCTIONS: dict[str, Loss] = {
    "sum over the batch size": lambda o, y: (o - y).square().sum() / o.shape[0],
    "mean over a computed size": lambda o, y: (o - y).square().sum() / (2.0 * o.shape[0]),
    "scaled inside": lambda o, y: ((o - y).square() / o.shape[0]).sum(),
    "two steps": lambda o, y: (o - y).square().mean(0).sum(),
    "keepdim": lambda o, y: (o - y).square().mean(0, keepdim=True).sum(),
    "folded": lambda o, y: (o - y).square().reshape(-1).mean(),
    "maximum": lambda o, y: (o - y).amax(),
    "max with indices": lambda o, y: (o - y).max(0)[0].sum(),
    "sorted mean": lambda o, y: ((o - y).mean(0).sort(descending=True).values * WEIGHT).sum(),
    "largest of a mean": lambda o, y: (o - y).mean(0).topk(2).values.prod() + (o - y).mean(0).kthvalue(2).values,
    "median of whole numbers": lambda o, y: o.mean() * (y > 0).sum(0).median() * (y * 9).long().max(),
    "written into a mean": lambda o, y: _with_a_part((o - y).mean(0), o.sum(0)).square().sum(),
    "norm": lambda o, y: (o - y).norm(),
    "einsum": lambda o, y: torch.einsum("bd,bd->", o - y, o),
    "root": lambda o, y: F.mse_loss(o, y).sqrt(),
    "logsumexp": lambda o, y: (o - y).logsumexp((0, 1)),
    "variance": lambda o, y: (o - y).var() + (o - y).std(1).mean(),
    "product": lambda o, y: (o - y).prod(0).sum(),
    "stacked terms": lambda o, y: torch.stack([(o - y).abs().mean(), o.square().mean()]).sum(),
    "concatenated columns": lambda o, y: torch.cat([(o - y).mean(0), o.mean(0)]).square().sum(),
    "cosine": lambda o, y: 1 - F.cosine_similarity(o.flatten(), y.flatten(), dim=0),
    "cosine of small values": lambda o, y: F.cosine_similarity(1e-10 * o, y, dim=0).sum(),
    "dot": lambda o, y: torch.dot(o[:, 0], y[:, 0]),
    "transposed": lambda o, y: (o - y).t().square().mean(),
    "chosen": lambda o, y: torch.where(o.mean() > 0, (o - y).square().mean(), o.mean()),
    "softmax of a mean": lambda o, y: ((o - y).mean(0).softmax(0) * WEIGHT).sum(),
    "linear of a mean": lambda o, y: F.linear((o - y).mean(0), torch.ones(2, CLASSES).double()).square().sum(),
    "matmul of a mean": lambda o, y: (o - y).mean(0) @ WEIGHT,
    "broadcast of means": lambda o, y: (o.mean(0)[:, None] * y.sum(0)[:2] + o.mean()).square().sum(),
    "expanded": lambda o, y: (o - y).mean().expand(3).sum(),
    "count": lambda o, y: (o - y).sum() / torch.full((), float(CLASSES)).double() + (o > 0).sum() * 0.1,
    "zeros like a mean": lambda o, y: torch.maximum((o - y).mean(0), torch.zeros_like(o.mean(0))).sum(),
    "gathered mean": lambda o, y: (o - y).mean(0).gather(0, torch.tensor([1, 1, 2])).square().sum(),
    "normed mean": lambda o, y: F.layer_norm((o - y).mean(0), (CLASSES,), WEIGHT).square().sum() * o.mean(),
    "squeezed": lambda o, y: F.mse_loss(o[:, :1].squeeze(), y[:, 0]),
    "picked by the numbers of the samples": lambda o, y: (
        -(o.log_softmax(-1)[torch.arange(o.shape[0]), (y[:, 0] > 0).long()].mean())
    ),
    "already [B]": lambda o, y: (o - y).square().sum(1),
    "already [B, 1]": lambda o, y: (o - y).square().sum(1, keepdim=True),
    "[1]": lambda o, y: (o - y).square().mean().reshape(1),
    "[1, 1]": lambda o, y: (o - y).square().sum((0, 1), keepdim=True),
}


@pytest.mark.filterwarnings(
    "ignore:Using a target size", "ignore:var.*degrees of freedom", "ignore:std.*degrees of freedom"
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_any_reduction(name: str) -> None:
    losses_agree(model(), REDUCTIONS[name], real)


def test_several_terms() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, WEIGHT) + 0.1 * o.square().mean() + o.abs().amax() + o.logsumexp(1).mean()

    losses_agree(model(), loss, flat_classes)


def test_a_penalty_on_parameters_belongs_to_every_sample() -> None:
    module = model()

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(o, y) + 0.01 * sum(p.square().sum() for p in module.parameters())

    losses_agree(module, loss, real)


def test_a_model_with_its_own_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)), "logits": logits}

    torch.manual_seed(0)
    module = Own()
    x, y = flat_classes(4)
    gm = unreduce(batch(captured(module, lambda out: out["loss"], (x, y))))
    found = called(gm, x, y)[-1]
    expected = [module(x[i : i + 1], y[i : i + 1])["loss"] for i in range(4)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_buffers_keep_the_batch_size() -> None:
    """A counter of samples counts the batch, while the loss divides by one."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, CLASSES).double()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            size = torch.full((), 1.0, dtype=torch.float64) * x.shape[0]
            self.seen.add_(size)
            return self.linear(x) / size

    module = Counting()
    x, y = real(4)
    gm = unreduce(batch(captured(module, F.mse_loss, (x,), (y,))))
    x, y = real(5)
    seen, losses = called(gm, x, y)
    assert seen == 5
    torch.testing.assert_close(losses, (module.linear(x) - y).square().mean(1), rtol=1e-12, atol=1e-12)


def test_gradients_of_the_losses() -> None:
    """The summed losses have, sample by sample, the gradients of the loop."""
    module = model(tokens=True)
    x, y = token_classes(4)
    gm = unreduce(batch(captured(module, flattened, (x,), (y,))))
    losses = called(gm, x, y)[-1]
    parameters = list(module.parameters())
    for i in range(4):
        found = torch.autograd.grad(losses[i], parameters, retain_graph=True)
        wanted = torch.autograd.grad(flattened(module(x[i : i + 1]), y[i : i + 1]), parameters)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_saturated_bce_has_a_finite_gradient() -> None:
    x = torch.tensor([200.0, -200.0, 0.3], dtype=torch.float32)[:, None].requires_grad_()
    y = torch.tensor([[1.0], [0.0], [1.0]])
    gm = unreduce(batch(captured(lambda x: x.sigmoid(), F.binary_cross_entropy, (x,), (y,))))
    (found,) = torch.autograd.grad(called(gm, x, y)[-1].sum(), x)
    (wanted,) = torch.autograd.grad(F.binary_cross_entropy(x.sigmoid(), y, reduction="sum"), x)
    torch.testing.assert_close(found, wanted)


def refused(loss: Any) -> str:
    with pytest.raises(BadArgument) as error:
        unreduce(batch(captured(model(), loss, *[(t,) for t in real(4)])))
    return str(error.value)


def test_elements_of_a_mean_by_a_mask_are_refused_in_words() -> None:
    mask = torch.arange(CLASSES) != 1
    with pytest.raises(NotYetSupported, match="depends on the data"):
        unreduce(batch(captured(model(), lambda o, y: (o - y).mean(0)[mask].prod(), *[(t,) for t in real(4)])))


def test_a_loss_of_the_wrong_shape_is_refused() -> None:
    assert refused(lambda o, y: (o - y).square()).split("\n")[::2] == [
        "the loss is neither a scalar nor [B]",
        "  why    its shape is [B, 4]",
    ]
    assert "its shape is [B, 2]" in refused(lambda o, y: (o - y).square()[:, :2])
    assert "its shape is [4]" in refused(lambda o, y: (o - y).mean(0))
    assert "the loss does not depend on the samples" in refused(lambda o, y: torch.ones(()))


def test_without_a_loss_nothing_changes() -> None:
    gm = batch(captured(model(), None, (real(4)[0],)))
    before = gm.code
    assert unreduce(gm).code == before
