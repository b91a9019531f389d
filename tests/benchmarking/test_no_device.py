"""`bench/no_device` up to where triton is needed: what it sends to inductor, and what it reads from what comes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx import zoo

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from no_device import count, interpret, pretend, retarget

    return SimpleNamespace(count=count, interpret=interpret, pretend=pretend, retarget=retarget)


def targets(gm: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in gm.graph.nodes}


def test_steps_are_planned_and_lowered_as_on_cuda(parts: SimpleNamespace) -> None:
    ex = zoo.example("gpt", 2, layers=1, width=16, heads=2, tokens=6, vocabulary=20)
    step = psg_fx.transform(ex.model, ex.loss_fn, backend="eager", progress=False)
    with (
        parts.retarget.planned_for_cuda(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(Exception, match="bmm"),
    ):
        step(ex.inputs, ex.targets)  # the CPU has no such op
    assert aten.bmm.dtype in targets(step.graphs["tidied"])
    step = psg_fx.transform(ex.model, ex.loss_fn, backend="eager", progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        step(ex.inputs, ex.targets)
    assert aten.bmm.dtype not in targets(step.graphs["tidied"])


def test_every_device_that_a_graph_names_is_the_cuda_device_in_the_copy_alone(parts: SimpleNamespace) -> None:
    gm = make_fx(lambda x: x + torch.ones(2))(torch.zeros(2))
    moved = parts.retarget.on_cuda(gm)
    (there,) = (node for node in moved.graph.nodes if node.target is aten.ones.default)
    (here,) = (node for node in gm.graph.nodes if node.target is aten.ones.default)
    assert there.kwargs["device"] == torch.device("cuda", 0)
    assert here.kwargs["device"] == torch.device("cpu")


WRAPPER = """
async_compile.wait(globals())
class Runner:
    def call(self, args):
        triton_poi_fused_add_0.run(buf0, 3, stream=raw_stream0)
        triton_poi_fused_add_0.run(buf1, 3, stream=raw_stream0)
        triton_red_fused_sum_1.run(buf1, 3, stream=raw_stream0)
        extern_kernels.mm(buf0, buf1, out=buf2)
        buf3 = torch.ops.aten.convolution_backward.default(buf0)
def benchmark_compiled_module(args):
    extern_kernels.mm(buf0, buf1, out=buf2)
"""


def test_launches_and_calls_are_those_of_the_wrapper(parts: SimpleNamespace) -> None:
    found = parts.retarget.Compiled(torch.fx.symbolic_trace(torch.nn.Identity()), WRAPPER)
    with pytest.raises(RuntimeError, match="not seen to be compiled"):
        parts.count.counted(found)
    found.kernels = dict.fromkeys(["triton_poi_fused_add_0", "triton_red_fused_sum_1"])
    numbers = parts.count.counted(found)
    assert (numbers["kernels"], numbers["launches"], numbers["extern"]) == (2, 3, 2)
    assert numbers["groups"] == {"triton_poi": 2, "triton_red": 1}


def test_an_answer_that_is_not_a_number_is_an_error(parts: SimpleNamespace) -> None:
    right = torch.tensor([1.0, 4.0])
    assert parts.interpret.worst_error([right + 1], [right]) == 0.25
    assert parts.interpret.worst_error([right * torch.nan], [right]) > 1e30
