"""PyTorch's own modules, by its own list of them, and recurrent layers and attention with every option."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from external import module_db, sequences
from external.program import Program, check, drop_in, with_loss
from support import oracle
from support.selection import selected

EVERY = [*module_db.programs(), *sequences.programs()]
WAYS = {"with_loss": with_loss, "drop_in": drop_in}


def chosen() -> set[str]:
    """One program of every tenth module of the database, whichever its name picks; a few of those in many variants."""
    groups: dict[str, list[str]] = {}
    for program in module_db.database():
        groups.setdefault(program.name.partition("-")[0], []).append(program.name)
    picked = {group[zlib.crc32(name.encode()) % len(group)] for name, group in groups.items()}
    variants = [*sequences.RECURRENT, *sequences.ATTENTION, *sequences.TRANSFORMERS]
    return {*sorted(picked)[::10], *(p.name for p in [*variants[::30], *sequences.LAYERS[::6]])}


@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored:UserWarning")
@pytest.mark.parametrize("program", selected(EVERY, chosen()))
def test_exact_or_refused(program: Program) -> None:
    """In one of the two ways, whichever its name picks; a loss of its own is inside the step."""
    name = list(WAYS)[zlib.crc32(program.name.encode()) // 7 % 2]
    check(program, with_loss if program.problem().loss_fn is not None else WAYS[name])


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored:UserWarning")
@pytest.mark.parametrize("program", EVERY, ids=str)
def test_the_other_way(program: Program) -> None:
    name = list(WAYS)[zlib.crc32(program.name.encode()) // 7 % 2 - 1]
    if program.problem().loss_fn is None:
        check(program, WAYS[name])


def test_the_whole_database_is_listed() -> None:
    names = {info.name.removeprefix("nn.") for info in module_db.infos()}
    listed = {program.name.partition("-")[0] for program in module_db.database()}
    assert listed <= names
    assert {"Linear", "Conv2d", "LazyConv2d", "LSTM", "MultiheadAttention", "Transformer", "Embedding"} <= listed
    assert not torch.backends.flags_frozen()


def test_a_sparse_embedding_has_the_gradients_of_a_dense_one() -> None:
    dense, sparse = nn.Embedding(7, 4, dtype=torch.float64), nn.Embedding(7, 4, sparse=True, dtype=torch.float64)
    sparse.load_state_dict(dense.state_dict())
    ids, targets = torch.randint(7, (3, 5)), torch.randint(4, (3, 5))

    def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.transpose(1, 2), targets, reduction="sum")

    found = psg_fx.transform(sparse, loss, backend="eager")(ids, targets).grads
    assert oracle.worst_error(found, oracle.loop_grads(dense, loss, ids, targets)[1]) < 1e-12
