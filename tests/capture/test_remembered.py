"""Results of ops on fake tensors from memory, and ops that are recorded quickly: all is as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import zoo
from psg_fx.torch_private import functional, recorded, remembered
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.remembered import remembered_results
from support.selection import one_in
from support.small import mlp


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class Selecting(nn.Module):
    """How many rows are taken depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return self.all(x).index_add(0, rows, self.some(x[rows]).tanh())


def from_zoo(name: str, **sizes: Any) -> tuple[Any, Any, Any, Any]:
    made = zoo.example(name, **sizes)
    return made.model, made.loss_fn, made.inputs, made.targets


CROSS_ENTROPY = nn.functional.cross_entropy
PROGRAMS: dict[str, Callable[[], tuple[Any, Any, Any, Any]]] = {
    "mlp": lambda: (mlp(), CROSS_ENTROPY, torch.randn(6, 4), torch.randint(3, (6,))),
    "convolutions": lambda: from_zoo("simplecnn", batch=4),
    "recurrent": lambda: (Recurrent(), CROSS_ENTROPY, torch.randn(6, 3, 4), torch.randint(3, (6,))),
    "gpt": lambda: from_zoo("gpt", batch=2, layers=2, width=8, heads=2, tokens=4, vocabulary=10),
    "selecting": lambda: (Selecting(), CROSS_ENTROPY, torch.randn(6, 4), torch.randint(3, (6,))),
}


def stages(name: str) -> dict[str, list[str]]:
    """Every stage of one capture, as text, with the sizes and strides of every value."""
    model, loss_fn, inputs, targets = PROGRAMS[name]()
    step = psg_fx.transform(model, loss_fn, quantities=psg_fx.ClippedSum(max_norm=1.0), backend="eager")
    step(inputs, targets)
    return {stage: [described(node) for node in gm.graph.nodes] for stage, gm in step.graphs.items()}


def described(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    seen = [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in values]
    return f"{node.name} = {node.target} {node.args} {node.kwargs} {seen}"


@pytest.fixture
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_RESULTS", {})


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(4, PROGRAMS))
@pytest.mark.usefixtures("_nothing_known")
def test_graphs_are_those_of_torch_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages(name)
    count = len(remembered._RESULTS)
    again = stages(name)
    assert len(remembered._RESULTS) - count < count / 10
    monkeypatch.setattr(remembered, "is_available", lambda: False)
    monkeypatch.setattr(recorded, "_USED", ("what no version of torch has",))
    monkeypatch.setattr(functional, "_writes", lambda exported: True)  # every program is made functional
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):  # nor with torch's own
        assert again == stages(name)


def symbolic(size: int = 7) -> Tensor:
    return symbolic_inputs([torch.empty(size, 4)], [0])[0]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, _nothing_known: None) -> Iterator[list[str]]:
    """The ops that torch computes, while results are remembered."""
    found: list[str] = []
    original = remembered._Dispatch._compute

    def compute(self: Any, mode: Any, func: Any, *call: Any) -> Any:
        found.append(func.overloadpacket.__name__)
        return original(self, mode, func, *call)

    monkeypatch.setattr(remembered._Dispatch, "_compute", compute)
    with remembered_results():
        yield found


def test_a_result_is_computed_once(computed: list[str]) -> None:
    first, second = symbolic(), symbolic()
    for x in (first, second):
        y = x.exp()
        assert y.shape[0].node.shape_env is x.shape[0].node.shape_env
        assert not torch._C._is_alias_of(x, y)
    assert computed.count("exp") == 1


def test_a_view_lies_in_the_memory_of_its_tensor(computed: list[str]) -> None:
    for x in (symbolic(), symbolic()):
        assert torch._C._is_alias_of(x, x.t())
    assert computed.count("t") + computed.count("transpose") == 1


DIFFERENT: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    "another size": (symbolic, lambda: symbolic(9), Tensor.exp),
    "another dtype": (symbolic, lambda: symbolic().double(), Tensor.exp),
    "other strides": (symbolic, lambda: symbolic().t(), Tensor.exp),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_computed_again(name: str, computed: list[str]) -> None:
    first, second, function = DIFFERENT[name]
    for x in (first(), second()):
        y = function(x)
        assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert computed.count("exp") == 2


def test_numbers_of_other_types_are_others(computed: list[str]) -> None:
    counts = symbolic().long()
    dtypes = [(counts * factor).dtype for factor in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_settings_are_a_part_of_what_is_asked(computed: list[str]) -> None:
    counts = symbolic().long()
    dtypes = []
    for default in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        dtypes.append(torch.true_divide(counts, 2).dtype)
        torch.set_default_dtype(before)
    assert dtypes == [torch.float32, torch.float64]


def test_what_depends_on_values_or_writes_is_computed(computed: list[str]) -> None:
    x = symbolic()
    rows = [x.nonzero().shape[0] for _ in range(2)]
    assert str(rows[0]) == str(rows[1])  # torch's own memory: of this tensor
    assert str((x + 1).nonzero().shape[0]) != str(rows[0])
    for _ in range(2):
        y = x.exp()
        assert y.add_(1.0) is y
    assert computed.count("add_") == 2


def test_sizes_that_depend_on_values_are_remembered_with_what_is_known_of_them(computed: list[str]) -> None:
    for least in (0, 0, 2):
        x = symbolic()
        rows = x[(x[:, 0] > 0).nonzero()[:, 0]]
        torch._check(rows.shape[0] >= least)
        y = rows.exp()
        assert y.shape == rows.shape
    assert computed.count("exp") == 2


def test_a_guard_is_made_by_every_capture_that_needs_it(computed: list[str]) -> None:
    made = []
    for _ in range(2):
        x = symbolic()
        env: Any = x.fake_mode.shape_env  # type: ignore[attr-defined]
        assert x.reshape(7, 2, 2).shape == (7, 2, 2)  # seven samples and no others
        made.append([str(guard.expr) for guard in env.guards])
    assert made[0] == made[1] != []


class Own(nn.Module):
    """Written in other ops when it is captured (`reshape`), kept (`linear`), and a value that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).reshape(-1, 3, 2)
        first, second = h.unbind(2)
        return torch.cat([first, second, first], 1) + h.mean((1, 2))[:, None]


def test_a_program_that_writes_nowhere_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is written in other ops; one that writes is traced."""
    found: dict[str, bool] = {}

    original = recorded.Copied.record

    def record(self: Any, func: Any, *given: Any) -> bool:
        return found.setdefault(str(func), original(self, func, *given))

    def run(model: nn.Module) -> dict[str, bool]:
        found.clear()
        psg_fx.transform(model, CROSS_ENTROPY, backend="eager")(torch.randn(5, 4), torch.randint(3, (5,)))
        return found

    monkeypatch.setattr(recorded.Copied, "record", record)
    run(Own())
    ran = {op for op, was in found.items() if not was and op.startswith("aten")}
    assert ran == {"aten.reshape.default", "aten.cross_entropy_loss.default"}
    assert {"aten.linear.default", "aten.cat.default", "aten.mean.dim"} <= found.keys()
    assert not run(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)))
    with torch.autocast("cpu", torch.bfloat16):  # casts what composite ops read when they are traced
        assert not run(Own())


def test_decompositions_of_all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 they are not the mode's."""
    table = {torch.ops.aten.exp.default: torch.exp}
    monkeypatch.setattr(recorded.proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", table, raising=False)
    assert recorded._decomposed(object()) is table
