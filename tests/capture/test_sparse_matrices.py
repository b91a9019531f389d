"""Fixed sparse matrices of a model: graphs of users and items, adjacencies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported
from support.oracle import check_call

N, D = 6, 3
IDS = torch.tensor([0, 1, 5, 2]), torch.tensor([3, 3, 4, 0])
Y = torch.tensor([1.0, 0.0, 1.0, 1.0])


def matrix(layout: str) -> Tensor:
    torch.manual_seed(1)
    dense = torch.rand(N, N) * (torch.rand(N, N) > 0.5)
    return dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()


class Graph(nn.Module):
    """Scores of pairs of nodes, whose embeddings are spread over the edges of a graph."""

    def __init__(self, spread: Callable[[Graph, Tensor], Tensor], layout: str = "coo", buffer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spread = spread
        self.nodes = nn.Embedding(N, D)
        self.register_buffer("places", torch.tensor([[0, 1, 2, 5, 5, 5], [3, 3, 4, 2, 1, 1]]))
        self.register_buffer("weights", torch.rand(6))
        self.A: Tensor
        self.register_buffer("A", matrix(layout)) if buffer else setattr(self, "A", matrix(layout))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        x = self.nodes.weight
        x = x + self.spread(self, x)
        return (x[one] * x[other]).sum(-1)


def made_of_buffers(self: Graph, x: Tensor) -> Tensor:
    A = torch.sparse_coo_tensor(self.places, self.weights, (N, N))
    return A.t() @ (A @ x)


PRODUCTS: dict[str, Callable[[Graph, Tensor], Tensor]] = {
    "torch.sparse.mm": lambda m, x: torch.sparse.mm(m.A, x),
    "matmul": lambda m, x: m.A @ x,
    "mm": lambda m, x: torch.mm(m.A, x),
    "spmm": lambda m, x: torch.spmm(m.A, x),
    "twice": lambda m, x: torch.sparse.mm(m.A, torch.sparse.mm(m.A, x)),
    "scaled": lambda m, x: (m.A * 2).coalesce() @ x,
    "dense": lambda m, x: m.A.to_dense() @ x,
    "its entries": lambda m, x: torch.zeros_like(x).index_add(
        0,
        m.A.to_sparse_coo().coalesce().indices()[0],
        m.A.to_sparse_coo().coalesce().values()[:, None] * x[m.A.to_sparse_coo().coalesce().indices()[1]],
    ),
    "sums of rows": lambda m, x: m.A.to_sparse_coo().sum(1).to_dense()[:, None] * x,
    "a vector": lambda m, x: (m.A @ x.sum(1)).unsqueeze(1),
}
LOSS = F.binary_cross_entropy_with_logits


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("spread", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_products(spread: Callable[[Graph, Tensor], Tensor], layout: str, buffer: bool) -> None:
    if spread is PRODUCTS["scaled"] and layout == "csr":
        pytest.skip("torch coalesces the layout coo alone")
    model = Graph(spread, layout, buffer)
    step = psg_fx.transform(model, LOSS, backend="eager")
    model.double() if buffer else setattr(model.double(), "A", model.A.double())
    check_call(step, model, LOSS, IDS, Y.double())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_one_that_is_made_of_buffers() -> None:
    model = Graph(made_of_buffers).double()
    step = psg_fx.transform(model, LOSS, backend="eager")
    for _ in range(2):
        check_call(step, model, LOSS, IDS, Y.double())
        model.weights.mul_(2)
    assert [c.why for c in step.captures] == ["first call", "changed: the value of Graph.weights"]


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_numbers_are_another_graph(layout: str) -> None:
    model = Graph(PRODUCTS["matmul"], layout).double()
    step = psg_fx.transform(model, LOSS, backend="eager")
    check_call(step, model, LOSS, IDS, Y.double())
    (model.A._values() if layout == "coo" else model.A.values()).mul_(3)
    check_call(step, model, LOSS, IDS, Y.double())
    model.A = model.A * 2
    with pytest.warns(UserWarning, match=r"captured for the third time .* the value of Graph.A has changed"):
        check_call(step, model, LOSS, IDS, Y.double())
    with torch.no_grad():
        model.nodes.weight.mul_(2)  # a parameter's numbers are read at every call
    check_call(step, model, LOSS, IDS, Y.double())
    assert [c.why for c in step.captures][1:] == ["changed: the value of Graph.A"] * 2


def test_compiled_and_validated() -> None:
    model = Graph(PRODUCTS["torch.sparse.mm"])
    step = psg_fx.transform(model, LOSS, quantities=[psg_fx.Norms(), psg_fx.ClippedSum(max_norm=0.1)])
    assert step.validate(IDS, Y).ok


def draw(m: Graph, x: Tensor) -> Tensor:
    return F.dropout(m.A, 0.5) @ x


def write(m: Graph, x: Tensor) -> Tensor:
    return m.A.clone().mul_(2) @ x


def on_the_right(m: Graph, x: Tensor) -> Tensor:
    return (x.t() @ m.A).t()


def values_with_gradients(m: Graph, x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(m.places, m.nodes.weight[:, 0].clone(), (N, N)) @ x


def of_another_size(m: Graph, x: Tensor) -> Tensor:
    return m.A @ torch.cat([x, x])


def of_another_dtype(m: Graph, x: Tensor) -> Tensor:
    return (m.A.double() @ x).to(x.dtype)


def parameter(m: Graph, x: Tensor) -> Tensor:
    return torch.sparse.mm(nn.Parameter(m.A, True), x)


@pytest.mark.parametrize(
    "spread", [draw, write, on_the_right, values_with_gradients, parameter, of_another_size, of_another_dtype]
)
def test_refused_with_the_line(spread: Callable[[Graph, Tensor], Tensor]) -> None:
    step = psg_fx.transform(Graph(spread), LOSS, backend="eager")
    with pytest.raises(NotYetSupported, match=r"sparse tensor|what the graph computes") as caught:
        step(IDS, Y)
    assert "test_sparse_matrices.py" in str(caught.value)
    assert "A @ x" in str(caught.value)
