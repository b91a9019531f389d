"""`nn.EmbeddingBag` on bags of any length: each bag is a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import psg_fx
from psg_fx.errors import BadArgument
from support.bags_of_words import Bags, bags, losses
from support.rows_of_samples import check, usual

MODES: list[dict[str, Any]] = [
    {"mode": "sum"}, {"mode": "mean"}, {"mode": "max"}, {"mode": "sum", "weighted": True},
    {"mode": "mean", "padding_idx": 2}, {"mode": "max", "padding_idx": -1},
]  # fmt: skip
DEMANDING = MODES[3:4]


@pytest.mark.parametrize(
    ("given", "last"),
    [
        pytest.param(given, last, id=f"{given}-{last}", marks=[] if given in DEMANDING and last else pytest.mark.rest)
        for given in MODES
        for last in (False, True)
    ],
)
def test_every_quantity(given: dict[str, Any], last: bool) -> None:
    check_mode(given, last, None)


@pytest.mark.parametrize(
    ("given", "last"),
    [(given, bool(k % 2)) for k, given in enumerate(MODES) if given not in DEMANDING]
    + [pytest.param(given, False, marks=pytest.mark.rest) for given in DEMANDING],
    ids=str,
)
def test_the_usual_quantities(given: dict[str, Any], last: bool) -> None:
    check_mode(given, last, usual())


def check_mode(given: dict[str, Any], last: bool, quantities: Any) -> None:
    """Bags without entries among them; last: whether the offsets say where the last one ends."""
    torch.manual_seed(0)
    model = Bags(include_last_offset=last, **given).double()
    many = [[3, 0, 2, 4], [5], [0, 0, 3], [1, 1, 1, 1, 1, 0]]
    batches = [bags(lengths, last, seed) for seed, lengths in enumerate(many)]
    step = check(model, losses, batches, quantities=quantities)
    assert "proven: rows of input_0, input_2 point to their own sample by their ids" in step.explain()


def test_offsets_that_are_none() -> None:
    """In the first call and in later ones."""
    given = bags([3, 0, 2, 4], False)
    step = psg_fx.transform(
        Bags(mode="sum").double(), losses, batch_dim=given.batch_dim, quantities=psg_fx.Norms(), backend="eager"
    )
    ids, _, weights = given.whole.inputs
    for place, offsets in ((2, [0, 4, 3, 5]), (0, [1, 3, 3, 5]), (3, [0, 3, 3, 12]), (1, [0, -1, 3, 5])):
        with pytest.raises(BadArgument, match=f"do not say where samples begin(.|\n)*entry {place} breaks it"):
            step((ids, torch.tensor(offsets), weights), given.whole.targets)
        step(given.whole.inputs, given.whole.targets)


def test_other_offsets_than_those_of_the_rows() -> None:
    """What the model makes of other offsets than those that were named is not what a sample alone has."""

    class Other(Bags):
        def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return super().forward(ids, (offsets + 1).clamp(max=ids.shape[0]) * (offsets > 0), weights)

    given = bags([3, 2, 4], False)
    step = psg_fx.transform(
        Other(mode="sum").double(), losses, batch_dim=given.batch_dim, quantities=psg_fx.Norms(), backend="eager"
    )
    with pytest.raises(psg_fx.NotYetSupported, match=r"index_add cannot be shown(.|\n)*of that sample alone"):
        step(given.whole.inputs, given.whole.targets)
