"""Ops in C++ find their arguments as they read them, written so once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx.ops.define import layout_of
from psg_fx.ops.products import gram_products
from psg_fx.passes.compile import compile as compiling
from psg_fx.passes.compile.contiguous import with_contiguous_arguments
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.tracer import trace_fakes
from support import oracle

aten = torch.ops.aten


def clones(gm: GraphModule) -> int:
    return sum(node.target is aten.clone.default for node in gm.graph.nodes)


def twice(x: Tensor, y: Tensor) -> Tensor:
    turned = x.mT
    return gram_products.gram_dots(turned, y) + gram_products.gram_dots(turned, 2 * y)


def test_a_copy_for_all_who_read_it() -> None:
    inputs = [torch.randn(3, 5, 4), torch.randn(3, 4, 6)]
    gm = make_fx(twice, tracing_mode="fake")(*inputs)
    with_contiguous_arguments(gm)
    gm.graph.lint()
    gm.recompile()
    assert clones(gm) == 1
    with_contiguous_arguments(gm)
    assert clones(gm) == 1
    torch.testing.assert_close(gm(*inputs), twice(*inputs))


def test_for_every_number_of_samples() -> None:
    gm = trace_fakes(twice, symbolic_inputs([torch.randn(3, 5, 4), torch.randn(3, 4, 6)], [0, 0]))
    with_contiguous_arguments(gm)
    gm.recompile()
    assert clones(gm) == 1
    inputs = [torch.randn(7, 5, 4), torch.randn(7, 4, 6)]
    torch.testing.assert_close(gm(*inputs), twice(*inputs))


def test_what_is_read_as_it_lies() -> None:
    """Rows of a sample that lie apart, as those of a layer that has all samples of a step side by side."""

    def apart(x: Tensor, y: Tensor) -> Tensor:
        return gram_products.gram_dots(x.transpose(0, 1), y.transpose(0, 1))

    gm = make_fx(apart, tracing_mode="fake")(torch.randn(4, 3, 5), torch.randn(4, 3, 6))
    with_contiguous_arguments(gm)
    assert clones(gm) == 0


def products(x: Tensor, y: Tensor) -> Tensor:
    """Of a row that stands for all, of columns, and of matrices with gaps in both dims."""
    same = x[:, :1].expand(-1, 5, -1)
    return torch.bmm(same, same.mT) + torch.bmm(x, x.mT) + torch.baddbmm(torch.ones(5, 5), x, y[:, ::2, ::2])


def test_matrices_that_the_blas_would_be_given_one_by_one() -> None:
    gm = trace_fakes(products, symbolic_inputs([torch.randn(3, 5, 4), torch.randn(3, 8, 10)], [0, 0]))
    with_contiguous_arguments(gm)
    gm.recompile()
    assert clones(gm) == 3
    inputs = [torch.randn(7, 5, 4), torch.randn(7, 8, 10)]
    torch.testing.assert_close(gm(*inputs), products(*inputs))


@pytest.mark.slow
@pytest.mark.inductor
def test_a_step_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of a recurrent layer, and norms by Gram matrices of what it has, whose steps come before samples."""
    graphs: list[GraphModule] = []
    original = compiling.with_contiguous_arguments

    def noted(gm: GraphModule) -> None:
        original(gm)
        graphs.append(gm)

    monkeypatch.setattr(compiling, "with_contiguous_arguments", noted)
    torch.manual_seed(0)
    model, x, y = nn.LSTM(40, 48, batch_first=True), torch.randn(3, 8, 40), torch.randn(3, 8, 48)

    def loss(out: tuple[Tensor, tuple[Tensor, Tensor]], target: Tensor) -> Tensor:
        return (out[0] - target).square().mean()

    step = psg_fx.transform(model, loss, quantities=[psg_fx.Norms(), psg_fx.ClippedSum(max_norm=0.1)])
    out = step(x, y)
    _, grads = oracle.loop_grads(model, loss, x, y)
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-5
    (gm,) = graphs
    reading = [node for node in gm.graph.nodes if layout_of(node.target)]
    assert {"psg_fx.lstm_here.default", "psg_fx.lstm_backward_here.default"} <= {str(node.target) for node in reading}
    for node in reading:
        lies_as_read = layout_of(node.target)
        assert lies_as_read
        assert all(lies_as_read(value.meta["val"]) for value in node.all_input_nodes)
