"""Sizes, orders and groups drawn at random: samples without rows, all rows of one, groups of none, unsorted ids."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from torch import nn

from psg_fx import ClippedSum, Gram, Norms
from support import packed
from support.graphs_of_nodes import GCN, GIN, graphs, losses, made
from support.groups_of_rows import Given
from support.groups_of_rows import check as check_groups
from support.rows_of_samples import Batch, check, usual

SEEDS = [pytest.param(seed, marks=[] if seed == 0 else pytest.mark.rest) for seed in range(20)]
BATCHES = 3
"""Of each seed, for one step."""


def sizes_of(draw: random.Random, least: int = 0) -> list[int]:
    """Rows of 1 to 6 samples, often of none, sometimes all of one sample."""
    count = draw.randint(1, 6)
    if draw.random() < 0.2:
        found = [least] * count
        found[draw.randrange(count)] = draw.randint(1, 6)
        return found
    return [draw.choice([least, draw.randint(1, 6)]) for _ in range(count)]


def drawn_graphs(draw: random.Random) -> Batch:
    nodes = sizes_of(draw)
    edges = [draw.randint(0, 2 * n) for n in nodes]
    return graphs(nodes, edges, draw.choice(["sorted", "shuffled"]), draw.randrange(100))


def drawn_documents(draw: random.Random) -> Batch:
    return packed.documents(sizes_of(draw, least=1), draw.choice(["sorted", "shuffled"]), draw.randrange(100))


def grouped(draw: random.Random, batch: Batch) -> Given:
    """Ids in any order, in no group (-1), all in one; more groups than are named, or as many."""
    names = draw.choice([[0], [-1, 0, 2], list(range(batch.count))])
    ids = [draw.choice(names) for _ in range(batch.count)]
    return batch, ids, max(*ids, 0) + 1 + draw.randrange(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [GIN, pytest.param(GCN, marks=pytest.mark.rest)])
def test_graphs(kind: Callable[[], nn.Module], seed: int) -> None:
    draw = random.Random(seed)
    check(
        made(kind), losses, [drawn_graphs(draw) for _ in range(BATCHES)], quantities=[*usual(), Gram()], captures=None
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_graphs(seed: int) -> None:
    draw = random.Random(seed)
    check_groups(made(GIN), losses, [grouped(draw, drawn_graphs(draw)) for _ in range(BATCHES)], [*usual(), Gram()])


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_documents(seed: int) -> None:
    draw = random.Random(seed)
    check(packed.made(depth=1), packed.losses, [drawn_documents(draw) for _ in range(BATCHES)],
          quantities=[Norms(), ClippedSum(0.3), Gram()])  # fmt: skip


@pytest.mark.rest  # seconds of g++ for each
@pytest.mark.inductor
@pytest.mark.parametrize("seed", range(5))
def test_compiled(seed: int) -> None:
    draw = random.Random(seed)
    batches = [drawn_graphs(draw) for _ in range(BATCHES)]
    check(made(GIN), losses, batches, backend="inductor", quantities=[ClippedSum(0.3)], captures=None)
