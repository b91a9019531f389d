"""A file of a step gives what the step gives: to psg_fx, to a process without it, and to C++."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils import cpp_extension

import psg_fx
from psg_fx.errors import BadArgument
from psg_fx.step.loaded import LoadedStep
from support.programs_of_files import call_the_program, same

pytestmark = [pytest.mark.inductor, pytest.mark.slow, pytest.mark.xdist_group("files")]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class Model(nn.Module):
    """Reads and writes buffers, uses a layer twice, and refuses some values."""

    count: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            raise ValueError("too large")
        self.count += 1
        h = self.inner(self.inner(self.first(x)).tanh() * mask) * self.scale
        out: Tensor = self.last(h.log_softmax(-1))
        return out


class Loss(nn.Module):
    """Holds a buffer, which is in the file as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.inner(output, y)
        return found


QUANTITIES = (
    psg_fx.ClippedSum(max_norm=0.4, per="parameter", weighted=True), psg_fx.Dots(), psg_fx.MeanGrad(), psg_fx.Gram(),
)  # fmt: skip


def batch(size: int) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(size)
    return {
        "x": torch.randn(size, 4, generator=draw), "mask": torch.rand(size, 6, generator=draw).round()
    }, torch.randint(3, (size,), generator=draw)  # fmt: skip


def given(model: nn.Module, size: int) -> dict[str, Any]:
    directions = {n: 0.5 * p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return {"weights": torch.linspace(0.5, 1.5, size), "directions": directions}


class Made:
    """A step, its model, and its file, read again."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.step = psg_fx.transform(self.model, Loss(), quantities=QUANTITIES, backend="eager", progress=False)
        inputs, targets = batch(5)
        self.path = self.step.export(folder / "step.pt2", inputs, targets, **given(self.model, 5))
        self.loaded: LoadedStep = psg_fx.load(self.path)

    def both(self, size: int, **more: Any) -> tuple[Any, Any]:
        """The outputs of the file and of the step."""
        inputs, targets = batch(size)
        extras = given(self.model, size) | more
        found = self.loaded(self.model.state_dict(), inputs, targets, **extras)
        before = self.model.count.clone()
        expected = self.step(inputs, targets, **{k: v for k, v in extras.items() if k != "max_norm"})
        assert torch.equal(before + (size > 0), found.buffers["count"]) or size == 0
        return found, expected


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("step"))


@pytest.fixture(scope="module", params=["program", pytest.param("compiled", marks=pytest.mark.rest)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What is compiled is the program in the file, which the ordinary run calls, but for a small step below."""
    if request.param == "compiled":
        found: Made = request.getfixturevalue("compiled")
        return found
    with pytest.MonkeyPatch.context() as patch:
        call_the_program(patch)
        return Made(tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("size", [5, 1, 2, 33, 0])
def test_it_gives_what_the_step_gives(made: Made, size: int) -> None:
    same(*made.both(size))


def test_parameters_are_read_at_every_call(made: Made) -> None:
    with torch.no_grad():
        made.model.inner.weight.mul_(1.5)
    same(*made.both(4))


def test_a_sample_whose_gradient_is_not_finite_is_dropped(made: Made) -> None:
    inputs, targets = batch(4)
    inputs["x"][1] = torch.nan
    extras = given(made.model, 4)
    found = made.loaded(made.model.state_dict(), inputs, targets, **extras)
    same(found, made.step(inputs, targets, **extras))
    assert all(value.isfinite().all() for value in found.clipped_sum.values())


def test_another_bound_and_weights(made: Made) -> None:
    bound = psg_fx.ClippedSum(max_norm=0.01, per="parameter", weighted=True)
    other = psg_fx.transform(made.model, Loss(), quantities=bound, backend="eager", progress=False)
    inputs, targets = batch(6)
    extras = given(made.model, 6)
    found = made.loaded(made.model.state_dict(), inputs, targets, max_norm=0.01, **extras)
    expected = other(inputs, targets, weights=extras["weights"]).clipped_sum
    torch.testing.assert_close(found.clipped_sum, expected, rtol=1e-4, atol=1e-6)
    by_name = {name: 0.01 * (k + 1) for k, name in enumerate(reversed(expected))}
    other = psg_fx.transform(made.model, Loss(), quantities=replace(bound, max_norm=by_name), backend="eager")
    found = made.loaded(made.model.state_dict(), inputs, targets, max_norm=by_name, **extras)
    expected = other(inputs, targets, weights=extras["weights"]).clipped_sum
    torch.testing.assert_close(found.clipped_sum, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(BadArgument, match=r"names are not those of the parameters: first\.bias"):
        made.loaded(made.model.state_dict(), inputs, targets, max_norm={"first.weight": 0.01}, **extras)


def test_what_does_not_fit_is_refused(made: Made) -> None:
    inputs, targets = batch(4)
    state, extras = made.model.state_dict(), given(made.model, 4)

    def text(*arguments: Any, **more: Any) -> str:
        with pytest.raises(BadArgument) as error:
            made.loaded(*arguments, **(extras | more))
        return str(error.value)

    missing = {name: value for name, value in state.items() if name != "inner.weight"}
    assert text(missing, inputs, targets) == (
        "inner.weight is missing\n"
        "  where  loaded(params, inputs, targets): params\n"
        "  why    the file takes float32 [6, 6] on cpu\n"
        "  fix    pass model.state_dict()"
    )
    assert text(state | {"inner.weight": torch.zeros(6, 5)}, inputs, targets).startswith("inner.weight is [6, 5]\n")
    assert text(state, inputs, targets.float()).startswith("target_0 is float32 on cpu\n")
    assert text(state, inputs | {"x": inputs["x"][:, :3]}, targets).startswith("input_x is [4, 3]\n")
    assert text(state, inputs, targets[:3]).startswith("the inputs disagree on the number of samples\n")
    assert text(state, inputs["x"], targets).startswith("inputs and targets are arranged otherwise than at the export")
    assert text(state, inputs, targets, weights=None).startswith("weights is missing\n")
    assert text(state, inputs, targets, weights=torch.ones(3)).startswith("weights is [3]\n")
    assert text(state, inputs, targets, sizes=1).startswith("loaded() got sizes\n")
    assert text(state, inputs, targets, directions=[]).startswith("directions is a list\n")
    too_large = inputs | {"x": 1e7 * inputs["x"]}
    assert "if x.abs().max() > 1e6" in text(state, too_large, targets)


def test_what_is_in_the_file(made: Made) -> None:
    """The names that `state_dict` has, sizes that follow from B, and no values of anybody."""
    with zipfile.ZipFile(made.path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/extra/psg_fx.json")]
        said = json.loads(archive.read(name))
    kinds = {entry["name"]: (entry["kind"], entry["shape"], entry["dtype"]) for entry in said["inputs"]}
    assert kinds["first.weight"] == ("parameter", [6, 4], "float32")
    assert kinds["count"] == ("buffer", [], "float32")
    assert kinds["input_x"] == ("input", ["B", 4], "float32")
    assert kinds["target_0"] == ("target", ["B"], "int64")
    assert kinds["weights"] == ("given", ["B"], "float32")
    assert not any("loss" in name for name in kinds)
    outputs = [(entry["kind"], entry["field"], entry["name"]) for entry in said["outputs"]]
    assert [kind for kind, field, _ in outputs if field == "losses"] == ["loss"]
    assert ("answer", "mean_grad", "first.weight") in outputs
    program = torch.export.load(made.path)
    assert {n.target.namespace for n in program.graph.nodes if hasattr(n.target, "namespace")} <= {"aten", "prims"}


def flat(made: Made, size: int) -> list[Tensor]:
    """The inputs of the file in its order."""
    inputs, targets = batch(size)
    extras, state = given(made.model, size), made.model.state_dict()
    named = {"input_x": inputs["x"], "input_mask": inputs["mask"], "target_0": targets, "weights": extras["weights"]}
    named |= {f"direction.{n}": v for n, v in extras["directions"].items()}
    return in_its_order(made.loaded, named | state, size)


def in_its_order(loaded: LoadedStep, named: dict[str, Tensor], size: int) -> list[Tensor]:
    """The inputs of a file by name, as it takes them."""
    found = []
    for entry in loaded.spec.inputs:
        value = named.get(entry.name)
        if value is None:
            sizes = [size if s == "B" else s for s in entry.shape]
            value = torch.tensor(entry.default, dtype=torch.float32).expand(sizes)
        found.append(value.contiguous())
    return found


PLAIN = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(list(run(*torch.load(sys.argv[2]))), sys.argv[3])
assert not any(name.startswith("psg_fx") for name in sys.modules)
"""


@inductor_config.patch({"aot_inductor.precompile_headers": False})  # they serve a second file
def test_what_is_compiled_runs_also_in_a_process_without_psg_fx(tmp_path: Path) -> None:
    """Also on images of one channel, and weights that meet them, which are contiguous and channels-last at once."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 1, 4, 4), torch.randint(3, (7,))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(memory_format=torch.channels_last)
    quantities = psg_fx.ClippedSum(max_norm=0.4)
    step = psg_fx.transform(model, F.cross_entropy, quantities=quantities, backend="eager", progress=False)
    loaded = psg_fx.load(step.export(tmp_path / "step.pt2", x[:5], y[:5]))
    last, state, expected = x.to(memory_format=torch.channels_last), model.state_dict(), step(x, y)
    new = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    assert last.is_contiguous()
    assert last.stride() != x.stride()
    assert new["0.weight"].stride() != state["0.weight"].stride()
    for params, images in ((state, x), (state, last), (new, x), (new, last)):
        same(loaded(params, images, y), expected)
    assert torch.export.load(tmp_path / "step.pt2").example_inputs is None
    torch.save(in_its_order(loaded, state | {"input_0": last, "target_0": y}, 7), tmp_path / "inputs.pt")
    run_apart(tmp_path / "step.pt2", tmp_path)
    found = loaded._fields(torch.load(tmp_path / "out.pt"))
    torch.testing.assert_close(dict(found["clipped_sum"]), dict(expected.clipped_sum), rtol=1e-4, atol=1e-6)


@pytest.mark.rest  # the same with buffers, directions and weights
def test_a_process_without_psg_fx_runs_it(compiled: Made, tmp_path: Path) -> None:
    torch.save(flat(compiled, 7), tmp_path / "inputs.pt")
    run_apart(compiled.path, tmp_path)
    compare(compiled, torch.load(tmp_path / "out.pt"))


def run_apart(path: Path, folder: Path) -> None:
    """In a process that has torch alone, on the folder's inputs."""
    command = [sys.executable, "-c", PLAIN, str(path), str(folder / "inputs.pt"), str(folder / "out.pt")]
    subprocess.run(command, check=True, cwd=folder)


def test_the_lowered_graph_runs_as_a_program_of_torch_export(made: Made) -> None:
    compare(made, list(torch.export.load(made.path).module()(*flat(made, 7))))


def compare(made: Made, results: list[Tensor]) -> None:
    found = made.loaded._fields(results)
    inputs, targets = batch(7)
    expected = made.step(inputs, targets, **given(made.model, 7))
    torch.testing.assert_close(found["norms"], expected.norms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["clipped_sum"], expected.clipped_sum, rtol=1e-4, atol=1e-6)


@pytest.mark.rest  # ten seconds of g++; a process without psg_fx reads the same file above
def test_a_program_in_cpp_runs_it(compiled: Made, tmp_path: Path) -> None:
    torch.save(flat(compiled, 7), tmp_path / "inputs.pt")
    program, lib = tmp_path / "run_step", str(Path(torch.__file__).parent / "lib")
    includes = [f"-I{folder}" for folder in cpp_extension.include_paths()[:1]]
    libraries = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    source = str(EXAMPLES / "run_step.cpp")
    command = ["g++", "-std=c++20", "-O0", abi, *includes, source, "-o", str(program), "-Wl,--no-as-needed", *libraries]
    subprocess.run(command, check=True)
    arguments = [str(compiled.path), str(tmp_path / "inputs.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run([str(program), *arguments], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{len(compiled.loaded.spec.inputs)} inputs, {len(compiled.loaded.spec.outputs)} results\n"
    compare(compiled, list(torch.load(tmp_path / "out.pt")))


def test_a_buffer_that_decided_stays_as_it_was(tmp_path: Path) -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("scales", torch.tensor([1.0, 2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x) * self.scales
            return found if self.scales[0] < self.scales[1] else 2 * found

    model, batch = Decides(), (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    step = psg_fx.transform(model, nn.functional.cross_entropy, quantities=psg_fx.Norms())
    loaded = psg_fx.load(step.export(tmp_path / "decides.pt2", *batch))
    torch.testing.assert_close(loaded(model.state_dict(), *batch).norms, step(*batch).norms)
    model.scales.fill_(1.0)
    with pytest.raises(BadArgument, match="scales has other values than at the export"):
        loaded(model.state_dict(), *batch)


def test_no_samples_leave_buffers_as_they_were(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("seen", torch.tensor(41.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.layer(x)  # type: ignore[no-any-return]

    model, (x, y) = Counts(), (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    step = psg_fx.transform(model, nn.functional.cross_entropy, quantities=psg_fx.Norms(), dynamic=True)
    loaded = psg_fx.load(step.export(tmp_path / "counts.pt2", x, y))
    state = model.state_dict()
    assert float(loaded(state, x, y).buffers["seen"]) == 42
    none = loaded(state, x[:0], y[:0]).buffers["seen"]
    assert float(none) == 41
    assert none.data_ptr() != state["seen"].data_ptr()
