"""The loops of recurrent layers for a CUDA device: their numbers by torch's calls, and which graphs have them.

The kernels of the cells are executed by Triton's interpreter (`bench/no_device/cells.py`), and on a device
(`tests/cuda/test_cells.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.graph.history import copy_graph
from psg_fx.ops.recurrent.cells import IN_CELLS
from psg_fx.passes.compile.recurrences import with_own_loops
from psg_fx.torch_private.fakes import symbolic_inputs
from support import oracle

SIZES = [(3, 5, 7), (1, 1, 1), (4, 2, 6)]
"""Steps, samples and units."""
NAMES = [op._schema.name.removeprefix("psg_fx::") for op in IN_CELLS]


def arguments(name: str, sizes: Sequence[int], fewer: bool = False) -> list[Any]:
    """Arguments of an op, some of them not contiguous; fewer: without what it need not have."""
    torch.manual_seed(0)
    t, b, h = sizes

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    gates = 3 if name.startswith("gru") else 4
    x, state, cell = drawn(t, gates * h, b).mT, drawn(h, b).t(), drawn(b, h)
    w, bias = drawn(gates * h, h) / h**0.5, None if fewer else drawn(gates * h)
    return {
        "lstm": [x, state, cell, w, bias, None],
        "gru": [x, state, w, bias],
        "gru_backward": [drawn(t, b, h), drawn(t, h, b).mT, x.sigmoid(), drawn(t, b, 2 * h)[..., h:], state, w],
        "lstm_backward": [drawn(t, b, h), cell, x.sigmoid(), state, drawn(t, h, b).mT, drawn(t, b, h).tanh(), w, None],
    }[name]


@pytest.mark.parametrize("fewer", [False, True], ids=["all", "fewer"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers(name: str, sizes: Sequence[int], fewer: bool) -> None:
    op = getattr(torch.ops.psg_fx, name).default
    given = arguments(name, sizes, fewer)
    before = [value.clone() for value in given if isinstance(value, Tensor)]
    for found, want in zip(IN_CELLS[op](*given), op(*given), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)
    after = [value for value in given if isinstance(value, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_ops_as_fakes(name: str) -> None:
    """For every number of samples; shapes are those of what is computed."""
    op = IN_CELLS[getattr(torch.ops.psg_fx, name).default]
    given = arguments(name, SIZES[0])
    fakes = iter(
        symbolic_inputs([t for t in given if isinstance(t, Tensor)], [None] * sum(map(torch.is_tensor, given)))
    )
    made = [next(fakes) if isinstance(value, Tensor) else value for value in given]
    with next(v for v in made if isinstance(v, Tensor)).fake_mode:  # type: ignore[attr-defined]
        shapes = [value.shape for value in op(*made)]
    assert shapes == [value.shape for value in op(*given)]


class Model(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **options)
        self.out = nn.Linear(options.get("proj_size") or 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layer(x)[0][:, -1])
        return found


def graph_of(kind: type[nn.RNNBase], dtype: torch.dtype, **options: Any) -> torch.fx.GraphModule:
    model, x, y = Model(kind, **options).to(dtype), torch.randn(5, 6, 3, dtype=dtype), torch.randint(2, (5,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    step(x, y)
    return copy_graph(step.graphs["tidied"])


def loops(gm: torch.fx.GraphModule) -> set[str]:
    names = {str(node.target).removesuffix(".default") for node in gm.graph.nodes}
    return {name.removeprefix("psg_fx.") for name in names if any(f"psg_fx.{loop}" in name for loop in NAMES)}


@pytest.mark.parametrize(("kind", "names"), [(nn.LSTM, {"lstm", "lstm_backward"}), (nn.GRU, {"gru", "gru_backward"})])
def test_which_graphs_have_them(kind: type[nn.RNNBase], names: set[str]) -> None:
    gm = graph_of(kind, torch.float32)
    assert loops(gm) == names
    with_own_loops(gm, "cuda")
    assert loops(gm) == {f"{name}_cells" for name in names}


@pytest.mark.parametrize(("dtype", "options"), [(torch.float64, {}), (torch.float32, {"proj_size": 2})])
def test_what_is_left(dtype: torch.dtype, options: dict[str, Any]) -> None:
    gm = graph_of(nn.LSTM, dtype, **options)
    with_own_loops(gm, "cuda")
    assert loops(gm) == {"lstm", "lstm_backward"}


def test_a_step_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowered graph with loops of cells, run as it is."""
    torch.manual_seed(0)
    model, x, y = Model(nn.LSTM, num_layers=2), torch.randn(5, 6, 3), torch.randint(2, (5,))

    def run_as_it_is(gm: torch.fx.GraphModule, *others: Any) -> Any:
        with_own_loops(gm, "cuda")
        gm.recompile()
        assert loops(gm) == {"lstm_cells", "lstm_backward_cells"}
        return gm

    monkeypatch.setattr("psg_fx.step.module.compile_graph", run_as_it_is)
    out = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads())(x, y)
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    assert oracle.worst_error(out.grads, grads) < 1e-5
