"""`flex_attention` is exact with functions of scores and masks, held against its definition score by score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import psg_fx
from support.oracle import loop_grads

X, Y = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [2, 3, 3, 4, 4], [5, 5, 5, 5, 5]])


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[..., Tensor], mask: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp and the largest score of each query, one score at a time; 0 where all are masked."""
    out, lse, largest = [], [], []
    group = q.shape[1] // k.shape[1]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])):
        scores = []
        for j in torch.arange(k.shape[2]):
            s = score((q[b, h, i] * k[b, h // group, j]).sum() / math.sqrt(q.shape[-1]), b, h, i, j)
            scores.append(s if mask(b, h, i, j) else s.detach() * 0 - math.inf)
        row = torch.stack(scores)
        some = row.isfinite().any()
        out.append(row.softmax(0) @ v[b, h // group] if some else v.new_zeros(v.shape[-1]))
        lse.append(row.logsumexp(0) if some else row.new_zeros(()))
        largest.append(row.max() if some else row.new_zeros(()))
    return torch.stack(out).view(*q.shape[:3], -1), *(torch.stack(s).view(q.shape[:3]) for s in (lse, largest))


class Attention(nn.Module):
    """Two heads of queries, one of keys; learned distances; each document for itself, later places masked."""

    def __init__(self, own: Callable[..., Any] | None = None, first: int = 0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)
        self.distance, self.own, self.first = nn.Parameter(torch.randn(2, 9)), own, first

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (4, 4)).transpose(1, 2).split((2, 1, 1), dim=1)

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + self.distance[h, j - i + 4] - 0.1 * (i - j).abs()

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (documents[b, i] == documents[b][j]) & (i >= j + self.first) & (documents[b, 0] <= i + 9)

        if self.own is None:
            mixed, lse, largest = by_definition(q, k, v, score, mask)
        else:
            blocks = create_block_mask(mask, x.shape[0], None, length, length, device="cpu")
            aux = AuxRequest(lse=True, max_scores=True)
            mixed, found = self.own(
                q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True, return_aux=aux
            )  # fmt: skip
            empty = found.lse == -math.inf
            lse, largest = (t.masked_fill(empty, 0.0) for t in (found.lse, found.max_scores))
        return self.out(mixed.transpose(1, 2).flatten(2)) + (lse * largest).sum(1).unsqueeze(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "backend"),
    [
        pytest.param(0, "inductor", id="causal-inductor", marks=pytest.mark.inductor),
        pytest.param(1, "eager", id="rows without a key-eager"),
        pytest.param(0, "eager", id="causal-eager", marks=pytest.mark.rest),
        pytest.param(1, "inductor", id="rows without a key-inductor", marks=[pytest.mark.inductor, pytest.mark.rest]),
    ],
)
def test_scores_and_masks(first: int, backend: str) -> None:
    model = Attention(flex_attention if first else torch.compile(flex_attention), first).double()
    step = psg_fx.transform(model, _loss, backend=backend)
    out = step((X, DOCUMENTS), Y)
    model.own = None
    losses, grads = loop_grads(model, _loss, (X, DOCUMENTS), Y)
    torch.testing.assert_close(out.losses, losses)
    torch.testing.assert_close(out.grads, grads)


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target, reduction="none").mean((1, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_scores_of_half_precision_are_in_single_precision() -> None:
    q = torch.randn(2, 1, 4, 8, dtype=torch.bfloat16)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            return flex_attention(x, x, x, scale=0.5)

    out = psg_fx.transform(Plain(), lambda out: out.flatten(1).sum(1), backend="eager")(q)
    with torch.no_grad():
        assert torch.equal(out.losses, flex_attention(q, q, q, scale=0.5).flatten(1).sum(1))


class Masked(nn.Module):
    def __init__(self, mask: Callable[..., Tensor], use: Callable[[Any], Any] = lambda m: m, size: int = 5) -> None:
        super().__init__()
        self.layer, self.mask, self.use, self.size = nn.Linear(8, 8), mask, use, size

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).unsqueeze(1)
        blocks = create_block_mask(self.mask, None, None, self.size, self.size, device="cpu")
        return flex_attention(q, q, q, block_mask=self.use(blocks)).squeeze(1)


class ByPlaces(nn.Module):
    """Attention under a mask and with biases that functions of places make, in torch's mode for such functions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(8, 24), nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def of_place(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = (documents[b, i] == documents[b, j]) | (documents[b, 0] == 5)
            return torch.where(same, self.bias[j - i + 4], -math.inf)

        each = torch.vmap(torch.vmap(torch.vmap(of_place, (None, None, 0)), (None, 0, None)), (0, None, None))
        places = torch.arange(x.shape[1])
        with TransformGetItemToIndex():
            mask = each(torch.arange(x.shape[0]), places, places)
        return F.scaled_dot_product_attention(*self.qkv(x).split(8, -1), attn_mask=mask)


def test_functions_of_places_by_vmap() -> None:
    torch.manual_seed(0)
    model = ByPlaces().double()
    step = psg_fx.transform(model, _loss, quantities=psg_fx.Grads(), backend="eager")
    out = step((X, DOCUMENTS), Y)
    losses, grads = loop_grads(model, _loss, (X, DOCUMENTS), Y)
    torch.testing.assert_close(out.losses, losses)
    for name, value in grads.items():
        torch.testing.assert_close(out.grads[name], value)


def test_a_mask_that_tells_samples_apart_is_refused() -> None:
    step = psg_fx.transform(Masked(lambda b, h, i, j: (b > 0) | (i >= j)).double(), _loss, backend="eager")
    with pytest.raises(psg_fx.SamplesMixed, match="numbers of the samples"):
        step(X, Y)


def test_blocks_of_a_mask_are_not_read() -> None:
    model = Masked(lambda b, h, i, j: i >= j, lambda mask: mask if mask.kv_num_blocks.sum() else None)
    with pytest.raises(psg_fx.NotYetSupported, match="reads kv_num_blocks of a BlockMask"):
        psg_fx.transform(model.double(), _loss, backend="eager")(X, Y)


def test_a_mask_of_another_length_is_an_error_of_the_code() -> None:
    model = Masked(lambda b, h, i, j: i >= j, size=7)
    with pytest.raises(psg_fx.BadArgument, match=r"the mask is for \(7, 7\) queries and keys, and there are \(5, 5\)"):
        psg_fx.transform(model.double(), _loss, backend="eager")(X, Y)
