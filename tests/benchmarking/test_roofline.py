"""The arithmetic of `bench/roofline.py`: what counts as a launch, its flops and bytes, and what follows for a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx import zoo
from psg_fx.benchmarking.problem import Problem
from psg_fx.planner import rates
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.search import plan_step
from psg_fx.quantities.names import USUAL

ROOT = Path(__file__).resolve().parents[2]
F32 = torch.float32


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import roofline
    from no_device import steps, traffic

    return SimpleNamespace(roofline=roofline, steps=steps, traffic=traffic)


def counted(bench: SimpleNamespace, function: Any, *shapes: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """(kind, launches, flops, read, written) of every launch of a function, bytes as numbers of float32."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.zeros(shape) for shape in shapes))
    works = [work for work, _ in bench.traffic.counted(graph)]
    return sorted((w.kind, w.calls, int(w.flops), int(w.read) // 4, int(w.written) // 4) for w in works)


def test_a_product_is_a_launch_and_what_follows_it_another(bench: SimpleNamespace) -> None:
    """Three pointwise ops on the result read it once, with the bias."""
    found = counted(bench, lambda x, w, b: [torch.relu(x @ w + b) * 2], (8, 3), (3, 5), (5,))
    assert found == [("gemm", 1, 2 * 8 * 3 * 5, 24 + 15, 40), ("pointwise", 1, 3 * 40, 40 + 5, 40)]


def test_what_lies_on_both_sides_of_a_product_is_not_one_launch(bench: SimpleNamespace) -> None:
    """A residual connection: h is written for the product and for the sum."""

    def residual(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        h = x.exp()
        return [h + h @ w]

    found = counted(bench, residual, (8, 3), (3, 3))
    assert [launch for launch in found if launch[0] == "pointwise"] == [
        ("pointwise", 1, 24, 24, 24), ("pointwise", 1, 24, 48, 24),
    ]  # fmt: skip


def test_a_sum_over_leading_axes_is_two_launches(bench: SimpleNamespace) -> None:
    """What is computed for it alone is never written; what others read, too, is."""
    assert counted(bench, lambda x, y: [(x * y).sum(0)], (8, 3), (8, 3)) == [("pointwise", 2, 48, 48, 3)]
    both = counted(bench, lambda x: [x.exp().sum(0), x.exp()], (8, 3))
    assert sum(launch[1] for launch in both) >= 2
    assert counted(bench, lambda x: [x.exp().sum(1)], (8, 3)) == [("pointwise", 1, 48, 24, 8)]


def test_views_are_free_and_parts_of_a_value_are_read_as_parts(bench: SimpleNamespace) -> None:
    found = counted(bench, lambda x: [x.t().reshape(-1, 2).unsqueeze(0)], (4, 2))
    assert sum(launch[3] for launch in found) <= 8
    one_third = counted(bench, lambda x: [x.split(2, dim=1)[0].exp()], (4, 6))
    assert one_third == [("pointwise", 1, 8, 8, 8)]


def test_half_of_causal_attention_counts(bench: SimpleNamespace) -> None:
    """2·2·B·H·T²·E of which half is masked; q, k and v are read, the result and its log-sum-exp written."""
    shape = (2, 3, 8, 4)
    found = counted(
        bench, lambda q, k, v: [F.scaled_dot_product_attention(q, k, v, is_causal=True)], shape, shape, shape
    )
    (launch,) = (launch for launch in found if launch[0] == "bmm")
    assert launch[2] == 2 * 2 * 2 * 3 * 8**2 * 4 // 2
    whole = counted(bench, lambda q, k, v: [F.scaled_dot_product_attention(q, k, v)], shape, shape, shape)
    assert [w[2] for w in whole if w[0] == "bmm"] == [2 * launch[2]]


DEVICE = Device("cuda", {("gemm", F32): 100.0, ("pointwise", F32): 10.0}, 20.0, 3.0, 0.0, {"launch_replayed": 1.0})


def test_a_prediction_adds_up(bench: SimpleNamespace) -> None:
    """gemm: 500 / 100 against 40 / 20 s; pointwise: 10 / 10 against 80 / 20 s; three launches."""
    works = [(Work(500, 30, 10, "gemm"), F32), (Work(10, 60, 20, "pointwise", 2), F32)]
    found = bench.roofline.prediction(bench.roofline.timed(works, DEVICE), DEVICE)
    assert found.shares == {"flops": 5.0, "bytes": 4.0, "launches": 3.0}
    assert (found.replayed, found.launched, found.launches) == (12.0, 12.0, 3)
    assert (found.flops, found.bytes, found.bound) == (510.0, 120.0, "flops")
    by_host = bench.roofline.prediction(bench.roofline.timed([(Work(1, 1, 1, "gemm", 9), F32)], DEVICE), DEVICE)
    assert by_host.launched == 27.0 > by_host.replayed


@pytest.fixture
def small(bench: SimpleNamespace) -> SimpleNamespace:
    ex = zoo.example("gpt", 4, layers=1, width=32, heads=2, tokens=16, vocabulary=50)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    joint, plan = bench.roofline.joint_graph(problem)
    return SimpleNamespace(problem=problem, joint=joint, plan=plan)


def test_both_graphs_of_a_model_have_the_same_products(bench: SimpleNamespace, small: SimpleNamespace) -> None:
    """Forward 2·N·P for N positions and P weights, backward twice that; a step of psg_fx leaves the part of the weights
    themselves to the planner.  An embedding is no product.
    """
    weights = sum(
        p.numel() for name, p in small.problem.model.named_parameters() if p.dim() == 2 and "embed" not in name
    )
    positions = 4 * 16
    plain = bench.traffic.counted(bench.steps.ordinary_graph(small.problem))
    joint = bench.traffic.counted(small.joint, small.plan.batch, small.plan.size)
    assert sum(w.flops for w, _ in plain if w.kind == "gemm") == 6 * positions * weights
    assert sum(w.flops for w, _ in joint if w.kind == "gemm") == 4 * positions * weights
    assert sum(w.calls for w, _ in joint) < sum(w.calls for w, _ in plain)


def test_trees_count_their_distinct_nodes(bench: SimpleNamespace, small: SimpleNamespace) -> None:
    from psg_fx.algebra.gradient import GRADIENTS

    gradients = list(GRADIENTS.of(small.joint).values())
    plan = plan_step(gradients, USUAL["clipped_sum"].asks(), rates.H100, small.plan.batch, small.plan.size)
    launches = list(bench.roofline.planned(plan, rates.H100))
    whole = sum(launch.seconds + launch.work.calls * rates.H100.launch for launch in launches)
    assert whole <= plan.seconds * (1 + 1e-9)
    assert whole > 0.5 * plan.seconds


@pytest.mark.rest  # plans of every model for every device
def test_the_page_has_every_device(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.roofline.MODELS, "mlp", bench.roofline.Run("MLP", "mlp", 8))
    found = {f"mlp {precision}": bench.roofline.predicted(bench.roofline.MODELS["mlp"], precision)
             for precision in bench.roofline.PRECISIONS}  # fmt: skip
    text = "\n".join(bench.roofline.page(found))
    for device in bench.roofline.DEVICES:
        assert f"## {device.upper()}" in text
    assert text.count("| MLP") == 2 * (len(bench.roofline.DEVICES) + 1)  # and the plans of fewest bytes
    assert "host" in text
