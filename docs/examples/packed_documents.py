"""Influential documents of a packed batch: which documents moved a model towards a new one.

Documents of three made-up languages (Markov chains over a few letters) lie side by side in one sequence, as they do in
the training of language models. A small transformer reads them under a mask that keeps them apart. To first order a
step on document i changes the loss of a query by -η ⟨gᵢ, g⟩; one call gives this product for every document of the
batch (Koh & Liang 2017, arXiv:1703.04730, without the Hessian). The most helpful ones should be of its language.

    python docs/examples/packed_documents.py                     # a minute on two cores
    python docs/examples/packed_documents.py --documents 12 --steps 20 --backend eager
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

LETTERS, LANGUAGES, LONGEST = 12, 3, 24
TOKENS = psg_fx.Rows("ids", dim=1)
BATCH_DIM = ({"tokens": TOKENS, "positions": TOKENS, "ids": TOKENS}, {"labels": TOKENS, "ids": TOKENS, "documents": 0})
Batch = tuple[dict[str, Tensor], dict[str, Tensor | int]]


class Reader(nn.Module):
    """A transformer of two layers that sees what lies before, in the same document."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(LETTERS, width), nn.Embedding(LONGEST, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        size = tokens.shape[1]
        before = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
        mask = ((ids[:, :, None] == ids[:, None, :]) & before)[:, None]
        x = self.token(tokens) + self.place(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(self.norm(x)).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return self.head(self.norm(x))


def loss_of_documents(logits: Tensor, labels: Tensor, ids: Tensor, documents: int) -> Tensor:
    """The mean loss over the letters of each document, `[B]`."""
    each = F.cross_entropy(logits[0], labels[0], reduction="none")
    count = each.new_zeros(documents).index_add(0, ids[0], torch.ones_like(each))
    return each.new_zeros(documents).index_add(0, ids[0], each) / count


def write(language: int, generator: torch.Generator) -> Tensor:
    """A document: after letter a comes a + 1 + language, or now and then any other."""
    length = int(torch.randint(8, LONGEST + 1, (), generator=generator))
    letters = [int(torch.randint(LETTERS, (), generator=generator))]
    for _ in range(length):
        odd, other = torch.rand((), generator=generator) < 0.2, int(torch.randint(LETTERS, (), generator=generator))
        letters.append(other if odd else (letters[-1] + 1 + language) % LETTERS)
    return torch.tensor(letters)


def pack(documents: Sequence[Tensor]) -> Batch:
    """Documents side by side, as inputs and targets of a step."""
    lengths = torch.tensor([len(d) - 1 for d in documents])
    ids = torch.arange(len(documents)).repeat_interleave(lengths)[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens, labels = (torch.cat([d[part] for d in documents])[None] for part in (slice(-1), slice(1, None)))
    return (
        {"tokens": tokens, "positions": positions, "ids": ids},
        {"labels": labels, "ids": ids, "documents": len(documents)},
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train a little, then rank the documents for a query of each language."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)
    languages = torch.arange(args.documents) % LANGUAGES
    inputs, targets = pack([write(int(k), drawn) for k in languages])

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss_of_documents(model(**inputs), **targets).mean().backward()
        optimizer.step()

    gradient = psg_fx.transform(model, loss_of_documents, quantities=psg_fx.MeanGrad(), batch_dim=BATCH_DIM,
                                backend=args.backend)  # fmt: skip
    products = psg_fx.transform(model, loss_of_documents, quantities=psg_fx.Dots(), batch_dim=BATCH_DIM,
                                backend=args.backend)  # fmt: skip
    found = {}
    for language in range(LANGUAGES):
        query = gradient(*pack([write(language, drawn) for _ in range(4)])).mean_grad
        influence = products(inputs, targets, directions=query).dots
        best = influence.argsort(descending=True)[: args.documents // LANGUAGES]
        share = float((languages[best] == language).double().mean())
        found[f"language {language}"] = share
        print(f"query of language {language}: {share:.0%} of the {len(best)} most helpful documents are of it")
    return found


if __name__ == "__main__":
    main()
