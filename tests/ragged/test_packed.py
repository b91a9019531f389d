"""Documents packed into one sequence: a mask made of ids keeps them apart, and is looked at in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import Rows
from psg_fx.errors import PsgError, SamplesMixed
from support.packed import BATCH_DIM, MANY, Packed, documents, losses, made
from support.rows_of_samples import RowsTruth, check, gradient, usual
from support.selection import selected


@pytest.mark.parametrize(
    "kind", selected([("lowest", "bool"), ("bool", "inf"), ("inf", "lowest")], {"('lowest', 'bool')"})
)
def test_every_quantity(kind: tuple[str, str]) -> None:
    """The tied embedding of tokens has cross terms between two axes of places."""
    check(made(kind=kind), losses, [documents(*given, seed=k) for k, given in enumerate(MANY)])


def one_layer(kind: Callable[..., nn.Module]) -> nn.Module:
    """The model in float64, with the same weights every time."""
    torch.manual_seed(0)
    return kind(depth=1).double()


def step(model: nn.Module, **options: Any) -> Any:
    return psg_fx.transform(
        model, losses, batch_dim=BATCH_DIM, quantities=psg_fx.Norms(), backend="eager", **options
    )  # fmt: skip


class Hole(Packed):
    """Every token sees the one six places before it."""

    def mask(self, ids: Tensor, causal: bool) -> Tensor:
        place = torch.arange(ids.shape[1])
        return super().mask(ids, causal) | (place[:, None] - place[None, :] == 6)


class CausalAlone(Packed):
    def mask(self, ids: Tensor, causal: bool) -> Tensor:
        size = ids.shape[1]
        return torch.ones(size, size, dtype=torch.bool).tril()


class Lowered(Packed):
    """A mask that lowers scores of other documents, and does not close them out."""

    def mask(self, ids: Tensor, causal: bool) -> Tensor:
        return torch.where((ids[:, :, None] == ids[:, None, :])[:, None], 0.0, -30.0).double()


@pytest.mark.parametrize(
    ("kind", "row"), [(Hole, 6), pytest.param(CausalAlone, 3, marks=pytest.mark.rest), (Lowered, 0)]
)
def test_masks_with_a_hole(kind: type[Packed], row: int) -> None:
    given = documents([3, 5, 2]).whole
    with pytest.raises(
        SamplesMixed, match=rf"packed\.py(.|\n)*row {row} of the rows(.|\n)*attends to a row of another"
    ):
        step(one_layer(kind))(given.inputs, given.targets)


def test_a_mask_that_closes_nothing_for_one_document() -> None:
    """What one batch shows is said of that batch: with one document alone there is nothing to keep apart."""
    model, one = one_layer(CausalAlone), documents([6])
    made_step = step(model)
    torch.testing.assert_close(
        made_step(one.whole.inputs, one.whole.targets).norms, RowsTruth(model, losses, one).norms
    )
    two = documents([3, 3]).whole
    with pytest.raises(SamplesMixed, match=r"packed\.py(.|\n)*row 3 of the rows(.|\n)*attends to a row of another"):
        made_step(two.inputs, two.targets)


class Written(Packed):
    """Attention as softmax and products, with a bias for each row."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = 0.5 * (q @ k.transpose(-1, -2)) + k.sum(-1).unsqueeze(-2)
        return self.weights(torch.where(mask, scores, -torch.inf)) @ v

    def weights(self, scores: Tensor) -> Tensor:
        return F.dropout(scores.softmax(-1), 0.0)


class Multihead(nn.Module):
    """torch's own module, on a sequence of all documents."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(7, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        x, apart = self.tokens(tokens), ids[0][:, None] != ids[0][None, :]
        return self.attention(x, x, x, attn_mask=apart)[0] @ self.tokens.weight.T


@pytest.mark.parametrize("kind", [pytest.param(Written, marks=pytest.mark.rest), Multihead])
def test_attention_that_is_written_out(kind: type[nn.Module]) -> None:
    check(one_layer(kind), losses, [documents(*given) for given in MANY], quantities=usual(0.3))


class WrittenHole(Written, Hole):
    """Both."""


class OverAll(Written):
    """A softmax over all rows, of which those of other documents are dropped afterwards."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1).masked_fill(~mask, 0.0) @ v


class NotMasked(Written):
    """Without a softmax."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)) @ v


MORE = [(WrittenHole, 6), (NotMasked, 0)]


@pytest.mark.parametrize(
    ("kind", "row"), [(OverAll, 0), *(pytest.param(*given, marks=pytest.mark.rest) for given in MORE)]
)
def test_weights_with_a_hole(kind: type[Packed], row: int) -> None:
    given = documents([3, 5, 2]).whole
    with pytest.raises(
        SamplesMixed, match=rf"packed\.py(.|\n)*row {row} of the rows(.|\n)*attends to a row of another"
    ):
        step(one_layer(kind))(given.inputs, given.targets)


def test_linear_attention() -> None:
    """Products of rows of one document alone need no softmax."""

    class Linear(Written):
        def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return (q @ k.transpose(-1, -2)).masked_fill(~mask, 0.0) @ v

    check(one_layer(Linear), losses, [documents([3, 5, 2])], quantities=[psg_fx.Grads()])


class OverQueries(Written):
    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


class SummedWeights(Written):
    def weights(self, scores: Tensor) -> Tensor:
        return scores.exp() / scores.exp().sum(-1, keepdim=True)


class ScaledByParameter(Written):
    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))

    def weights(self, scores: Tensor) -> Tensor:
        return (scores * self.scale).softmax(-1)


class Turned(Written):
    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1).transpose(-1, -2)


class OfData(Packed):
    """A mask that looks at the positions, which are values of samples."""

    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        x = self.tokens(tokens)
        mask = (ids[:, :, None] == ids[:, None, :]) & (positions[:, :, None] >= positions[:, None, :])
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) @ self.tokens.weight.T


class NoMask(Packed):
    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class OwnPositions(Packed):
    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1])[None] % 8, ids)


class CountedDocuments(Packed):
    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return super().forward(tokens, positions, ids) * (int(ids.max()) + 1)


REFUSED = [OverQueries, SummedWeights, ScaledByParameter, Turned, OfData, NoMask, OwnPositions, CountedDocuments]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: type[Packed]) -> None:
    given = documents([3, 5, 2]).whole
    with pytest.raises(PsgError, match=r"packed\.py"):
        step(one_layer(kind))(given.inputs, given.targets)


@pytest.mark.slow
def test_cumulated_lengths() -> None:
    """`cu_seqlens`, B + 1 numbers, say how many documents there are."""

    class Cumulated(Packed):
        def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
            place = torch.arange(tokens.shape[1])
            ids = torch.bucketize(place, cu_seqlens[1:], right=True)
            h = super().forward(tokens, positions, ids[None])[0]
            return h.new_zeros(cu_seqlens.shape[0] - 1, h.shape[1]).index_add(0, ids, torch.tanh(h))

    model, rows = one_layer(Cumulated), Rows.from_offsets("cu_seqlens", dim=1)
    made_step = psg_fx.transform(
        model, lambda out: out.square().sum(1), quantities=psg_fx.Grads(), backend="eager",
        batch_dim=({"tokens": rows, "positions": rows, "cu_seqlens": None}, None),
    )  # fmt: skip
    for lengths in ([3, 5, 2], [4, 0, 1], [2]):
        given = documents(lengths)
        cu = torch.tensor([0, *lengths]).cumsum(0)
        out = made_step({k: given.whole.inputs[k] for k in ("tokens", "positions")} | {"cu_seqlens": cu})
        for s, part in enumerate(given.alone):
            inputs = {k: part.inputs[k] for k in ("tokens", "positions")}
            loss = model(**inputs, cu_seqlens=torch.tensor([0, lengths[s]])).square().sum()
            torch.testing.assert_close(out.losses[s], loss)
            for name, g in gradient(loss, dict(model.named_parameters())).items():
                torch.testing.assert_close(out.grads[name][s], g, atol=1e-10, rtol=1e-10)
    assert len(made_step.captures) == 1
