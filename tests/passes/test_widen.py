"""Products of half-precision values that are wanted in float32: rewritten for CUDA, here run with the op's meaning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx import Interpreter

import psg_fx
from psg_fx import ClippedSum, Grads, Norms, zoo
from psg_fx.graph import facts
from psg_fx.graph.history import History, copy_graph
from psg_fx.passes.runner import run
from psg_fx.passes.widen import widen
from support.selection import one_in

aten = torch.ops.aten
INTO = (aten.bmm.dtype, aten.mm.dtype)
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "gpt": {"batch": 3, "layers": 1, "width": 64, "heads": 2, "tokens": 16, "vocabulary": 11},
    "vit": {"batch": 3, "layers": 1, "width": 12, "image": 8, "patch": 4},
    "simplecnn": {"batch": 3, "image": 8, "width": 3, "hidden": 7, "classes": 4},
    "lstm": {"batch": 3, "tokens": 5, "vocabulary": 11, "width": 16, "hidden": 24, "layers": 1},
}


class Meant(Interpreter):
    """Runs a graph on the CPU, which has no kernel for `bmm.dtype`: the exact products, added up in float32."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in INTO:
            a, b, dtype = args
            assert a.dtype is b.dtype
            assert a.dtype in (torch.bfloat16, torch.float16)
            return a.to(dtype) @ b.to(dtype)
        return super().call_function(target, args, kwargs)


def graphs(name: str, quantity: Any, sizes: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The graph for a CPU and the same for CUDA."""
    ex = zoo.example(name, **(sizes or SIZES[name]))
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=quantity, batch_dim=ex.batch_dim, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        step(ex.inputs, ex.targets)
        before = step.graphs["tidied"]
    return before, run(widen, copy_graph(before), History(), device="cuda")


def inputs_for(gm: Any) -> list[Any]:
    """Random tensors as the placeholders describe them, for a batch of 3; positive, as bounds and counts must be."""
    batch = facts.graph_facts(gm).batch
    torch.manual_seed(0)
    found: list[Any] = []
    for node in facts.placeholders(gm):
        value = node.meta["val"]
        shape = [int(facts.at(s, batch, 3)) for s in facts.shape(value)]
        small = value.dtype.is_floating_point
        found.append((torch.rand(shape) if small else torch.randint(2, shape)).to(value.dtype))
    return found


QUANTITIES = {q.field: q for q in (Norms(), ClippedSum(0.1), Grads())}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "field"), one_in(8, itertools.product(SIZES, QUANTITIES)))
def test_same_numbers(name: str, field: str) -> None:
    quantity = QUANTITIES[field]
    before, after = graphs(name, quantity)
    given = inputs_for(before)
    want, got = Meant(before).run(*given), Meant(after).run(*given)
    for one, other in zip(want, got, strict=True):
        scale = one.float().abs().max() + 1e-30
        limit = 1e-5 if quantity == Norms() else 2e-2  # sums and gradients are no longer rounded to bfloat16
        assert one.dtype is other.dtype
        assert (one.float() - other.float()).abs().max() / scale < limit


def test_gram_matrices_take_their_operands_as_they_are() -> None:
    before, after = graphs("gpt", Norms())
    wide = [n for n in before.graph.nodes if n.target in (aten.bmm.default, aten.mm.default) and wants_float(n)]
    assert len(wide) > 4
    left = [n for n in after.graph.nodes if n.target in (aten.bmm.default, aten.mm.default) and wants_float(n)]
    assert {facts.fact(n).contracts for n in left} == {"embed.weight"}  # what an embedding returns is float32
    assert sum(n.target in INTO for n in after.graph.nodes) == len(wide) - len(left)
    assert len(after.graph.nodes) < len(before.graph.nodes)


def wants_float(node: Any) -> bool:
    return bool(node.meta["val"].dtype is torch.float32)


@pytest.mark.parametrize(("tokens", "padded"), [pytest.param(16, 0, marks=pytest.mark.rest), (19, 6)])
def test_columns_come_in_whole_multiples(tokens: int, padded: int) -> None:
    sizes = SIZES["gpt"] | {"tokens": tokens}
    before, after = graphs("gpt", Norms(), sizes)
    assert sum(n.target is aten.constant_pad_nd.default for n in after.graph.nodes) >= padded // 2
    assert (padded == 0) == all(n.target is not aten.constant_pad_nd.default for n in after.graph.nodes)
    given = inputs_for(before)
    want, got = Meant(before).run(*given), Meant(after).run(*given)
    torch.testing.assert_close(got[-1], want[-1], rtol=1e-5, atol=0)


def test_gradients_are_not_rounded_between() -> None:
    before, after = graphs("gpt", Grads())
    assert not any(n.target in INTO for n in before.graph.nodes)
    assert sum(n.target in INTO for n in after.graph.nodes) >= 4


def test_a_cpu_keeps_its_graph() -> None:
    before, _ = graphs("mlp", Norms())
    assert [n.target for n in run(widen, copy_graph(before), History(), device="cpu").graph.nodes] == [
        n.target for n in before.graph.nodes
    ]
