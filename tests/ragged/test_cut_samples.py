"""Packed sequences whose padding shows in samples shorter than those of the first batch, or of another class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import psg_fx
from psg_fx.errors import NotYetSupported
from psg_fx.passes.alone.lengths import cut, fewer
from support import oracle

T = 5


class OfClass(nn.Module):
    """Reads states of samples of one class alone."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rnn, self.read = nn.GRU(3, 4, batch_first=True), read

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.read(torch.where((y == 2)[:, None, None], out, 0.0))


def test_a_class_hides_nothing_of_a_padding() -> None:
    """No sample of the first batch is of the class."""
    given = torch.randn(3, T, 3, dtype=torch.float64), torch.tensor([T, 3, 4]), torch.tensor([0, 1, 0])
    step = psg_fx.transform(OfClass(lambda h: h.mean(1)).double(), lambda out: out.sum(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"where mean \([^\0]*\) gives another value"):
        step(given)
    model = OfClass(lambda h: h.sum(1).sin()).double()
    step = psg_fx.transform(model, lambda out: out.sum(), backend="eager")
    for classes in ([0, 1, 0], [2, 2, 1]):
        given = (*given[:2], torch.tensor(classes))
        _, want = oracle.loop_grads(model, lambda out: out.sum(), given)
        assert oracle.worst_error(step(given).grads, want) < 1e-10


class Labelled(nn.Module):
    """A loss at each step, with labels that are -100 behind the steps of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        losses = F.cross_entropy(out.transpose(1, 2), y[:, : out.shape[1]], reduction="none")
        return losses.sum(1) / lengths


def test_a_sample_that_is_cut_has_labels_as_its_padding_has_them() -> None:
    torch.manual_seed(0)
    model, x, lengths = Labelled().double(), torch.randn(3, T, 3, dtype=torch.float64), torch.tensor([3, T, 4])
    y = torch.where(torch.arange(T) < lengths[:, None], torch.randint(4, (3, T)), -100)
    step = psg_fx.transform(model, lambda out: out.sum(), backend="eager")
    _, want = oracle.loop_grads(model, lambda out: out.sum(), (x, lengths, y))
    assert oracle.worst_error(step((x, lengths, y)).grads, want) < 1e-10
    assert "that this does not matter was found by trying it out" in " ".join(step.explain().split())


def test_lengths_of_samples_that_are_cut() -> None:
    assert fewer(1) == []
    assert fewer(5) == [1, 2, 3, 4]
    assert fewer(100)[0] == 1
    assert len(fewer(100)) == 8
    x, mask = torch.arange(6.0).reshape(1, 6, 1), torch.tensor([[1, 1, 1, 1, 0, 0]])
    found = cut([x, mask, torch.tensor([4]), torch.tensor([3])], {(6, 4)}, 2)
    assert [t.flatten().tolist() for t in found] == [[0, 1, 5, 5, 5, 5], [1, 1, 0, 0, 0, 0], [2], [3]]
