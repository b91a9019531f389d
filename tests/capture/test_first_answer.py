"""What makes the first answer fast: one trace instead of `run_decompositions`, and nothing loaded for nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule

import psg_fx
from psg_fx.graph.tracing import trace
from psg_fx.op_table import decompositions
from psg_fx.passes.capture.functions import losses  # noqa: F401  (fills the table)
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.functional import functional


class Written(nn.Module):
    """Writes into views, into what it made, and into a buffer that is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("unwritten", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh() * self.unwritten
        h[:, 0] = 0.0
        h.view(-1, 2, 3)[:, 1].mul_(2.0)
        self.calls.add_(1.0)
        return h.sum(1) * self.calls[0] + torch.tensor([2.0])


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return x.sum(1)


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).abs()
        return (x * scale).sum(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
    "normalized": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)),
    "written": Written,
    "no-grad": NoGrad,
}


def exported(model: nn.Module) -> ExportedProgram:
    return torch.export.export(model, (torch.randn(7, 4),), dynamic_shapes=({0: Dim("b", min=2)},), strict=False)


def description(gm: GraphModule) -> list[Any]:
    """Every op with its arguments, by the place of what made them; sizes are told by their value alone."""
    places: dict[Any, Any] = {}
    found = []
    for node in gm.graph.nodes:
        if "sym_size" in str(node.target):
            places[node] = str(node.meta["val"])
            continue
        args = torch.fx.map_arg((node.args, node.kwargs), lambda n: places[n])
        value = node.meta.get("val")
        name = node.name if node.op == "placeholder" else str(node.target)
        found.append((node.op, name, str(args), str(value.shape) if isinstance(value, Tensor) else ""))
        places[node] = f"%{len(found)}"
    return found


@pytest.mark.parametrize("name", MODELS)
def test_one_trace_is_what_run_decompositions_gives(name: str) -> None:
    table = decompositions()
    program = exported(MODELS[name]())
    found, expected = functional(program, table), program.run_decompositions(dict(table))
    assert description(found.graph_module) == description(expected.graph_module)
    for side in ("input_specs", "output_specs"):
        kinds = [[(s.kind, s.target) for s in getattr(p.graph_signature, side)] for p in (found, expected)]
        assert kinds[0] == kinds[1]
    assert list(found.state_dict) == list(expected.state_dict)
    assert list(found.constants) == list(expected.constants)


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that are left to torch."""
    found: list[ExportedProgram] = []
    original = ExportedProgram.run_decompositions
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda self, table: found.append(self) or original(self, table)
    )
    return found


@pytest.mark.parametrize(("name", "plain"), [("linear", True), ("written", True), ("no-grad", False)])
def test_only_plain_programs_are_traced_here(name: str, plain: bool, decomposed: list[ExportedProgram]) -> None:
    functional(exported(MODELS[name]()), {})
    assert bool(decomposed) is not plain


class Aliased(nn.Module):
    """Two buffers in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.part.add_(1.0)
        return (x * self.whole).sum(1)


def test_a_write_into_memory_that_two_buffers_share_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which fails to decompose it, so here it does nothing."""
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda self, table: self)
    program = exported(Aliased())
    assert functional(program, {}).graph_module is program.graph_module


def test_a_write_into_an_input_is_left_to_torch(decomposed: list[ExportedProgram]) -> None:
    found = functional(exported(WritesInput()), {})
    assert found.graph_signature.output_specs[0].kind is OutputKind.USER_INPUT_MUTATION
    assert len(decomposed) == 1


def test_without_torch_s_tools_torch_decomposes(
    monkeypatch: pytest.MonkeyPatch, decomposed: list[ExportedProgram]
) -> None:
    monkeypatch.setitem(sys.modules, "torch._functorch._aot_autograd.functional_utils", None)
    functional(exported(MODELS["linear"]()), {})  # which writes nowhere, and needs none
    program = exported(MODELS["written"]())
    assert len(functional(program, {}).graph_signature.output_specs) == 2
    assert decomposed == [program]


def test_tracing_keeps_the_symbol_and_its_arguments() -> None:
    (x,) = symbolic_inputs([torch.randn(7, 4)], [0])
    gm = trace(lambda a, b: (a.exp() + b).reshape(a.shape[0] * 2, 2), [x, x])
    result = gm.graph.output_node().args[0]
    assert [str(s) for s in result.meta["val"].shape] == [f"2*{x.shape[0]}", "2"]
    assert not x.requires_grad
    assert len(gm.graph.find_nodes(op="placeholder")) == 2


SCRIPT = """
import sys, torch, psg_fx, psg_fx.planner.methods.fused
model = torch.nn.Linear(4, 3)
psg_fx.transform(model, torch.nn.functional.cross_entropy, backend="eager")(torch.randn(5, 4), torch.zeros(5).long())
unwanted = ("torch.utils.benchmark", "torch.utils.cpp_extension", "torch._dynamo.backends.inductor",
            "torch._inductor.compile_fx", "torch._inductor.scheduler", "psg_fx.ops.products.tile_kernels")
others = ("transformers", "lightning", "opacus", "trak", "dattri", "tensorboard")  # of which psg_fx.integrations knows
found = [name for name in (*unwanted, *others) if name in sys.modules]
print(found + [name for name in sys.modules if name.startswith("psg_fx.integrations")])
"""


@pytest.mark.slow
def test_an_eager_step_loads_no_compiler_no_kernels_and_no_other_library() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_backend_is_still_refused() -> None:
    with pytest.raises(psg_fx.errors.BadArgument, match="backend='nosuch' is unknown"):
        psg_fx.transform(nn.Linear(2, 2), nn.functional.cross_entropy, backend="nosuch")
