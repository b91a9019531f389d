"""Values that a mask places among those of a sample (`masked_scatter`), as features of images among tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import PsgError, SamplesMixed
from support import oracle
from support.programs import B, Row, check_answer, square

STEPS, WIDTH, PLACED, MARK = 5, 4, 2, 9


class Placing(nn.Module):
    """Tokens `[B, 5]`, of which two of each sample stand for features of its image, `[B, 2, 3]`."""

    def __init__(self, place: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.image, self.head = nn.Embedding(10, WIDTH), nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.place = place

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        h = self.place(self.embedding(ids), ids == MARK, self.image(image).tanh())
        out: Tensor = self.head(h.cumsum(1).tanh())
        return out


def drawn(size: int) -> tuple[tuple[Tensor, Tensor], None]:
    """Marks in other places for each sample."""
    ids = torch.randint(MARK, (size, STEPS))
    for row in ids:
        row[torch.randperm(STEPS)[:PLACED]] = MARK
    return (ids, torch.randn(size, PLACED, 3, dtype=torch.float64)), None


def expanded(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.masked_scatter(mask.unsqueeze(-1).expand_as(h), values)


def broadcast(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.masked_scatter(mask[..., None], values.flatten(0, 1))


def entries(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.masked_scatter(mask[..., None].repeat(1, 1, WIDTH), values.flatten())


def shared(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.masked_scatter(torch.tensor([0, 1, 0, 0, 1])[:, None].bool(), values)


def in_place(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    h = h * 2
    h.masked_scatter_(mask[..., None], values)
    return h


def numbers(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h + h[..., 0].masked_scatter(mask, values[..., 0]).unsqueeze(-1)


def in_rows(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    rows = h.flatten(0, 1).masked_scatter(mask.flatten()[:, None], values.flatten(0, 1))
    return rows.view(-1, STEPS, WIDTH)


def written(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    h = h * 2
    h[mask] = values.reshape(-1, WIDTH)
    return h


def written_numbers(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    h = h * 2
    h[..., 1][mask] = values[..., 0].flatten()
    return h


def written_rows(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.flatten(0, 1).index_put((mask.flatten(),), values.flatten(0, 1)).view(-1, STEPS, WIDTH)


WRITTEN = (written, written_numbers, written_rows)
WAYS = (expanded, broadcast, entries, shared, in_place, numbers, in_rows, *WRITTEN)


@pytest.mark.parametrize("place", WAYS)
def test_equals_the_loop(place: Callable[..., Tensor]) -> None:
    check_answer(Row(lambda: Placing(place), square, drawn))


def test_other_counts_are_refused_at_the_call() -> None:
    """Both samples together have as many places as values, which the code itself would take."""
    (ids, image), _ = drawn(B)
    wrong = ids.clone()
    wrong[0], wrong[1] = MARK, 1
    wrong[0, 4] = 1
    model = Placing(broadcast).double()
    assert model(wrong, image).isfinite().all()
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms(), backend="eager")
    losses, _ = oracle.loop_grads(model, square, (ids, image), None)
    torch.testing.assert_close(step((ids, image)).losses, losses)
    with pytest.raises(SamplesMixed) as error:
        step((wrong, image))
    lines = str(error.value).splitlines()
    assert lines[0] == "values that a mask places mix samples in this batch, so per-sample gradients do not exist"
    assert "test_placed_values.py:" in lines[1]
    assert "one of them has more or fewer places than values" in lines[2]
    assert "checked at every call: each sample has as many places as values (" in step.explain()
    with pytest.raises(SamplesMixed, match="more or fewer places"):
        psg_fx.microbatch(step, 2)((wrong, image))


def test_values_of_one_sample_may_be_left_over() -> None:
    """As torch has it; two samples would take each other's."""
    (ids, image), _ = drawn(2)
    ids[ids == MARK] = 1
    ids[:, 2] = MARK
    model = Placing(broadcast).double()
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms(), backend="eager")
    losses, _ = oracle.loop_grads(model, square, (ids[:1], image[:1]), None)
    torch.testing.assert_close(step((ids[:1], image[:1])).losses, losses)
    with pytest.raises(SamplesMixed, match="more or fewer places"):
        step((ids, image))
    with pytest.raises(SamplesMixed, match="more or fewer places"):
        step((torch.full_like(ids[:1], MARK), image[:1]))


@pytest.mark.parametrize("place", WRITTEN)
def test_a_write_has_as_many_places_as_values(place: Callable[..., Tensor]) -> None:
    """Also of one sample: torch refuses others."""
    step = psg_fx.transform(Placing(place).double(), square, quantities=psg_fx.Norms(), backend="eager")
    (ids, image), _ = drawn(B)
    assert step((ids, image)).norms.shape == (B,)
    for more in (MARK, 1):
        wrong = ids.clone()
        wrong[0] = more
        for size in (B, 1):
            with pytest.raises(SamplesMixed, match="more or fewer places"):
                step((wrong[:size], image[:size]))


@pytest.mark.slow
@pytest.mark.inductor
def test_files_refuse_other_counts(tmp_path: Path) -> None:
    (ids, image), _ = drawn(B)
    wrong = ids.clone()
    wrong[0, :3] = MARK
    model = Placing(expanded)
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms())
    image = image.float()
    step.export(tmp_path / "step.pt2", (ids, image))
    loaded = psg_fx.load(tmp_path / "step.pt2")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    torch.testing.assert_close(loaded(state, (ids, image)).norms, step((ids, image)).norms)
    with pytest.raises(SamplesMixed, match="more or fewer places"):
        loaded(state, (wrong, image))


def with_time_first(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.transpose(0, 1).masked_scatter(mask.T[..., None], values.transpose(0, 1)).transpose(0, 1)


def of_all(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.masked_scatter(mask[..., None], values.mean(0, keepdim=True).expand_as(values))


def turned(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return h.masked_scatter(mask[..., None], values.transpose(0, 1).reshape(-1, WIDTH))


def picked(h: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Values that another mask picks, beside rows that one picks of the result."""
    kept = values[torch.ones(values.shape[:2], dtype=torch.bool)]
    h = h.masked_scatter(mask[..., None], kept)
    return h + h[mask].sum()


@pytest.mark.parametrize("place", [with_time_first, of_all, turned, picked])
def test_refused(place: Callable[..., Tensor]) -> None:
    step = psg_fx.transform(Placing(place).double(), square, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(SamplesMixed if place is not picked else PsgError):
        step(drawn(B)[0])
