"""Samples that are rows, on a CUDA device: against each sample by itself, in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from torch import nn

import psg_fx
from support.device import CUDA, moved
from support.expected import compare
from support.graphs_of_nodes import GAT, GCN, GIN, EdgeMLP, batches, losses, made
from support.packed import MANY, documents
from support.packed import losses as losses_of_documents
from support.packed import made as reader
from support.rows_of_samples import Batch, RowsTruth, usual

pytestmark = [*CUDA, pytest.mark.usefixtures("fresh_compiler")]

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def agrees(model: nn.Module, loss_fn: Callable[..., Any], given: list[Batch], backend: str) -> None:
    """One step serves all batches."""
    asked = usual()
    step = psg_fx.transform(
        deepcopy(model).to("cuda"), loss_fn, batch_dim=given[0].batch_dim, quantities=asked, backend=backend
    )
    for batch in given:
        out = step(moved(batch.whole.inputs), moved(batch.whole.targets))
        for field, value in vars(out).items():
            setattr(out, field, moved(value, "cpu"))
        compare(out, RowsTruth(model, loss_fn, batch), asked, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [GIN, GCN, GAT, EdgeMLP])
def test_graphs(kind: type[nn.Module], backend: str) -> None:
    agrees(made(kind), losses, batches(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents(backend: str) -> None:
    given = [documents(*one, seed=k) for k, one in enumerate(MANY)]
    agrees(reader(), losses_of_documents, given, backend)
