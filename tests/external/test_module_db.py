"""PyTorch's own modules, by its own list of them, and recurrent layers and attention with every option."""

from __future__ import annotations

import functools
import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from external import module_db, sequences
from external.program import Program, check, drop_in, with_loss
from support import oracle
from support.selection import leaves_out_the_rest, selected

pytestmark = pytest.mark.xdist_group("operators")  # PyTorch's lists of its modules and operators take long to import

WAYS = {"with_loss": with_loss, "drop_in": drop_in}
CHOSEN = [
    "BatchNorm1d-4-not_tracking_stats-eval", "LazyConv1d-0-train", "RMSNorm-3-3d_elementwise_affine-train",
    "Embedding-1-discontiguous-train", "rnn/plain", "attention/bias-kv-zero-masks", "bag/sum", "bag/by-frequency",
    "lazy/linear", "cdist/one", "parametrized/weight-norm",
]  # fmt: skip
"""A few modules of the database, and of those that have many variants; all others are in the rest."""


@functools.cache
def every() -> dict[str, Program]:
    return {program.name: program for program in [*module_db.programs(), *sequences.programs()]}


def named(name: str) -> Program:
    """The program, without those of other modules."""
    programs = sequences.programs() if "/" in name else module_db.database(name.partition("-")[0])
    return next(program for program in programs if program.name == name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The names, of which the rest are not even listed where they are left out."""
    if "name" not in metafunc.fixturenames:
        return
    listed = CHOSEN if leaves_out_the_rest(metafunc.config) else list(every())
    metafunc.parametrize("name", selected(listed, CHOSEN))


@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored:UserWarning")
def test_exact_or_refused(name: str) -> None:
    """In one of the two ways, whichever its name picks; a loss of its own is inside the step."""
    program = named(name)
    check(program, with_loss if program.problem().loss_fn is not None else WAYS[way(name)])


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored:UserWarning")
def test_the_other_way(name: str) -> None:
    program = named(name)
    if program.problem().loss_fn is None:
        check(program, WAYS[way(name, -1)])


def way(name: str, more: int = 0) -> str:
    return list(WAYS)[(zlib.crc32(name.encode()) // 7 % 2) + more]


def test_modules_are_listed() -> None:
    for name in ("Linear", "Conv2d", "LazyConv2d", "LSTM", "MultiheadAttention", "Transformer", "Embedding"):
        assert module_db.database(name), name
    assert not torch.backends.flags_frozen()


@pytest.mark.rest  # it builds all modules
def test_the_whole_database_is_listed() -> None:
    names = {info.name.removeprefix("nn.") for info in module_db.infos()}
    listed = {program.name.partition("-")[0] for program in module_db.database()}
    assert listed <= names
    assert len(listed) > 80


def test_a_sparse_embedding_has_the_gradients_of_a_dense_one() -> None:
    dense, sparse = nn.Embedding(7, 4, dtype=torch.float64), nn.Embedding(7, 4, sparse=True, dtype=torch.float64)
    sparse.load_state_dict(dense.state_dict())
    ids, targets = torch.randint(7, (3, 5)), torch.randint(4, (3, 5))

    def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.transpose(1, 2), targets, reduction="sum")

    found = psg_fx.transform(sparse, loss, backend="eager")(ids, targets).grads
    assert oracle.worst_error(found, oracle.loop_grads(dense, loss, ids, targets)[1]) < 1e-12
