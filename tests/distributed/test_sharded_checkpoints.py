"""A checkpoint of a sharded model and its optimizer is read by another number of processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

import psg_fx
from support.processes import Processes
from support.selection import one_in
from support.sharded import (
    by_blocks,
    far,
    share,
    small,
    transformed,
)

pytestmark = pytest.mark.xdist_group("processes")


def check_saved(rank: int, world: int, folder: str) -> None:
    model, loss_fn, inputs, targets = small()
    by_blocks(model)
    step = transformed(model, loss_fn, psg_fx.ClippedSum(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = share(rank, world)
    psg_fx.distributed.set_grad(model, step(inputs[mine], targets[mine]).clipped_sum)
    optimizer.step()
    checkpoint.save(step.state_dict(), checkpoint_id=folder)


def check_loaded(rank: int, world: int, folder: str) -> None:
    model, loss_fn, inputs, targets = small()
    whole = copy.deepcopy(model)
    by_blocks(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    step = transformed(model, loss_fn, psg_fx.ClippedSum(0.3))
    state = step.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    step.load_state_dict(state)
    one = transformed(whole, loss_fn, psg_fx.ClippedSum(0.3))
    psg_fx.distributed.set_grad(whole, one(inputs, targets).clipped_sum)
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    mine = share(rank, world)
    out, expected = step(inputs[mine], targets[mine]), one(inputs, targets)
    torch.testing.assert_close(out.norms, expected.norms[mine], rtol=1e-4, atol=1e-6)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert far(p.detach(), q.detach()) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("by", "then"), one_in(3, [(2, 1), (1, 2), (4, 2)]))
def test_a_checkpoint_is_read_by_other_processes(processes: Processes, by: int, then: int, tmp_path: Any) -> None:
    processes.run(check_saved, by, str(tmp_path))
    processes.run(check_loaded, then, str(tmp_path))
