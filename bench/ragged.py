"""Samples that are rows, or as long as they are: what a clipped sum costs of graphs, documents, an LSTM, experts.

    python bench/ragged.py [--models gin,packed,lstm,moe] [--quantity clipped_sum] [--device cpu|cuda] [--seconds S]
                           [--tag NAME] [--quick]

In interleaved rounds: the ordinary step (one compiled forward and backward of the mean loss); the step; of rows also
the step that leaves all of them as they lie (the only one on a GPU); the documents padded to one length each, as
ordinary samples; and a loop over the samples, a forward and a backward of each by itself, whose answer is compared
first.  Writes `bench/results/ragged-<tag>.json` and `.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _results import beside, clipped_one_by_one, require_same, settled, timing_options, told
from torch import Tensor, nn

import psg_fx
from psg_fx.quantities.names import USUAL
from psg_fx.step import rows as of_call

ORDINARY, LOOP = "ordinary step", "loop over samples"
NODES, EDGES, TOKENS = psg_fx.Rows("batch"), psg_fx.Rows(None, dim=1), psg_fx.Rows("ids", dim=1)


@dataclass(frozen=True)
class Example:
    """A model and a batch of it.

    alone: inputs and targets of each sample by itself.  padded: the same documents as ordinary samples, inputs and
    targets and a loss; None for graphs.  compiles: whether torch compiles the ordinary step.
    """

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    inputs: Any
    targets: Any
    batch_dim: Any
    alone: list[tuple[Any, Any]]
    padded: tuple[Any, Any, Callable[..., Tensor]] | None = None
    compiles: bool = True

    def losses(self, inputs: Any, targets: Any) -> Tensor:
        """`[B]`"""
        out = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        return self.loss_fn(out, **targets) if isinstance(targets, dict) else self.loss_fn(out, targets)

    def loss(self, inputs: Any, targets: Any) -> Tensor:
        """That of one sample."""
        return self.losses(inputs, targets).sum()

    @property
    def in_rows(self) -> bool:
        """Whether samples are rows; otherwise they are places in a dim, as they are of padded sequences."""
        return self.batch_dim != 0


class GIN(nn.Module):
    """Five rounds of h = MLP(h + Σ of neighbours), summed over each graph (Xu et al. 2019, arXiv:1810.00826)."""

    def __init__(self, features: int = 16, width: int = 64, rounds: int = 5) -> None:
        super().__init__()
        sizes = [features, *[width] * (rounds - 1)]
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(a, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)) for a in sizes
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, graphs: int) -> Tensor:
        for mlp in self.rounds:
            x = mlp(x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])).relu()
        return self.head(x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x))


def each(out: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(out, y, reduction="none")


def gin(device: str, graphs: int = 128) -> Example:
    """Graphs of 10 to 40 nodes, four neighbours to a node."""
    drawn = torch.Generator().manual_seed(0)
    sizes = torch.randint(10, 41, (graphs,), generator=drawn)
    batch = torch.arange(graphs).repeat_interleave(sizes)
    starts, count = (sizes.cumsum(0) - sizes)[batch], len(batch)
    dst = torch.arange(count).repeat_interleave(4)
    src = starts[dst] + (torch.rand(len(dst), generator=drawn) * sizes[batch[dst]]).long()
    x, y = torch.randn(count, 16, generator=drawn), torch.randint(10, (graphs,), generator=drawn)
    x, edge_index, batch, y = (t.to(device) for t in (x, torch.stack([src, dst]), batch, y))
    alone = []
    for graph, start in enumerate((sizes.cumsum(0) - sizes).tolist()):
        own, among = batch == graph, batch[edge_index[0]] == graph
        inputs = (x[own], edge_index[:, among] - start, torch.zeros_like(batch[own]), 1)
        alone.append((inputs, y[graph : graph + 1]))
    torch.manual_seed(0)
    dims = ((NODES, EDGES, NODES, 0), 0)
    return Example(GIN().to(device), each, (x, edge_index, batch, graphs), y, dims, alone)


class Reader(nn.Module):
    """Two layers of attention within documents; `ids` None: each row of the batch is a document."""

    def __init__(self, width: int = 128, heads: int = 4, letters: int = 256, longest: int = 128) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(letters, width), nn.Embedding(longest, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, letters)

    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        mask = None
        if ids is not None:
            size = tokens.shape[1]
            before = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
            mask = ((ids[:, :, None] == ids[:, None, :]) & before)[:, None]
        x = self.token(tokens) + self.place(positions)
        for qkv, out, norm in zip(self.qkv, self.out, self.norms, strict=False):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            x = x + out(a.transpose(1, 2).flatten(2))
        return self.head(self.norms[2](x))


def of_documents(logits: Tensor, labels: Tensor, ids: Tensor, documents: int) -> Tensor:
    """The mean loss over the tokens of each document."""
    losses = F.cross_entropy(logits[0], labels[0], reduction="none")
    count = losses.new_zeros(documents).index_add(0, ids[0], torch.ones_like(losses))
    return losses.new_zeros(documents).index_add(0, ids[0], losses) / count


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """The same where each row of the batch is a document, padded by labels of -100."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return losses.view(labels.shape).sum(1) / (labels != -100).sum(1)


def packed(device: str, documents: int = 32) -> Example:
    """Documents of 16 to 128 tokens in one sequence."""
    drawn = torch.Generator().manual_seed(0)
    sizes = torch.randint(16, 129, (documents,), generator=drawn)
    ids = torch.arange(documents).repeat_interleave(sizes)
    positions = torch.cat([torch.arange(n) for n in sizes])
    tokens, labels = torch.randint(256, (2, len(ids)), generator=drawn)
    rows = {"tokens": tokens[None], "positions": positions[None], "ids": ids[None]}
    inputs = {name: t.to(device) for name, t in rows.items()}
    targets = {"labels": labels[None].to(device), "ids": inputs["ids"], "documents": documents}
    cut = torch.nn.utils.rnn.pad_sequence
    wide = [cut(t.split(sizes.tolist()), True, fill) for t, fill in ((tokens, 0), (positions, 0), (labels, -100))]
    wide = [t.to(device) for t in wide]
    torch.manual_seed(0)
    dims = (dict.fromkeys(rows, TOKENS), {"labels": TOKENS, "ids": TOKENS, "documents": 0})
    alone = []
    for document in range(documents):
        mine = ids == document
        own = {name: t[:, mine].to(device) for name, t in (rows | {"ids": torch.zeros_like(ids)[None]}).items()}
        alone.append((own, {"labels": labels[None, mine].to(device), "ids": own["ids"], "documents": 1}))
    padded = (wide[0], wide[1]), wide[2], of_rows
    return Example(Reader().to(device), of_documents, inputs, targets, dims, alone, padded)


class Recurrent(nn.Module):
    """Two layers over packed sequences, and the last state of the second."""

    def __init__(self, width: int = 128, letters: int = 256) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(letters, width), nn.Linear(width, 10)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = nn.utils.rnn.pack_padded_sequence(self.token(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(x)[1][0][-1])


def lstm(device: str, documents: int = 32) -> Example:
    """Documents of 16 to 128 tokens, padded, and packed by the model.  Alone, each is as long as it is."""
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 129, (documents,), generator=drawn)
    tokens = torch.randint(256, (documents, 128), generator=drawn).to(device)
    y = torch.randint(10, (documents,), generator=drawn).to(device)
    alone = [
        ((tokens[b : b + 1, :length], lengths[b : b + 1]), y[b : b + 1]) for b, length in enumerate(lengths.tolist())
    ]
    torch.manual_seed(0)
    return Example(Recurrent().to(device), each, (tokens, lengths), y, 0, alone)


class Experts(nn.Module):
    """Each token by the two best of eight experts; rows are brought in order of their experts, and put back."""

    def __init__(self, width: int = 256, hidden: int = 512, experts: int = 8, choices: int = 2) -> None:
        super().__init__()
        self.experts, self.choices = experts, choices
        self.norm, self.gate, self.head = nn.LayerNorm(width), nn.Linear(width, experts), nn.Linear(width, 10)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, ids = self.gate(tokens).softmax(-1).topk(self.choices)
        ids, order = ids.flatten().sort()
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        h = F.gelu(F.grouped_mm(tokens[order // self.choices], self.up, offs=ends))
        y = F.grouped_mm(h, self.down, offs=ends) * weights.flatten()[order, None]
        back = torch.zeros_like(tokens).index_add(0, order // self.choices, y)
        return self.head((x + back.view(x.shape)).mean(1))


def moe(device: str, samples: int = 16, tokens: int = 128) -> Example:
    """Sequences of tokens; torch compiles grouped products in bfloat16 alone, so the ordinary step is not compiled."""
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, tokens, 256, generator=drawn), torch.randint(10, (samples,), generator=drawn)
    x, y = x.to(device), y.to(device)
    torch.manual_seed(0)
    alone = [((x[b : b + 1],), y[b : b + 1]) for b in range(samples)]
    return Example(Experts().to(device), each, (x,), y, 0, alone, compiles=False)


MODELS: dict[str, Callable[[str], Example]] = {"gin": gin, "packed": packed, "lstm": lstm, "moe": moe}


def main() -> None:
    args = arguments()
    rows = [measured(name, args) for name in args.models.split(",")]
    told("ragged", f"# {args.quantity} of samples that are rows, against the ordinary step", rows, args)


def arguments() -> argparse.Namespace:
    return timing_options(__doc__, MODELS, ",".join(MODELS)).parse_args()


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model: milliseconds of every contender, and its ratio to the ordinary step."""
    found = MODELS[name](args.device)
    one_by_one = looped(found)
    runs: dict[str, Callable[[], object]] = {ORDINARY: ordinary(found, args)}
    ways: dict[str, tuple[int, ...]] = {"step": ()}
    if found.in_rows:
        ways["rows as they lie"] = (0, 0)
    for label, layout in ways.items():
        run = stepped(found, args, *layout)
        if args.quantity == "clipped_sum":
            require_same(run().clipped_sum, one_by_one(), f"{name}, {label}")
        runs[label] = settled(run, args.device)
    if found.padded is not None:
        runs["padded samples"] = padded(found, args)
    runs[LOOP] = settled(one_by_one, args.device)
    return {"model": name, "B": len(found.alone)} | beside(runs, ORDINARY, args)


def ordinary(found: Example, args: argparse.Namespace) -> Callable[[], object]:
    """Forward and backward of the mean loss, compiled where torch can."""
    parameters = [p for p in found.model.parameters() if p.requires_grad]
    losses = torch.compile(found.losses) if found.compiles else found.losses

    def run() -> None:
        with torch.enable_grad():
            torch.autograd.grad(losses(found.inputs, found.targets).mean(), parameters)

    return settled(run, args.device)


def stepped(found: Example, args: argparse.Namespace, *layout: int) -> Callable[[], Any]:
    """The step on rows; layout: the bounds beyond which rows stay as they lie."""
    step = psg_fx.transform(
        found.model, found.loss_fn, quantities=USUAL[args.quantity], batch_dim=found.batch_dim
    )  # a step of its own: compiled for these sizes alone

    def run() -> Any:
        kept = of_call._SPARSE, of_call._FEW
        of_call._SPARSE, of_call._FEW = layout or kept
        try:
            return step(found.inputs, found.targets)
        finally:
            of_call._SPARSE, of_call._FEW = kept

    return run


def padded(found: Example, args: argparse.Namespace) -> Callable[[], object]:
    """The documents as ordinary samples."""
    assert found.padded is not None
    inputs, targets, loss_fn = found.padded
    step = psg_fx.transform(found.model, loss_fn, quantities=USUAL[args.quantity])
    return settled(lambda: step(inputs, targets), args.device)


def looped(found: Example) -> Callable[[], list[Tensor]]:
    """The clipped sum by a forward and a backward of each sample by itself."""
    parameters = [p for p in found.model.parameters() if p.requires_grad]
    losses = [partial(found.loss, *sample) for sample in found.alone]
    return lambda: clipped_one_by_one(losses, parameters)


if __name__ == "__main__":
    main()
