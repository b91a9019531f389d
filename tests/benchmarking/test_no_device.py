"""`bench/no_device` up to where triton is needed: what it sends to inductor, and what it reads from what comes back."""

from __future__ import annotations

import contextlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx import zoo
from support.selection import one_in

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from no_device import count, interpret, pretend, retarget

    return SimpleNamespace(count=count, interpret=interpret, pretend=pretend, retarget=retarget)


def targets(gm: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in gm.graph.nodes}


@pytest.mark.skipif(find_spec("triton") is not None, reason="kernels of psg_fx take the place of these products")
def test_steps_are_planned_and_lowered_as_on_cuda(parts: SimpleNamespace) -> None:
    ex = zoo.example("gpt", 2, layers=1, width=16, heads=2, tokens=6, vocabulary=20)
    step = psg_fx.transform(ex.model, ex.loss_fn, backend="eager", progress=False)
    with (
        parts.retarget.planned_for_cuda(),
        torch.autocast("cpu", torch.bfloat16),
        contextlib.suppress(NotImplementedError),  # the CPU has no such op before torch 2.14
    ):
        step(ex.inputs, ex.targets)
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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`bench/without_cuda.py`, its results in a folder of this test's own."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import _results
    import without_cuda
    from no_device import page

    for owner in (_results, without_cuda):
        monkeypatch.setattr(owner, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "version", lambda name: "1.0")
    return without_cuda


NUMBERS = {"kernels": 3, "launches": 4, "extern": 2, "bytes": 8_000_000, "externs": {}, "groups": {}}


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[tuple[str, list[str]]]:
    """Run it; the parts and steps that it computed."""
    computed = []

    def computes(part: str, steps: list[str]) -> dict[str, Any]:
        computed.append((part, steps))
        executed = {"launches": 4, "outputs": 1, "error": 1e-7}
        return {s: executed if part.startswith("executed") else dict(NUMBERS) for s in steps}

    monkeypatch.setattr(script, "in_own_process", computes)
    monkeypatch.setattr("sys.argv", ["without_cuda.py", *words])
    assert script.main() == 0
    return computed


def test_only_what_is_missing_is_computed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(script, monkeypatch, "--models", "mlp", "--steps", "ordinary,norms")
    assert [part for part, _ in first] == [
        "executed mlp", "compiled mlp float32 static", "compiled mlp bfloat16 static", "compiled mlp float32 dynamic",
        "compiled mlp bfloat16 dynamic",
    ]  # fmt: skip
    again = run(script, monkeypatch, "--models", "mlp", "--steps", "norms,vmap_norms")
    assert again == [(f"compiled mlp {precision} static", ["vmap_norms"]) for precision in script.PRECISIONS]
    assert run(script, monkeypatch, "--models", "mlp", "--steps", "norms,vmap_norms") == []
    assert len(run(script, monkeypatch, "--models", "mlp", "--steps", "norms", "--again")) == 5


def test_the_page_has_ratios_first_and_names_kernels_that_spill(script: Any) -> None:
    from no_device.page import page

    spilling = NUMBERS | {"registers": 255, "shared": 0, "spilling": 1, "spilled": {"triton_red_7": 40}}
    steps = {"ordinary": NUMBERS, "norms": spilling | {"launches": 10}, "vmap_norms": NUMBERS | {"bytes": 16_000_000},
             "grads": {"failure": "RuntimeError: no"}}  # fmt: skip
    text = page(
        {"compiled gpt float32 static": steps, "compiled lstm float32 dynamic": {"norms": NUMBERS | {"inside": 9}}}
    )
    ratios = text[text.index("## Ratios") + 1]
    assert "2.00 / 2.00" in ratios  # launches and extern calls: 12 to 6
    assert "1.00 / 0.50" in ratios
    assert any("triton_red_7" in paragraph and "40" in paragraph for paragraph in text)
    assert "RuntimeError: no" in text[-3]
    assert "| 15 " in text[-1]  # 4 launches, 2 extern calls, 9 inside a loop


def test_what_failed_is_tried_again(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "compiled mlp float32 dynamic"
    (tmp_path / "cuda-without-a-device.json").write_text(json.dumps({name: {"norms": {"failure": "no room"}}}))
    told = ["--models", "mlp", "--precisions", "float32", "--batches", "dynamic", "--steps", "norms"]
    assert (name, ["norms"]) in run(script, monkeypatch, *told)
    assert run(script, monkeypatch, *told) == []


def test_a_failure_of_a_peer_is_no_failure(script: Any) -> None:
    assert script.fine({"norms": NUMBERS, "vmap_norms": {"failure": "no rule"}})
    assert not script.fine({"norms": {"failure": "no rule"}})
    assert not script.fine({"norms": {"launches": 1, "error": 1e-3}})


@pytest.mark.parametrize(
    ("model", "dynamic"), one_in(3, [(model, dynamic) for model in ("mlp", "lstm", "gpt") for dynamic in (False, True)])
)
def test_the_ordinary_step_and_vmap_are_one_graph_each(
    parts: SimpleNamespace, model: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against autograd; for every batch size, by another size than the traced one."""
    import without_cuda
    from no_device import steps

    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    ex = zoo.example(model, **without_cuda.SMALL[model])
    wanted = torch.autograd.grad(ex.loss_fn(ex.model(ex.inputs), ex.targets), list(ex.model.parameters()))
    monkeypatch.setattr(zoo, "example", lambda name, **sizes: ex)
    made = steps.steps_of(model, {}, dynamic)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(made["ordinary"]()(), wanted, strict=True))
    assert ("vmap_grads" in made) is not dynamic
    if not dynamic:
        grads = made["vmap_grads"]()()
        size = ex.inputs.shape[0]
        assert all(
            torch.allclose(grads[name].sum(0) / size, g, atol=1e-5)
            for (name, _), g in zip(ex.model.named_parameters(), wanted, strict=True)
        )


def test_vmap_of_attention_is_one_call(parts: SimpleNamespace) -> None:
    from no_device import attention

    def step(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    x = torch.randn(3, 1, 2, 5, 4)
    one_by_one = torch.stack([torch.func.grad(step)(sample) for sample in x])
    with attention.registered():
        gm = make_fx(torch.func.vmap(torch.func.grad(step)))(x)
    assert torch.allclose(gm(x), one_by_one, atol=1e-6)
    assert sum("attention" in str(node.target) for node in gm.graph.nodes) == 2


@pytest.mark.parametrize("steps", [1, 6])
def test_what_a_loop_launches(parts: SimpleNamespace, steps: int) -> None:
    """Eight kernels for each step of time, and the input's part of the gates."""
    from no_device.loops import inside, is_loop

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    op = torch.ops.psg_fx.lstm.default
    found = inside(op, (empty(steps, 2, 12), empty(2, 3), empty(2, 3), empty(12, 3), None, None))
    assert is_loop(op)
    assert not is_loop(aten.mm.default)
    assert not is_loop(torch.ops.psg_fx.grouped_weight_gradient.default)  # one call of a convolution
    assert len(found) == 8 * steps + 1
    products = [work for work, _ in found if work.kind == "gemm"]
    assert [work.flops for work in products] == [2 * 2 * 3 * 12] * steps
