"""A file of a step on samples that are rows gives what the step gives, and checks at every call what the step does."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import BadArgument, SamplesMixed
from psg_fx.step.loaded import LoadedStep
from support import bags_of_words, graphs_of_nodes, packed
from support.graphs_of_nodes import MANY, OneLayer, graphs
from support.programs_of_files import call_the_program
from support.rows_of_samples import Batch

pytestmark = [pytest.mark.inductor, pytest.mark.slow, pytest.mark.xdist_group("files")]


class Made:
    """A step, its model, and its file, read again."""

    def __init__(self, model: nn.Module, loss_fn: Any, batch: Batch, folder: Path) -> None:
        self.model = model
        self.step = psg_fx.transform(
            model, loss_fn, batch_dim=batch.batch_dim, quantities=[psg_fx.ClippedSum(0.3), psg_fx.Gram()],
            backend="eager", progress=False,
        )  # fmt: skip
        self.path = self.step.export(folder / "step.pt2", batch.whole.inputs, batch.whole.targets)
        self.loaded: LoadedStep = psg_fx.load(self.path)

    def run(self, inputs: Any, targets: Any, **given: Any) -> Any:
        return self.loaded(self.model.state_dict(), inputs, targets, **given)

    def compare(self, batch: Batch) -> None:
        found, expected = (f(batch.whole.inputs, batch.whole.targets) for f in (self.run, self.step))
        torch.testing.assert_close(vars(found), vars(expected), rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module", params=["program", pytest.param("compiled", marks=pytest.mark.rest)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What is compiled is the program in the file, which the ordinary run calls; test_files.py has a compiled one."""
    if request.param == "compiled":
        found: Made = request.getfixturevalue("compiled")
        return found
    with pytest.MonkeyPatch.context() as patch:
        call_the_program(patch)
        return of_graphs(tmp_path_factory.mktemp("program"))


def of_graphs(folder: Path) -> Made:
    given = graphs([3, 0, 5, 2], [4, 0, 7, 1], "shuffled")
    return Made(graphs_of_nodes.made(OneLayer), graphs_of_nodes.losses, given, folder)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Compiled for two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = of_graphs(tmp_path_factory.mktemp("rows"))
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("number", range(len(MANY)))
def test_it_gives_what_the_step_gives(made: Made, number: int) -> None:
    """Any numbers of samples, nodes and edges, in any order, with empty graphs and without edges."""
    sizes, edges, order = MANY[number]
    made.compare(graphs(sizes, edges, order, number))


def test_no_samples(made: Made) -> None:
    x, edge_index, ids, _ = graphs([3], [2]).whole.inputs
    out = made.run((x[:0], edge_index[:, :0], ids[:0], 0), torch.zeros(0, dtype=torch.int64))
    assert out.norms.shape == (0,)
    assert out.clipped_sum["head.weight"].abs().max() == 0


def test_rows_of_several_samples_do_not_meet(made: Made) -> None:
    x, edge_index, ids, count = graphs([3, 4], [3, 4]).whole.inputs
    y = torch.tensor([0, 1])
    crossing = edge_index.clone()
    crossing[0, 1] = 5
    with pytest.raises(SamplesMixed, match="row 1 of the rows of input_1 is joined with one of the rows of input_0"):
        made.run((x, crossing, ids, count), y)
    for number in (2, -1):
        outside = ids.clone()
        outside[2] = number
        with pytest.raises(BadArgument, match=r"row 2 of the rows(.|\n)*no sample|code failed on this batch"):
            made.run((x, edge_index, outside, count), y)


@pytest.mark.rest  # the program alone reads outside of its tensors
def test_rows_of_no_sample_are_refused(compiled: Made) -> None:
    x, edge_index, ids, count = graphs([3, 4], [3, 4]).whole.inputs
    outside = edge_index.clone()
    outside[0, 1] = 99
    with pytest.raises((SamplesMixed, BadArgument), match=r"row 1 of the rows|code failed on this batch"):
        compiled.run((x, outside, ids, count), torch.tensor([0, 1]))


def test_what_does_not_fit_is_refused(made: Made) -> None:
    x, edge_index, ids, count = graphs([3, 4], [3, 4]).whole.inputs
    y = torch.tensor([0, 1])
    with pytest.raises(BadArgument, match="the number of samples is 3 and 2"):
        made.run((x, edge_index, ids, 3), y)
    with pytest.raises(BadArgument, match="the number of samples is 2 and 4"):
        made.run((x, edge_index, ids, count), y, num_samples=4)
    with pytest.raises(BadArgument, match="different numbers of rows"):
        made.run((x[1:], edge_index, ids, count), y)
    with pytest.raises(BadArgument, match=r"input_1 is \[3, 7\](.|\n)*takes int64 \[2, 7\]"):
        made.run((x, torch.cat([edge_index, edge_index[:1]]), ids, count), y)
    with pytest.raises(BadArgument, match="input_0 is float32 on cpu"):
        made.run((x.float(), edge_index, ids, count), y)
    for wrong in (2.0, torch.tensor(2)):
        with pytest.raises(BadArgument, match="arranged otherwise than at the export"):
            made.run((x, edge_index, ids, wrong), y)


def test_a_sample_whose_gradient_is_not_finite_is_dropped(made: Made) -> None:
    batch = graphs([3, 2, 4], [3, 2, 4], "shuffled")
    x, edge_index, ids, count = batch.whole.inputs
    broken: Tensor = x.clone()
    broken[(ids == 1).nonzero()[0, 0]] = torch.nan
    given = (broken, edge_index, ids, count), batch.whole.targets
    found, expected = made.run(*given), made.step(*given)
    assert found.clip_factors[1] == 0
    torch.testing.assert_close(found.clipped_sum, expected.clipped_sum, rtol=1e-10, atol=1e-10)


def test_what_is_in_the_file(made: Made) -> None:
    """Sizes by name, and what a caller without psg_fx must look at."""
    with zipfile.ZipFile(made.path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/extra/psg_fx.json")]
        said = json.loads(archive.read(name))
    shapes = {entry["name"]: entry["shape"] for entry in said["inputs"] if entry["kind"] in ("input", "target")}
    assert shapes == {
        "input_0": ["R0", 4], "input_1": [2, "R1"], "input_2": ["R0"], "target_0": ["B"], "samples": ["B"]
    }  # fmt: skip
    (mixing,) = [entry for entry in said["outputs"] if entry["kind"] == "mixing"]
    assert mixing["shape"] == [len(said["rows"]["conditions"])]
    assert said["format"] == 2


@pytest.mark.rest
def test_ids_by_a_function_and_numbers_of_samples(tmp_path: Path) -> None:
    """What a function makes of the inputs is in the graph; what says B alone is passed, as to the step."""

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.layer(x)[:, 0]

    def loss(out: Tensor, like: Tensor, ids: Tensor) -> Tensor:
        return like.index_add(0, ids, out.square())

    rows = psg_fx.Rows(lambda x, ids: ids)
    x, _, ids, count = graphs([3, 1, 5, 2], [0, 0, 0, 0], "shuffled").whole.inputs
    model = graphs_of_nodes.made(Nodes)
    step = psg_fx.transform(
        model, loss, batch_dim=((rows, rows), (0, rows)), quantities=psg_fx.Norms(), backend="eager", progress=False
    )
    like = torch.zeros(count, dtype=torch.float64)
    loaded = psg_fx.load(step.export(tmp_path / "step.pt2", (x, ids), (like, ids), num_samples=count))
    for given, number in (((x, ids), 4), ((x[:7], ids[:7]), 6)):
        like = torch.zeros(number, dtype=torch.float64)
        found = loaded(model.state_dict(), given, (like, given[1]), num_samples=number)
        torch.testing.assert_close(found.norms, step(given, (like, given[1]), num_samples=number).norms)


@pytest.mark.rest
def test_documents(tmp_path: Path) -> None:
    """Attention with a mask of ids."""
    made = Made(packed.made(), packed.losses, packed.documents([3, 0, 5, 2]), tmp_path)
    for number, given in enumerate(packed.MANY):
        made.compare(packed.documents(*given, seed=number))


@pytest.mark.rest
@pytest.mark.parametrize("last", [True, False])
def test_offsets(last: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bags_of_words.Bags(mode="mean", include_last_offset=last).double()
    made = Made(model, bags_of_words.losses, bags_of_words.bags([3, 0, 2, 4], last), tmp_path)
    for seed, lengths in enumerate(([3, 0, 2, 4], [5], [0, 0, 3], [1, 1, 1, 1, 1, 0])):
        made.compare(bags_of_words.bags(lengths, last, seed))
    words, offsets, weights = bags_of_words.bags([3, 2], last).whole.inputs
    with pytest.raises(BadArgument, match="do not say where samples begin"):
        made.run((words, offsets + 1, weights), torch.tensor([0, 1]))
