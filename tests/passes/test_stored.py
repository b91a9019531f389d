"""Lowered graphs on disk: found by all that passes are told, and equal to what passes make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

import psg_fx
from psg_fx import ClippedSum, Grads, Gram, Norms, op_table
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage, verify
from psg_fx.ops.define import op_named
from psg_fx.passes.pipeline import Asked
from psg_fx.passes.stored import store, written
from psg_fx.torch_private import native
from support import oracle
from support.cases import CASES, Case
from support.selection import one_in

QUANTITIES = (Grads(), Norms(), ClippedSum(0.5))
ROWS = [case for case in CASES if not case.refused]


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Graphs are kept, in a folder of the test's own."""
    monkeypatch.setattr(store, "ENABLED", True)
    monkeypatch.setattr(store.caches, "folder", lambda: tmp_path)
    return tmp_path


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 6), torch.randint(3, (size,))


def stages(model: nn.Module, loss: Any = F.cross_entropy, data: Any = None, **options: Any) -> dict[str, GraphModule]:
    asked = options.pop("quantities", QUANTITIES)
    step = psg_fx.transform(model, loss, quantities=asked, backend="eager", **options)
    step(*(batch() if data is None else data))
    return dict(step.graphs)


def said(gm: GraphModule) -> list[Any]:
    """What a graph says, as text."""
    return [
        (n.op, str(n.target), str(n.args), str(n.kwargs), n.name, _shapes(n.meta.get("val")), facts.fact(n))
        for n in gm.graph.nodes
    ]


def _shapes(value: Any) -> Any:
    return [(facts.shape(t), [facts.expr(s) for s in t.stride()], t.dtype) for t in facts.tensors(value)]


def name_of(captured: GraphModule, told: Any = None) -> str:
    entry = store.entry_of(captured, told)
    assert entry is not None
    return entry.path.name


@pytest.mark.filterwarnings("ignore:.*padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", one_in(80, ROWS, always={"traps/counter"}))
def test_what_is_read_is_what_was_written(case: Case, on_disk: Path) -> None:
    """Node by node, and by its answers; what cannot be written is not kept."""
    model = case.model()
    step = psg_fx.transform(model, case.loss_fn(model), quantities=QUANTITIES, backend="eager", batch_dim=case.dims)
    arguments: list[Any] = []
    step(case.data())
    captured, lowered = step.graphs["captured"], step.graphs["tidied"]
    try:
        names = {written.digest(written.said_of(captured)) for _ in range(2)}
        text = written.write(lowered, written.Captured.of(captured))
    except written.Unwritable:
        assert not list(on_disk.rglob("*.graph"))
        return
    assert len(names) == 1
    found = written.read(text, captured)
    verify(found, Stage.TIDIED)
    assert said(found) == said(lowered)
    inner = step.captures[-1].step
    inner._run = lambda *values: (arguments.extend(values), lowered(*values))[1]
    step(case.data())
    answers = []
    for gm in (lowered, found):
        torch.manual_seed(0)
        with torch.no_grad():
            answers.append(gm(*arguments))
    for want, got in zip(*answers, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_second_step_reads_what_the_first_one_made(on_disk: Path) -> None:
    results, steps = [], []
    for _ in range(2):
        step = psg_fx.transform(small(), F.cross_entropy, quantities=QUANTITIES)
        results.append(vars(step(*batch())))
        steps.append(step)
    first, second = (step.timings for step in steps)
    assert "lower" in first
    assert set(second) == {"capture", "read", "compile"}
    assert len(list(on_disk.rglob("*.graph"))) == 1
    for name, value in results[0]["grads"].items():
        assert torch.equal(results[1]["grads"][name], value)
    assert steps[0].explain() == steps[1].explain()  # the passes are run to be shown
    assert list(steps[0].graphs) == list(steps[1].graphs)
    assert "lower" in steps[1].timings


def test_a_batch_of_another_size_is_served_by_what_was_read(on_disk: Path) -> None:
    for _ in range(2):
        step = psg_fx.transform(small(), F.cross_entropy, quantities=Norms(), dynamic=True)
        step(*batch())
        found = step(*batch(7)).norms
        want = psg_fx.transform(small(), F.cross_entropy, quantities=Norms(), backend="eager")(*batch(7)).norms
        assert oracle.relative_error(found, want) < 1e-5
    assert "read" in step.timings


@pytest.mark.slow
def test_groups_have_symbols_of_their_own(on_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So their graphs are not kept."""
    for _ in range(2):
        step = psg_fx.transform(small(), F.cross_entropy, quantities=Norms())
        found = step(*batch(), groups=torch.tensor([1, 0, 1, 1])).norms
        want = psg_fx.transform(small(), F.cross_entropy, quantities=Norms(), backend="eager")
        assert oracle.relative_error(found, want(*batch(), groups=torch.tensor([1, 0, 1, 1])).norms) < 1e-5
    assert "lower" in step.timings
    assert "cannot be read" not in caplog.text


def test_ops_that_are_defined_when_they_are_wanted() -> None:
    for name in ("gram_dots", "tile_squares", "tile_product", "patch_squares", "patch_product", "weighted_sums"):
        op = op_named(f"psg_fx::{name}.default")
        assert op is getattr(torch.ops.psg_fx, name).default


def test_without_a_loss(on_disk: Path) -> None:
    found = []
    for _ in range(2):
        model = small()
        step = psg_fx.transform(model)
        x, y = batch()
        F.cross_entropy(step(x), y).backward()
        found.append(model[0].weight.grad_sample)
    assert "read" in step.timings
    assert torch.equal(*found)
    assert {"forward", "backward"} <= set(step.graphs)


class Scaled(nn.Module):
    """Has a tensor that is a constant of its code."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = small(), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * torch.tensor([self.scale, 1.0, 1.0, 1.0, 1.0, 1.0]))


def captured_of(model: nn.Module | None = None, loss: Any = F.cross_entropy, size: int = 4) -> GraphModule:
    return stages(model or small(), loss, batch(size))["captured"]


@pytest.mark.slow
def test_what_is_told_is_the_name(on_disk: Path) -> None:
    """The same program has the same name, whatever has another graph another one."""
    told = asked()
    name = name_of(captured_of(), told)
    assert name == name_of(captured_of(size=9), told)  # the batch size is a symbol
    frozen = small()
    frozen[0].weight.requires_grad_(False)
    others = {
        "another op": name_of(captured_of(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))), told),
        "other sizes": name_of(captured_of(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))), told),
        "another loss": name_of(captured_of(loss=lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1)), told),
        "another parameter": name_of(captured_of(frozen), told),
        "a constant": name_of(captured_of(Scaled(2.0)), told),
        "its elements": name_of(captured_of(Scaled(3.0)), told),
        "a quantity": name_of(captured_of(), asked(quantities=(Grads(),))),
        "the batch that is planned for": name_of(captured_of(), asked(size=5)),
        "rates": name_of(captured_of(), asked(bandwidth=1.0)),
    }
    assert len({name, *others.values()}) == 1 + len(others)


def asked(quantities: Any = QUANTITIES, size: int = 4, bandwidth: float | None = None) -> Asked:
    from dataclasses import replace

    from psg_fx.planner import rates

    device = rates.device("cpu")
    return Asked(quantities, torch.float32, replace(device, bandwidth=bandwidth or device.bandwidth), size)


def test_flags_of_torch_are_in_the_name(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of()
    name = name_of(captured)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert name_of(captured) != name
    monkeypatch.setattr(store, "_files_of_psg_fx", lambda: "edited")
    assert name_of(captured) != name


class OwnQuantity(Gram):
    """Of a user: its name says nothing of what it computes."""


class Doubling(torch.autograd.Function):
    """A custom function, whose backward is the user's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


@pytest.mark.slow
def test_what_bytes_cannot_tell_is_not_kept(on_disk: Path) -> None:
    """Code of users that passes would run."""
    captured = captured_of()
    assert store.entry_of(captured, OwnQuantity()) is None
    assert store.entry_of(captured, lambda: None) is None
    custom = captured_of(loss=lambda out, y: F.cross_entropy(Doubling.apply(out), y))
    assert store.entry_of(custom, None) is None
    with op_table.changed("tanh", formula=lambda x: x):
        assert store.entry_of(captured, None) is None
    assert store.entry_of(captured, None) is not None


def test_where_torch_is_told_to_keep_nothing(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(store, "ENABLED", True)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert store.entry_of(captured_of(), None) is None


@pytest.mark.parametrize("damage", [b"", b"no graph", None], ids=["empty", "other", "changed"])
def test_a_broken_file_is_made_anew(on_disk: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> psg_fx.PerSampleModule:
        step = psg_fx.transform(small(), F.cross_entropy, quantities=Norms())
        step(*batch())
        return step

    run()
    (path,) = on_disk.rglob("*.graph")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"x" + whole[-8:] if damage is None else damage)
    assert "lower" in run().timings
    assert "cannot be read, and is made anew" in caplog.text
    assert path.read_bytes() == whole
    assert "read" in run().timings


@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_nothing_is_kept_where_an_op_of_torch_is_computed_by_another_package(on_disk: Path) -> None:
    captured = stages(small())["captured"]
    assert store.entry_of(captured, None) is not None
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("erfinv", lambda x: x, "CPU")
        assert store.entry_of(captured, None) is None
    assert store.entry_of(captured, None) is not None


def test_nothing_is_kept_by_a_process_whose_code_has_been_edited(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What it runs is not what the name would say."""
    store._files_of_psg_fx.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(store, "_LOADED", 0.0)
        psg_fx.transform(small(), F.cross_entropy)(*batch())
    assert not list(on_disk.rglob("*.graph"))
    psg_fx.transform(small(), F.cross_entropy)(*batch())
    assert list(on_disk.rglob("*.graph"))


def test_a_folder_that_cannot_be_written(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (on_disk / "psg_fx").write_text("a file where the folder would be")
    step = psg_fx.transform(small(), F.cross_entropy, quantities=Norms())
    step(*batch())
    assert "lower" in step.timings


def test_what_is_refused_is_refused_again(on_disk: Path) -> None:
    """Nothing is kept of it."""
    mixing = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    for _ in range(2):
        with pytest.raises(psg_fx.errors.SamplesMixed):
            psg_fx.transform(mixing, F.cross_entropy)(*batch())
        with pytest.raises(psg_fx.errors.BadArgument, match="depends on none of the model's parameters"):
            psg_fx.transform(small(), lambda out, y: F.cross_entropy(out.detach(), y))(*batch())
    assert not list(on_disk.rglob("*.graph"))


@pytest.mark.inductor
def test_what_is_in_cpp_is_compiled_for_a_graph_from_disk(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where no plan has begun to compile it."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(192, 768), nn.Linear(768, 192)), torch.randn(2, 4, 64, 192).unbind()
    compiled, planned = [], []
    for _ in range(2):
        monkeypatch.setattr(native, "_BEGUN", {})
        step = psg_fx.transform(model, lambda out, x: (out - x).square().sum(), quantities=Norms())
        step(*data)
        compiled.append({name for name in ("gram_dots", "products") if native.library(name)})
        planned.append("lower" in step.timings)
    assert planned == [True, False]
    assert compiled[0] == compiled[1] != set()


PROGRAM = """
import json, sys, torch, psg_fx
from psg_fx import zoo

example = zoo.example(sys.argv[1], 3)
torch.manual_seed(0)
step = psg_fx.transform(example.model, example.loss_fn, quantities=psg_fx.Norms(), batch_dim=example.batch_dim,
                        progress=False)
norms = step(example.inputs, example.targets).norms
print(json.dumps({"passes": list(step.timings), "norms": norms.tolist()}))
"""


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.rest)])
def test_another_process_reads_it(name: str, tmp_path: Path) -> None:
    """Whatever the seed of its hashes."""
    found = []
    for seed in ("1", "2"):
        around = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", PROGRAM, name], env=around, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout))
    assert "lower" in found[0]["passes"]
    assert found[1]["passes"] == ["capture", "read", "compile"]
    assert found[0]["norms"] == found[1]["norms"]
