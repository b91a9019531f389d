"""What repeats is written once: the same numbers, from a graph that does not grow with the number of layers."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.repeats import Repeat, repeats
from psg_fx.graph.same_op import draws
from psg_fx.passes.compile.calls import invoke_subgraph, written_once
from psg_fx.passes.compile.prepared import written_out


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ("abcabcabc", [((0, 3, 6), 3)]),
        ("xabcyabcz", [((1, 5), 3)]),
        ("abcabcabcdexdex", [((0, 3, 6), 3), ((9, 12), 3)]),
        ("aaaaaaa", [((0, 3), 3)]),
        ("abcd", []),
        ("abxab", []),  # two are too few
    ],
)
def test_stretches_that_come_again(tokens: str, found: list[Any]) -> None:
    assert repeats([ord(t) for t in tokens], fewest=3) == [Repeat(*one) for one in found]


class Layers(nn.Module):
    """Layers whose values are also read as views, across their borders."""

    def __init__(self, count: int, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(drop)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x.transpose(1, 2))
        return x


def loss(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t)


def lowered(model: nn.Module, inputs: Tensor) -> GraphModule:
    """The last graph of a clipped step, as a compiler takes it."""
    step = psg_fx.transform(model, loss, quantities=psg_fx.ClippedSum(1.0), backend="eager", progress=False)
    step(inputs, inputs)
    return written_out(step.graphs["tidied"])


def parts(gm: GraphModule) -> list[Graph]:
    """The graph, and those of the functions that it calls."""
    return [part.graph for part in gm.modules() if isinstance(part, GraphModule)]


def ops(gm: GraphModule) -> int:
    """How many there are to compile: those of a function once, calls, and no views."""
    return sum(n.op == "call_function" and not is_view(n) for graph in parts(gm) for n in graph.nodes)


def calls(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.target is invoke_subgraph]


def arguments(gm: GraphModule, batch: int) -> list[Tensor]:
    """Numbers for all inputs of a graph."""
    torch.manual_seed(0)
    sizes = [[batch if isinstance(n, torch.SymInt) else n for n in p.meta["val"].shape] for p in facts.placeholders(gm)]
    return [torch.rand(size, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_function(batch: int) -> None:
    gm = lowered(Layers(4).double(), torch.randn(3, 8, 8, dtype=torch.float64))
    once = written_once(gm, fewest=8)
    assert len(calls(once)) >= 6, "forward and backward of each layer but the outermost"
    once.graph.lint()
    given = arguments(gm, batch)
    with torch.no_grad():
        for one, other in zip(gm(*given), once(*given), strict=True):
            assert torch.equal(one, other)


def test_the_graph_grows_by_calls_alone() -> None:
    """Of a further layer: one forward, one backward, and one for its weighted sums."""
    x = torch.randn(3, 8, 8)
    four, six = (lowered(Layers(n), x) for n in (4, 6))
    assert ops(six) - ops(four) > 2 * 20
    assert ops(written_once(six, fewest=8)) - ops(written_once(four, fewest=8)) <= 2 * 3


def test_functions_give_no_views() -> None:
    """What lies in the memory of an operand, or of another result, is made by those who read it."""
    once = written_once(lowered(Layers(4), torch.randn(3, 8, 8)), fewest=8)
    for graph in parts(once)[1:]:
        results = graph.output_node().args[0]
        assert len(set(results)) == len(results)  # type: ignore[arg-type]
        for node in results:  # type: ignore[union-attr]
            source = node.args[0] if node.target is operator.getitem else node
            assert source.op == "call_function"
            assert not is_view(source)


def test_views_are_made_where_they_are_read() -> None:
    """The graph around the calls has as many views for six layers as for four."""
    x = torch.randn(3, 8, 8)
    four, six = (lowered(Layers(n), x) for n in (4, 6))

    def views(gm: GraphModule) -> int:
        return sum(isinstance(n.target, torch._ops.OpOverload) and is_view(n) for n in gm.graph.nodes)

    assert views(six) - views(four) >= 2 * 5
    assert views(written_once(six, fewest=8)) == views(written_once(four, fewest=8))


def test_random_numbers_are_drawn_outside() -> None:
    """In the order in which the graph draws them."""
    gm = lowered(Layers(4, drop=0.5), torch.randn(3, 8, 8))
    once = written_once(gm, fewest=4)
    drawn = [n.target for n in gm.graph.nodes if n.op == "call_function" and draws(n)]
    assert calls(once)
    assert len(drawn) >= 4
    assert drawn == [n.target for n in once.graph.nodes if n.op == "call_function" and draws(n)]


@pytest.mark.parametrize("budget", [None, 2**30])
def test_gradients_stand_beside_the_backward(budget: int | None) -> None:
    """The last layer's gradients come before the first layer's backward, unless memory was counted otherwise."""
    x = torch.randn(3, 8, 8)
    step = psg_fx.transform(
        Layers(4), loss, quantities=psg_fx.ClippedSum(1.0), backend="eager", progress=False, memory_budget=budget
    )
    step(x, x)
    names = [node.name for node in step.graphs["tidied"].graph.nodes]
    product = next(i for i, name in enumerate(names) if name.startswith("layers_3_1_weight_grad_sample"))
    backward = max(i for i, name in enumerate(names) if name.startswith("native_layer_norm_backward"))
    assert (product < backward) == (budget is None)


def test_nothing_repeats() -> None:
    gm = lowered(nn.Linear(8, 8), torch.randn(3, 8, 8))
    assert written_once(gm) is gm


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_for_any_batch_size() -> None:
    torch.manual_seed(0)
    model = Layers(3)
    step, reference = (
        psg_fx.transform(model, loss, quantities=psg_fx.ClippedSum(1.0), backend=backend, dynamic=True, progress=False)
        for backend in ("inductor", "eager")
    )
    for batch in (3, 5, 4):
        x = torch.randn(batch, 8, 8)
        found, wanted = step(x, x).clipped_sum, reference(x, x).clipped_sum
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name])


def traced_again(gm: GraphModule, given: list[Tensor]) -> Any:
    """The graph as inductor gets it: its functions are traced with the operands of their first calls."""
    mode = FakeTensorMode()
    with torch.no_grad(), tracing(TracingContext(mode)):
        return aot_module_simplified(gm, [mode.from_tensor(t) for t in given], lambda graph, _: make_boxed_func(graph))


def test_no_operand_is_another_one_too() -> None:
    """Two operands that are one tensor in the first call of a function would be one in all of its calls."""

    def chain(*x: Tensor) -> tuple[Tensor]:
        found = x[0]
        for k in (1, 2, 3, 1, 4, 5, 6, 7, 8, 9, 10, 11):
            found = found + x[k]
        return (found,)

    given = [torch.full((2,), float(k)) for k in range(12)]
    once = written_once(make_fx(chain, tracing_mode="fake")(*given), fewest=4)
    assert len(calls(once)) == 2
    with torch.no_grad():
        assert torch.equal(traced_again(once, given)(*given)[0], chain(*given)[0])


def test_a_value_is_not_none() -> None:
    """An op with a weight is another one than an op with a bias in its place."""

    def norms(x: Tensor, *scales: Tensor) -> tuple[Tensor]:
        for k, scale in enumerate(scales):
            x = F.layer_norm(x, [4], *((scale, None) if k % 2 else (None, scale))).sin()
        return (x,)

    given = [torch.rand(3, 4), *(torch.rand(4) + 1 for _ in range(4))]
    once = written_once(make_fx(norms, tracing_mode="fake")(*given), fewest=2)
    assert torch.allclose(traced_again(once, given)(*given)[0], norms(*given)[0])


def test_views_of_other_sizes_are_made_outside() -> None:
    """A function is compiled for the operands of its first call."""

    def chains(*x: Tensor) -> list[Tensor]:
        first = [value[:4] for value in x]
        return [(value.sin().cos().tanh().exp() + value).sigmoid() for value in first]

    given = [torch.rand(size, 2) for size in (8, 8, 6)]
    once = written_once(make_fx(chains, tracing_mode="fake")(*given), fewest=4)
    assert len(calls(once)) == 3
    for call in calls(once):
        function = once.get_submodule(str(call.args[0].target))  # type: ignore[union-attr]
        for operand, value in zip(facts.placeholders(function), call.args[2:], strict=True):
            assert operand.meta["val"].shape == value.meta["val"].shape  # type: ignore[union-attr]
    with torch.no_grad():
        for one, other in zip(traced_again(once, given)(*given), chains(*given), strict=True):
            assert torch.equal(one, other)


def test_layers_traced_again() -> None:
    gm = lowered(Layers(4).double(), torch.randn(3, 8, 8, dtype=torch.float64))
    given = arguments(gm, 3)
    with torch.no_grad():
        for one, other in zip(gm(*given), traced_again(written_once(gm, fewest=4), given)(*given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
