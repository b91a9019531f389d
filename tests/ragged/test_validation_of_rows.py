"""`step.validate` of samples that are rows: a loop over the losses of the whole batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Norms
from psg_fx.errors import BadArgument
from psg_fx.reference.batch import Batch as Cut
from psg_fx.reference.loop import reference_grads
from psg_fx.reference.validate import validate
from support import bags_of_words, graphs_of_nodes, packed
from support.expected import directions
from support.graphs_of_nodes import GIN, CountingGIN, EdgeMLP, graphs
from support.rows_of_samples import Batch, RowsTruth, everything
from support.selection import one_in

MANY: dict[str, tuple[Any, Any, Batch]] = {
    "graphs": (lambda: graphs_of_nodes.made(EdgeMLP), graphs_of_nodes.losses, graphs(*graphs_of_nodes.MANY[1])),
    "one graph": (lambda: graphs_of_nodes.made(GIN), graphs_of_nodes.losses, graphs([6], [5])),
    "mean": (lambda: graphs_of_nodes.made(GIN), F.cross_entropy, graphs(*graphs_of_nodes.MANY[0])),
    "documents": (lambda: packed.made(depth=1), packed.losses, packed.documents([3, 0, 5, 2], "shuffled")),
    "bags": (lambda: bags_of_words.Bags(mode="mean").double(), F.cross_entropy, bags_of_words.bags([3, 0, 2], False)),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_the_loop_is_that_over_single_samples(name: str) -> None:
    """To rounding: pointers renumbered, ids all zero, as the tests' own oracle cuts them out."""
    make, loss_fn, batch = MANY[name]
    torch.manual_seed(0)
    model = make()
    truth = RowsTruth(model, loss_fn, batch)
    found, grads = reference_grads(model, loss_fn, batch.whole.inputs, batch.whole.targets, batch_dim=batch.batch_dim)
    torch.testing.assert_close(found, truth.losses, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grads, truth.grads, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "of"), one_in(6, [(n, of) for of in ("groups", "samples") for n in ("graphs", "mean", "documents")])
)
def test_every_quantity_is_compared(name: str, of: str) -> None:
    make, loss_fn, batch = MANY[name]
    torch.manual_seed(0)
    model = make()
    truth, asked = RowsTruth(model, loss_fn, batch), everything(0.3)
    step = psg_fx.transform(model, loss_fn, batch_dim=batch.batch_dim, quantities=asked, backend="eager")
    given: dict[str, Any] = {} if of == "samples" else {"groups": [1, 0, 1, -1], "num_groups": 3}
    count = given.get("num_groups", batch.count)
    report = step.validate(
        batch.whole.inputs, batch.whole.targets, weights=torch.linspace(-1, 2, count, dtype=torch.float64),
        directions=directions(truth.grads, 2), tolerance=1e-10, **given,
    )  # fmt: skip
    assert report.ok, report
    assert {row.asked for row in report.rows} >= {"losses", *(q.field for q in asked)}
    assert report.worst.max_error < 1e-10
    assert report.vmap == "does not take samples that are rows; the loop is over the losses of the whole batch"
    assert "vmap: does not take samples that are rows" in str(report)


def test_buffers_and_parameters_are_left_alone() -> None:
    model, batch = graphs_of_nodes.made(CountingGIN).float(), graphs([3, 4], [3, 4])
    x, *others = batch.whole.inputs
    before = {name: t.clone() for name, t in model.state_dict().items()}
    losses, grads = reference_grads(
        model, graphs_of_nodes.losses, (x.float(), *others), batch.whole.targets, batch_dim=batch.batch_dim
    )
    assert losses.dtype == grads["head.weight"].dtype == torch.float64
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name


def test_a_wrong_answer_is_found() -> None:
    model, batch = graphs_of_nodes.made(GIN), graphs([3, 2, 5, 2], [4, 3, 7, 1], "shuffled")
    given = batch.whole.inputs, batch.whole.targets
    step = psg_fx.transform(
        model, graphs_of_nodes.losses, batch_dim=batch.batch_dim, quantities=Grads(), backend="eager"
    )

    def spoiled(*call: Any) -> Any:
        out = step(*call)
        out.grads["head.bias"][2] += 1e-3
        return SimpleNamespace(losses=out.losses, grads=out.grads)

    report = validate(spoiled, model, graphs_of_nodes.losses, *given, batch_dim=batch.batch_dim)
    assert [(r.parameter, r.verdict, r.worst_sample) for r in report.rows if r.verdict != "ok"] == [
        ("head.bias", "WRONG", 2)
    ]


def test_num_samples() -> None:
    class NodeLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:, 0]

    def loss(out: Tensor, ids: Tensor, values: Tensor, count: int) -> Tensor:
        return values.new_zeros(count).index_add(0, ids, (out - values).square())

    x, _, ids, _ = graphs([3, 1, 5, 2], [0, 0, 0, 0], "shuffled").whole.inputs
    rows = psg_fx.Rows("ids")
    step = psg_fx.transform(
        graphs_of_nodes.made(NodeLoss), loss, batch_dim=(rows, {"ids": rows, "values": rows, "count": 0}),
        quantities=[Norms(), ClippedSum(0.5)], backend="eager",
    )  # fmt: skip
    targets = {"ids": ids, "values": torch.randn(11).double(), "count": 4}
    report = step.validate(x, targets, num_samples=4, tolerance=1e-10)
    assert report.ok, report


@pytest.mark.slow
def test_a_mean_over_samples_whose_targets_are_rows() -> None:
    """The loss of one sample cannot be had from it: said, with the way out, which is taken."""

    def mean(out: Tensor, **targets: Any) -> Tensor:
        return packed.losses(out, **targets).mean()

    batch = packed.documents([3, 5, 2])
    model = packed.made(depth=1)
    step = psg_fx.transform(model, mean, batch_dim=batch.batch_dim, quantities=MeanGrad(), backend="eager")
    with pytest.raises(BadArgument, match=r"one number, and its targets hold rows(.|\n)*return the losses \[B\]"):
        step.validate(batch.whole.inputs, batch.whole.targets)
    each = psg_fx.transform(model, packed.losses, batch_dim=batch.batch_dim, quantities=MeanGrad(), backend="eager")
    assert each.validate(batch.whole.inputs, batch.whole.targets, tolerance=1e-10).ok


def test_rows_are_not_cut() -> None:
    batch = graphs([3, 2], [4, 3])
    with pytest.raises(BadArgument, match="samples are rows, which lie anywhere"):
        Cut.of(batch.whole.inputs, batch.whole.targets, batch.batch_dim)
