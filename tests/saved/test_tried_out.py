"""A file is tried out before it is written: what computes something else is not, and rounding is not that."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import InternalError
from psg_fx.saved import write
from psg_fx.saved.trial import try_out


def test_nothing_is_written_if_the_file_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.pt2"
    path.write_text("as it was")
    model = nn.Linear(2, 2)
    step = psg_fx.transform(model, F.mse_loss, quantities=psg_fx.Norms(), backend="eager", progress=False)
    programs: list[torch.export.ExportedProgram] = []

    def kept(program: torch.export.ExportedProgram, options: object) -> list[str]:
        programs.append(program)
        return []

    def wrong(path: str) -> Any:
        (program,) = programs
        return lambda *values: [1.01 * value for value in program.module()(*values)]

    monkeypatch.setattr(write, "compiled_files", kept)
    monkeypatch.setattr(write, "load_compiled", wrong)
    with pytest.raises(InternalError, match="the file computes something else than the step, in output 0"):
        step.export(path, torch.randn(3, 2), torch.randn(3, 2))
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


class Shifted(nn.Module):
    """Its shift moves all classes alike: the loss does not follow it, and its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(2, 3), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift  # type: ignore[no-any-return]


def test_rounding_where_a_gradient_is_zero_is_not_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    step = psg_fx.transform(Shifted(), F.cross_entropy, backend="eager", progress=False)
    programs: list[torch.export.ExportedProgram] = []
    monkeypatch.setattr(write, "compiled_files", lambda program, options: programs.append(program) or [])
    monkeypatch.setattr(write, "load_compiled", lambda path: lambda *v: [r + 3e-8 for r in programs[0].module()(*v)])
    x, y = torch.randn(3, 2), torch.tensor([0, 2, 1])
    assert step(x, y).grads["shift"].abs().max() < 1e-6
    step.export(tmp_path / "step.pt2", x, y)


class Counts(nn.Module):
    """A buffer beside layers: autocast leaves it in float32."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().abs().sum(0).mean()
        return self.layers(x)  # type: ignore[no-any-return]


ROUNDED = {
    "autocast": [  # half precision rounds to 1/256
        (1.004, 1.0, ""), (1.2, 1.0, "in output 1, loss"), (1.0, 1.004, "in output 0, buffer model.total"),
    ],
    "double": [  # results in float64, computed in float32
        (1 + 1e-6, 1.0, ""), (1.01, 1.0, "in output 1, loss"), (1.0, 1.004, "in output 0, buffer model.total"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_follows_from_what_a_result_is_computed_in(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tried: list[Any] = []
    options: dict[str, Any] = {}
    monkeypatch.setattr(write, "compiled_files", lambda program, given: options.update(given) or [])
    monkeypatch.setattr(write, "load_compiled", lambda path: None)
    monkeypatch.setattr(write, "try_out", lambda *arguments: tried.extend(arguments))
    dtype = torch.float64 if kind == "double" else torch.float32
    step = psg_fx.transform(
        Counts(), lambda output, y: F.cross_entropy(output.to(dtype), y), backend="eager", progress=False
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        step.export(tmp_path / "step.pt2", torch.randn(3, 2), torch.tensor([0, 2, 1]))
    assert options.get("emulate_precision_casts", False) is (kind == "autocast")
    gm, run, _, given = tried
    for others, total, refused in ROUNDED[kind]:

        def off(*values: Tensor, others: float = others, total: float = total) -> list[Tensor]:
            first, *rest = run(*values)
            assert rest[0].dtype is dtype
            return [total * first, *(others * value for value in rest)]

        with pytest.raises(InternalError, match=refused) if refused else contextlib.nullcontext():
            try_out(gm, run, off, given)
