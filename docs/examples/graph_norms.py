"""Graphs that a network finds odd: the norm of the gradient of every graph of a batch, from one backward.

A graph isomorphism network (GIN) learns to tell rings from trees. Some labels are wrong. The gradient of a graph with a
wrong label stays large while those of the others shrink, so its norm finds it, as it finds mislabelled digits.

    python docs/examples/graph_norms.py                      # half a minute on two cores
    python docs/examples/graph_norms.py --graphs 60 --epochs 20 --backend eager

The graphs are drawn here. A batch holds the nodes of all its graphs side by side, `batch` says of which graph each node
is, and a step refuses a batch in which an edge joins two graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

NODES, EDGES = psg_fx.Rows("batch"), psg_fx.Rows(None, dim=1)


@dataclass(frozen=True)
class Graphs:
    """Graphs side by side: features `[N, 1]`, both directions of every edge `[2, E]`, the graph of each node `[N]`, and
    whether each graph is a ring `[B]`.
    """

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    labels: Tensor


def draw(count: int, generator: torch.Generator) -> Graphs:
    """Graphs of 5 to 12 nodes: rings with one chord, and trees whose every node hangs on an earlier one."""
    edges, ids, labels, start = [], [], [], 0
    for graph in range(count):
        size, ring = (int(torch.randint(*ends, (), generator=generator)) for ends in ((5, 13), (0, 2)))
        nodes = torch.arange(size)
        if ring:
            pairs = torch.cat([torch.stack([nodes, nodes.roll(1)]), torch.tensor([[0], [2]])], 1)
        else:
            pairs = torch.stack([nodes[1:], (torch.rand(size - 1, generator=generator) * nodes[1:]).long()])
        edges += [pairs + start, pairs.flip(0) + start]
        ids.append(torch.full((size,), graph))
        labels.append(ring)
        start += size
    return Graphs(torch.ones(start, 1), torch.cat(edges, 1), torch.cat(ids), torch.tensor(labels))


class GIN(nn.Module):
    """Two rounds of h = MLP(h + Σ of neighbours), summed over each graph (Xu et al. 2019, arXiv:1810.00826)."""

    def __init__(self, width: int = 12, rounds: int = 2) -> None:
        super().__init__()
        sizes = [1, *[width] * rounds]
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(a, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width))
            for a in sizes[:-1]
        )
        self.head = nn.Linear(width * rounds, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, graphs: int) -> Tensor:
        pooled = []
        for mlp in self.rounds:
            x = F.relu(mlp(x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])))
            pooled.append(x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x))
        return self.head(torch.cat(pooled, 1))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, then look at the norms; what was found is returned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--wrong", type=float, default=0.1, help="share of the labels that are wrong")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)
    data = draw(args.graphs, drawn)
    wrong = torch.rand(args.graphs, generator=drawn) < args.wrong
    labels = torch.where(wrong, 1 - data.labels, data.labels)

    model = GIN()
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=[psg_fx.Norms(), psg_fx.MeanGrad()], backend=args.backend,
        batch_dim=((NODES, EDGES, NODES, 0), 0),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = (data.x, data.edge_index, data.batch, args.graphs)
    for _ in range(args.epochs):
        out = step(inputs, labels)
        for name, parameter in model.named_parameters():
            parameter.grad = out.mean_grad[name]
        optimizer.step()

    norms = step(inputs, labels).norms
    suspects = norms.argsort(descending=True)[: int(wrong.sum())]
    found = {
        "graphs": float(args.graphs), "wrong": float(wrong.sum()), "found": float(wrong[suspects].sum()),
        "norm of right": float(norms[~wrong].mean()), "norm of wrong": float(norms[wrong].mean()),
    }  # fmt: skip
    print(f"{args.graphs} graphs with {len(data.x)} nodes and {data.edge_index.shape[1] // 2} edges in one batch")
    right, wrong_ones = found["norm of right"], found["norm of wrong"]
    print(f"mean norm of the gradient: {right:.3f} of graphs with the right label, {wrong_ones:.3f} with the wrong one")
    print(f"of the {len(suspects)} graphs with the largest norms {int(found['found'])} have a wrong label")
    return found


if __name__ == "__main__":
    main()
