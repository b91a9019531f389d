"""What cannot be in a file is refused in words, before anything is compiled or written."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import BadArgument, PsgError
from psg_fx.saved import write
from psg_fx.saved.spec import Spec

X, Y = torch.randn(6, 4), torch.randint(3, (6,))


@torch.library.custom_op("file_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: 2 * g)


class Keeps(nn.Module):
    """Stores a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x)
        return self.kept


class ForOneSize(nn.Module):
    """Calculates with the batch size as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * torch.tensor(int(x.shape[0])) / int(x.shape[0])
        return out


class Custom(nn.Module):
    """Calls a custom operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = twice(self.layer(x))
        return out


class Chooses(nn.Module):
    """Takes an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out: Tensor = self.layer(x.to(dtype))
        return out


CASES: dict[str, tuple[nn.Module, Any, str, str]] = {
    "random": (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), X, "aten.native_dropout draws random numbers",
               "model.eval()"),
    "custom operator": (Custom(), X, "file_tests.twice is a custom operator", "torch's own ops"),
    "attribute": (Keeps(), X, "the code stores tensors in attributes", "buffers"),
    "one size": (ForOneSize(), X, "the graph serves one batch size only", "x.shape[0]"),
    "argument": (Chooses(), (X, torch.float32), "an argument is a dtype", "let the model make it"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(write, "compiled_files", fails)


@pytest.mark.filterwarnings("ignore:the graph:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_in_a_file(name: str, tmp_path: Path) -> None:
    model, inputs, what, fix = CASES[name]
    psg_fx.trust(twice)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager", progress=False)
    with pytest.raises(PsgError) as error:
        step.export(tmp_path / "step.pt2", inputs, Y)
    assert error.value.what.startswith(what)
    assert fix in error.value.fix
    assert not list(tmp_path.iterdir())


def test_attention_without_dropout_draws_nothing(tmp_path: Path) -> None:
    """Though torch tags it so: it gets as far as the compiler."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x.view(-1, 1, 2, 2)
            return self.layer(F.scaled_dot_product_attention(h, h, h).flatten(1))  # type: ignore[no-any-return]

    step = psg_fx.transform(Attends(), F.cross_entropy, quantities=psg_fx.Norms(), backend="eager", progress=False)
    with pytest.raises(PsgError, match="could not make a file") as error:
        step.export(tmp_path / "step.pt2", X, Y)
    assert error.value.why == "AssertionError: compiled"


def test_a_memory_budget_with_parts(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    asked = psg_fx.MeanGrad()
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=asked, memory_budget=4000, backend="eager", progress=False
    )
    with pytest.raises(PsgError, match="the step runs in parts within its memory budget"):
        step.export(tmp_path / "step.pt2", X.repeat(100, 1), Y.repeat(100))


def test_a_memory_budget_into_which_the_batch_fits(tmp_path: Path) -> None:
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, memory_budget=10**9, backend="eager", progress=False)
    with pytest.raises(PsgError, match="could not make a file") as error:
        step.export(tmp_path / "step.pt2", X, Y)
    assert error.value.why == "AssertionError: compiled"


class Softened(psg_fx.WeightedSum):
    """Makes weights of what a call gives, in Python."""

    reads = ("scores",)
    reads_each = ("scores",)

    def values(self, shapes: Any, given: Any) -> dict[str, Any]:
        return {"weights": given["scores"].softmax(0)}


def test_a_quantity_that_computes_outside_of_the_graph(tmp_path: Path) -> None:
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=Softened(), backend="eager", progress=False)
    assert "weighted_sum" in vars(step(X, Y, scores=torch.rand(6)))
    with pytest.raises(PsgError, match="Softened computes weights outside of the graph"):
        step.export(tmp_path / "step.pt2", X, Y, scores=torch.rand(6))


def test_what_torch_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> Any:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(write, "compiled_files", refuses)
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager", progress=False)
    with pytest.raises(PsgError, match="could not make a file") as error:
        step.export(tmp_path / "step.pt2", X, Y)
    assert error.value.why == "RuntimeError: no compiler"
    assert not list(tmp_path.iterdir())


def test_places_and_batches(tmp_path: Path) -> None:
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager", progress=False)
    arguments = itertools.product([tmp_path / "step.pt", tmp_path / "none" / "step.pt2", None], [X])
    for path, x in [*arguments, (tmp_path / "step.pt2", X[:0])]:
        with pytest.raises(BadArgument, match=r"is no place for a package|the batch has no samples"):
            step.export(path, x, Y[: len(x)])
    bare = psg_fx.transform(nn.Linear(4, 3), backend="eager", progress=False)
    with pytest.raises(BadArgument, match="export needs a loss"):
        bare.export(tmp_path / "step.pt2", X)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no folder in which nobody can write")
def test_a_folder_in_which_nobody_can_write() -> None:
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager", progress=False)
    with pytest.raises(BadArgument, match=r"is no place for a package[^\0]*/proc cannot be written"):
        step.export("/proc/step.pt2", X, Y)
    with pytest.raises(BadArgument, match=r"/proc/store cannot be made"):
        psg_fx.over([(X, Y)], step, store="/proc/store", progress=False)


def test_what_is_no_file_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "text.pt2").write_text("text")
    torch.save(X, tmp_path / "tensor.pt2")
    for name, why in (("none.pt2", "FileNotFoundError"), ("text.pt2", "BadZipFile"), ("tensor.pt2", "without psg_fx")):
        with pytest.raises(BadArgument) as error:
            psg_fx.load(tmp_path / name)
        assert why in error.value.why


def test_a_file_of_another_format() -> None:
    spec = Spec((), (), "cpu", "", ())
    assert Spec.from_json(spec.to_json()) == spec
    with pytest.raises(BadArgument, match="the file has format 0"):
        Spec.from_json(spec.to_json().replace('"format": 1', '"format": 0'))
