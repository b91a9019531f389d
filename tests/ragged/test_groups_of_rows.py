"""Groups of samples that are rows: a user's graphs, an author's documents, against sums of single samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Grads, Gram, MeanGrad, Norms, Rows, SecondMoment
from psg_fx.errors import BadArgument, NotYetSupported, SamplesMixed
from psg_fx.step import groups as of_groups
from psg_fx.step import rows as of_rows
from support import bags_of_words, oracle, packed
from support.bags_of_words import Bags, bags
from support.expected import compare
from support.graphs_of_nodes import GCN, GIN, EdgeMLP, OneLayer, graphs, losses, made
from support.groups_of_rows import Given, GroupTruth, check
from support.rows_of_samples import Batch, RowsTruth, run

Scatter = Callable[..., None]


@pytest.fixture
def scatter(monkeypatch: pytest.MonkeyPatch) -> Scatter:
    """From here on rows of samples, or samples of groups, stay where they are, as if to move them took too much."""

    def stay(*modules: Any) -> None:
        for module in modules:
            monkeypatch.setattr(module, "fits_in_order", lambda places, rows: not places)

    return stay


USERS: list[Given] = [
    (graphs([3, 0, 5, 2], [4, 0, 7, 1], "shuffled"), [1, 0, 1, 1], None),
    (graphs([3, 2, 5, 2], [4, 3, 7, 1], "sorted", 1), [0, 0, 1, 1], None),
    (graphs([3, 0, 5, 2, 4], [4, 0, 7, 1, 0], "shuffled", 2), [2, 0, -1, 2, 0], 6),
    (graphs([6], [5], "sorted", 3), [0], 1),
    (graphs([0, 4, 0], [0, 9, 0], "sorted", 4), [1, -1, 0], 2),
    (graphs([2, 2, 2, 2, 2, 2], [3, 0, 1, 2, 3, 4], "shuffled", 5), [0, 0, 0, 1, 2, 0], None),
    (graphs([3, 2], [0, 0], "sorted", 6), [-1, -1], 3),
]
"""Users of unsorted nodes, blocks of graphs, graphs of none, one graph, users without graphs or with empty ones."""


# Grads and Gram read the cross terms; what else there is, is made of these.
CROSS = [Grads(), Norms(), ClippedSum(0.5), Gram()]


def test_every_quantity() -> None:
    """Of layers on nodes, edges and graphs, whose edges stay where they are."""
    step = check(made(EdgeMLP), losses, USERS)
    assert "onehot(groups)" in step.explain()
    assert len(step.captures) == 2, "gathered, and blocks"


@pytest.mark.rest  # other networks with the contractions of test_every_quantity
@pytest.mark.parametrize("kind", [GIN, GCN])
def test_the_usual_quantities(kind: type[nn.Module]) -> None:
    check(made(kind), losses, USERS, [Grads(), Norms(), ClippedSum(0.5), MeanGrad()])


@pytest.mark.parametrize(
    ("who", "asked"),
    [("groups", CROSS), *(pytest.param(who, None, marks=pytest.mark.rest) for who in ("rows", "groups", "both"))],
    ids=["groups-usual", "rows", "groups", "both"],
)  # both: test_bags
def test_every_quantity_of_rows_that_stay(who: str, asked: list[Any] | None, scatter: Scatter) -> None:
    """Rows, samples, or both: each axis has a layout of its own."""
    scatter(*{"rows": [of_rows], "groups": [of_groups], "both": [of_rows, of_groups]}[who])
    if asked is None:
        check(made(EdgeMLP), losses, USERS)
    step = check(made(EdgeMLP), losses, USERS[:-1] if asked is None else USERS[::2], asked)
    assert "onehot(groups)" in step.explain()


@pytest.mark.rest  # test_graphs.py has such edges without groups
def test_edges_with_ids_of_their_own() -> None:
    """Two axes of rows that are brought in order of groups."""
    ends = Rows(lambda x, edge_index, batch, count: batch[edge_index[1]], dim=1)
    dims = ((Rows("batch"), ends, Rows("batch"), 0), 0)
    many: list[Given] = [(Batch(b.whole, b.alone, dims), ids, count) for b, ids, count in USERS]
    step = check(made(EdgeMLP), losses, many, [Grads(), Norms(), ClippedSum(0.5)])
    assert "onehot" not in step.explain()


AUTHORS: list[Given] = [
    (packed.documents([3, 0, 5, 2], "sorted", 0), [1, 0, 1, -1], None),
    (packed.documents([4, 1, 2], "shuffled", 1), [3, 0, 3], 5),
    (packed.documents([6], "sorted", 2), [0], None),
]


@pytest.mark.rest  # test_every_quantity has users of graphs, test_packed.py documents
@pytest.mark.parametrize(
    ("apart", "asked"),
    [(False, CROSS), *(pytest.param(apart, None, marks=pytest.mark.rest) for apart in (False, True))],
    ids=["usual", "together", "apart"],
)
def test_documents(apart: bool, asked: list[Any] | None, scatter: Scatter) -> None:
    """The tied embedding has cross terms between two sets of rows."""
    if apart:
        scatter(of_rows, of_groups)
    check(packed.made(depth=1), packed.losses, AUTHORS if asked is None else AUTHORS[:2], asked)


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.rest), True])
def test_bags(apart: bool, scatter: Scatter) -> None:
    if apart:
        scatter(of_rows, of_groups)
    torch.manual_seed(0)
    many: list[Given] = [
        (bags([3, 0, 2, 4], False), [1, 0, 1, -1], None), (bags([5], False, 1), [0], 2),
        (bags([1, 2, 1, 1, 1, 0], False, 2), [0, 0, 1, 1, 2, 2], None),
    ]  # fmt: skip
    check(Bags(mode="mean").double(), bags_of_words.losses, many)


def test_a_loss_that_is_a_mean_and_calls_without_groups() -> None:
    """Calls with and without groups alternate; the mean gradient is that of samples in both."""
    model, (batch, ids, count) = made(OneLayer), USERS[2]
    asked = [Norms(), MeanGrad(), SecondMoment(centered=True)]
    step = psg_fx.transform(model, F.cross_entropy, batch_dim=batch.batch_dim, quantities=asked, backend="eager")
    alone, grouped = RowsTruth(model, losses, batch), GroupTruth(model, losses, USERS[2])
    for _ in range(2):
        compare(run(step, batch, alone), alone, asked, 1e-10)
        compare(run(step, batch, grouped, groups=ids, num_groups=count), grouped, asked, 1e-10)
    assert len(step.captures) == 2


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.rest), True])  # a product spreads what is not
def test_what_is_not_finite_stays_in_its_group(apart: bool, scatter: Scatter) -> None:
    """A broken node of one graph: the user of that graph is left out of the sum, no other is."""
    if apart:
        scatter(of_rows, of_groups)
    model, batch = made(OneLayer), graphs([3, 2, 5, 2], [4, 3, 7, 1], "shuffled")
    step = psg_fx.transform(
        model, losses, batch_dim=batch.batch_dim, quantities=[Norms(), ClippedSum(0.3)], backend="eager"
    )
    x, edge_index, nodes, total = batch.whole.inputs
    broken = x.clone()
    broken[(nodes == 2).nonzero()[0, 0]] = torch.nan
    for ids in ([1, 0, 1, 0], [0, 1, -1, 1], [2, 0, 1, 0]):
        truth = GroupTruth(model, losses, (batch, ids, 4))
        bad = [u for u in [ids[2]] if u >= 0]
        kept = {n: torch.stack([g[u] for u in range(4) if u not in bad]) for n, g in truth.grads.items()}
        out = step((broken, edge_index, nodes, total), batch.whole.targets, groups=ids, num_groups=4)
        assert (~out.norms.isfinite()).nonzero().flatten().tolist() == bad
        torch.testing.assert_close(dict(out.clipped_sum), oracle.clipped_sum(kept, 0.3), atol=1e-10, rtol=1e-10)


def test_what_is_refused() -> None:
    """Groups are of samples, which must not mix, and parts of a batch are still none of rows."""
    batch = graphs([3, 2, 5, 2], [4, 3, 7, 1])
    step = psg_fx.transform(made(OneLayer), losses, batch_dim=batch.batch_dim, quantities=Norms(), backend="eager")
    x, edge_index, nodes, total = batch.whole.inputs
    with pytest.raises(BadArgument, match=r"groups is of shape \(12,\)(.|\n)*each of the 4 samples"):
        step(batch.whole.inputs, batch.whole.targets, groups=nodes)
    crossing = edge_index.clone()
    crossing[0, 0] = 4
    for ids in ([0, 0, 1, 1], [1, 0, 1, -1]):  # graphs of one user must not mix either: each has a loss of its own
        with pytest.raises(SamplesMixed, match="row 0 of the rows of input_1"):
            step((x, crossing, nodes, total), batch.whole.targets, groups=ids)
    outside = nodes.clone()
    outside[5] = 4
    with pytest.raises(BadArgument, match="row 5 of the rows of input_0, input_2 belongs to no sample"):
        step((x, edge_index, outside, total), batch.whole.targets, groups=[0, 0, 1, 1])
    with pytest.raises(NotYetSupported, match="parts of rows of samples"):
        psg_fx.microbatch(step, 2)(batch.whole.inputs, batch.whole.targets, groups=[0, 0, 1, 1])


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_compiled_once(apart: bool, scatter: Scatter) -> None:
    """One compilation for all numbers of rows, samples and groups."""
    if apart:
        scatter(of_rows, of_groups)
    model, many = made(OneLayer), [USERS[0], USERS[2]]
    asked = [Norms(), ClippedSum(0.5)]
    step = psg_fx.transform(model, losses, batch_dim=many[0][0].batch_dim, quantities=asked)
    for given in many:
        batch, ids, count = given
        truth = GroupTruth(model, losses, given)
        compare(run(step, batch, truth, groups=ids, num_groups=count), truth, asked, 1e-10)
    assert sum(entry.name == "compile" for entry in step.captures[0].step.history.passes) == 1


@pytest.mark.parametrize(
    "groups", [pytest.param(None, id="samples", marks=pytest.mark.rest), pytest.param([1, 0, 1, -1], id="groups")]
)
def test_what_is_said(groups: list[int] | None, tmp_path: Path) -> None:
    """The plan names what rows are of, within its columns, and the report knows all sizes."""
    batch = graphs([3, 0, 5, 2], [4, 0, 7, 1], "shuffled")
    step = psg_fx.transform(made(EdgeMLP), losses, batch_dim=batch.batch_dim, quantities=Norms(), backend="eager")
    step(batch.whole.inputs, batch.whole.targets, groups=groups)
    said = step.explain()
    counts = "B=4" if groups is None else "G=2 groups of up to 2 samples, 4 in all"
    assert f"planned for {counts} with 10 and 12 rows" in said
    assert f"b: {'samples' if groups is None else 'groups'}, t: positions" in said
    assert f"r: rows of a {'sample' if groups is None else 'group'}" in said
    assert max(map(len, said.splitlines())) <= 120
    assert step.report(tmp_path / "step.html").stat().st_size > 10_000
