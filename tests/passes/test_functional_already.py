"""AOTAutograd takes lowered graphs as they are: what it would have made of them, and all others left to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._functorch._aot_autograd import graph_capture_wrappers
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.torch_private import functional_already
from psg_fx.torch_private.inductor import Like, compiled
from psg_fx.torch_private.ops import writes

aten = torch.ops.aten
Compiled = Callable[..., Sequence[Any]]

library = torch.library.Library("psg_fx_tests_composite", "DEF")
library.define("steps(Tensor x) -> Tensor")


@torch.library.impl(library, "steps", "CompositeImplicitAutograd")
def steps(x: Tensor) -> Tensor:
    """A composite kernel that writes into what it has made."""
    found = torch.zeros_like(x)
    found.select(0, 0).add_(x.sum(0))
    return found.mul_(2)


def _graph(function: Callable[..., Any], *tensors: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*tensors)


def _compiled(gm: GraphModule, *tensors: Tensor) -> tuple[Compiled, list[GraphModule]]:
    """What is compiled, and the graphs that inductor is given."""
    seen: list[GraphModule] = []

    def inner(traced: GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        seen.append(traced)
        run = Interpreter(traced).run
        made: Any = lambda arguments: run(*arguments)  # noqa: E731 (it takes an attribute)
        made._boxed_call = True
        return made

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, inputs, inner_compile=inner)

    number = sympy.Integer
    likes = [Like((*map(number, t.shape),), (*map(number, t.stride()),), t.dtype, t.device) for t in tensors]
    with torch.no_grad():
        run, _ = compiled(compiler, gm, likes, {}, {})
    return run, seen


def _with_general(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The graphs that are left to AOTAutograd from here on."""
    found: list[GraphModule] = []
    general = graph_capture_wrappers.PropagateUnbackedSymInts

    def noted(gm: GraphModule) -> Any:
        found.append(gm)
        return general(gm)

    monkeypatch.setattr(functional_already.symbolic_shapes, "PropagateUnbackedSymInts", noted)
    return found


def test_the_graph_is_what_aot_autograd_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _with_general(monkeypatch)
    x, w = torch.randn(4, 3), torch.randn(5, 3)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = aten.gelu(aten.mm(x, aten.t(w)))
        return aten._log_softmax(h, 1, False), aten.reshape(h, [-1])

    gm = _graph(function, x, w)
    run, (straight,) = _compiled(gm, x, w)
    monkeypatch.setattr(functional_already, "_writes_nowhere", lambda gm: False)
    assert not left
    _, (by_aot,) = _compiled(gm, x, w)
    assert left
    assert [node.target for node in straight.graph.nodes if node.op == "call_function"] == [
        node.target for node in by_aot.graph.nodes if node.op == "call_function"
    ]
    torch.testing.assert_close(tuple(run(x, w)), function(x, w))


def test_composite_kernels_that_write_are_recorded_without_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _with_general(monkeypatch)
    x = torch.randn(4, 3)
    graph = torch.fx.Graph()
    place = graph.placeholder("x")
    place.meta["val"] = x
    node = graph.call_function(torch.ops.psg_fx_tests_composite.steps.default, (place,))
    node.meta["val"] = x
    graph.output((node,))
    run, (seen,) = _compiled(GraphModule(torch.nn.Module(), graph), x)
    assert not left
    assert not any(writes(node.target) for node in seen.graph.nodes)
    torch.testing.assert_close(run(x)[0], steps(x))


def test_a_graph_that_writes_is_left_to_aot_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _with_general(monkeypatch)
    x, total = torch.randn(4), torch.zeros(4)
    gm = _graph(lambda x, total: (aten.add_(total, x), aten.exp(x)), x, total)
    run, _ = _compiled(gm, x, total)
    assert left
    run(x, total)
    torch.testing.assert_close(total, x)


def test_results_may_be_inputs_and_views_of_them_and_nothing() -> None:
    x = torch.randn(4, 3)

    def function(x: Tensor) -> tuple[Tensor | None, ...]:
        y = aten.exp(x)
        return x, aten.t(x), y, aten.select(y, 0, 1), y, None

    run, _ = _compiled(_graph(function, x), x)
    found = run(x)
    assert found[-1] is None
    for value, expected in zip(found[:-1], function(x)[:-1], strict=True):
        torch.testing.assert_close(value, expected)
