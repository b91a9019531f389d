"""Opacus' ghost clipping of models under FSDP2, on the same shares: norms and sums are equal."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support.processes import Processes

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]
MAX_NORM = 0.5


class Tagger(nn.Module):
    """Of the layers that Opacus has samplers for, none of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(20, 8), nn.Linear(8, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(self.embedding(ids)).tanh()).mean(1))
        return out


def check_peer(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
        GradSampleModuleFastGradientClippingFSDP,
    )
    from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import FSDPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    ids, y, model = torch.randint(20, (8, 5)), torch.randint(3, (8,)), Tagger()
    ours, theirs = FSDP2Wrapper(copy.deepcopy(model)), FSDP2Wrapper(model)
    mine = slice(4 * rank, 4 * rank + 4)
    step = psg_fx.transform(
        ours, F.cross_entropy, quantities=psg_fx.ClippedSum(MAX_NORM), backend="eager", progress=False
    )
    out = step(ids[mine], y[mine])
    module = GradSampleModuleFastGradientClippingFSDP(theirs, max_grad_norm=MAX_NORM, loss_reduction="sum")
    optimizer = FSDPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=MAX_NORM,
        expected_batch_size=8, loss_reduction="sum",
    )  # fmt: skip
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
    loss(module(ids[mine]), y[mine]).backward()
    torch.testing.assert_close(out.norms, module.per_sample_gradient_norms, rtol=1e-4, atol=1e-6)
    for (name, value), p in zip(out.clipped_sum.items(), module.parameters(), strict=True):
        average = p.grad.full_tensor()  # FSDP2 divides by the number of processes
        torch.testing.assert_close(value.full_tensor(), average * world, rtol=1e-4, atol=1e-6, msg=name)


def test_norms_and_sums_are_those_of_opacus(processes: Processes) -> None:
    pytest.importorskip("opacus.utils.fsdp_utils")
    processes.run(check_peer, 2)
