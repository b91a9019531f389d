"""When a step captures its program anew, and when it does not."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_effects import Model, X, Y, step_of
from torch import Tensor, nn

import psg_fx


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Kept(nn.Module):
    """It keeps a value, and reads what it has kept: what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.kept, self.width = h.detach(), x.shape[1] * 2
        out: Tensor = h * self.kept * self.width
        return out


def test_what_is_set_before_it_is_read() -> None:
    model = Kept()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (4, 3, 2, 4):
        step(X[:size], Y[:size])
        assert torch.allclose(model.kept, model.layer(X[:size]))
    assert len(step.captures) == 1


def test_nothing_moved() -> None:
    """Other helpers on the same model leave its layers' lists in other objects that hold the same."""
    model, x = Recurrent().double(), X[:, None].repeat(1, 2, 1)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(3):
        step(x, Y)
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        torch.func.functional_call(model, parameters, (x,))
    assert len(step.captures) == 1


def test_the_third_capture_says_why() -> None:
    step = step_of(lambda model, h: h * model.config["k"])
    for k in (1.0, 2.0):
        step.model.config["k"] = k
        step(X, Y)
    step.model.config["k"] = 3.0
    with pytest.warns(UserWarning, match=r"for the third time .* because Model.config\['k'\] has changed") as told:
        step(X, Y)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
def test_evaluation_at_another_size_is_no_third_time() -> None:
    """Nothing has changed twice: warnings are errors here."""
    step = step_of(lambda model, h: h * len(h) if model.training else h / len(h))
    for training in (True, False):
        step.model.train(training)
        for rows in (4, 3):
            step(X[:rows], Y[:rows])


def test_captures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psg_fx.program.captured.MOST", 2)
    step = psg_fx.transform(Model(lambda model, h: None), lambda out, k: k * out.sum(), backend="eager")
    for k in (1.0, 2.0, 3.0):
        step(X, (k,))
    assert len(step.captures) == 2
    step(X, (1.0,))


MODEL = """
import torch
from torch import nn

class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x):
        return helper(self.layer(x))

def helper(h):
    return h.flip(0)
"""


@pytest.mark.parametrize("folder", ["passes", "psg_fx", "zoo/psg_fx/passes"])
def test_users_folders_may_have_any_name(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True)
    (place / "users_model.py").write_text(MODEL)
    space: dict[str, Any] = {"__name__": "users_model"}
    exec(compile(MODEL, str(place / "users_model.py"), "exec"), space)
    with pytest.raises(psg_fx.SamplesMixed, match=r"users_model.py:14: return h.flip\(0\)"):
        psg_fx.transform(space["Mixing"](), F.cross_entropy, backend="eager")(X, Y)


def test_a_number_of_samples_that_is_a_default_for_one() -> None:
    """`len(x)` is a plain number, and an argument that is the default is not in the graph of one sample."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = nn.Parameter(torch.randn(2, 3, 2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            found = F.conv1d(x.reshape(1, -1, 6), self.kernels.repeat(len(x), 1, 1), groups=len(x))
            return found.view(len(x), 2, -1)

    model, x = Grouped(), torch.randn(4, 3, 6, dtype=torch.float64)
    step = psg_fx.transform(model, lambda o: o.square().mean(), backend="eager")
    with pytest.warns(UserWarning, match="one graph for each batch size"):
        assert step.validate(x).ok


class Scaled:
    def __init__(self) -> None:
        self.scale = 2.0


class Asking(nn.Module):
    """Asks for what may not be there, so that all that its classes hold is read."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.layer = Scaled(), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * getattr(self.settings, "extra", 1.0) * self.settings.scale


def test_copies_of_a_model_are_nothing_new() -> None:
    """Copying and pickling leave notes of Python's on its classes."""
    model, x = Asking(), torch.randn(3, 4, dtype=torch.float64)
    step = psg_fx.transform(model, lambda o: o.square().mean(), quantities=psg_fx.Norms(), backend="eager")
    step(x)
    copy.deepcopy(model)
    pickle.dumps(model)
    step(x)
    assert [captured.why for captured in step.captures] == ["first call"]
    Scaled.extra = 3.0  # type: ignore[attr-defined]
    step(x)
    assert step.captures[-1].why == "changed: Scaled"
    del Scaled.extra  # type: ignore[attr-defined]
