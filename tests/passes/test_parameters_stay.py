"""What is replayed as a CUDA graph reads parameters where they lie: inductor is told which inputs stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch.fx import GraphModule

import psg_fx
from psg_fx import MeanGrad
from psg_fx.graph import facts
from psg_fx.passes.compile.compile import _copies
from psg_fx.passes.compile.prepared import written_out
from psg_fx.passes.compile.sizes import Sized


def told(replayed: bool, lies: Callable[[Tensor], Tensor] = nn.Parameter) -> tuple[list[str], list[str]]:
    """The names of the inputs that inductor takes to stay where they are, and of all inputs.

    lies: makes the parameters that a call is given.
    """
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=MeanGrad(), backend="eager")
    step(x, y)
    gm = written_out(step.graphs["tidied"])
    specs = [facts.input_spec(node) for node in facts.placeholders(gm)]
    state = {name: lies(p.detach().clone()) for name, p in model.named_parameters()}
    given = {"input": x, "target": y}
    found: list[Any] = []

    def compiler(gm: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
        found.append(compile_fx.get_static_input_idxs(0))
        return gm

    Sized(gm, compiler, None, gm, replayed=replayed)(*[state.get(s.name, given.get(s.kind)) for s in specs])
    return [specs[i].name for i in found[0]], [s.name for s in specs]


def test_parameters_are_read_in_place() -> None:
    stay, every = told(replayed=True)
    assert stay == ["weight", "bias"]
    assert len(every) == 4


def test_kernels_that_are_launched_ask_at_each_call() -> None:
    assert told(replayed=False)[0] == []


def shifted(p: Tensor) -> nn.Parameter:
    """In the midst of a larger tensor, as flat parameters are."""
    flat = torch.cat([p.new_zeros(1), p.flatten()])
    return nn.Parameter(flat[1:].view(p.shape))


@pytest.mark.parametrize("lies", [torch.clone, shifted], ids=["made-for-the-call", "not-aligned"])
def test_what_may_lie_elsewhere_is_copied(lies: Callable[[Tensor], Tensor]) -> None:
    assert told(replayed=True, lies=lies)[0] == []


def test_results_are_copied_out_as_they_lie() -> None:
    given = [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(3).expand(2, 3), torch.arange(3), 7, None]
    for copy, original in zip(_copies(given), given, strict=True):
        if not isinstance(original, Tensor):
            assert copy == original
            continue
        assert torch.equal(copy, original)
        assert copy.data_ptr() != original.data_ptr()
        assert copy.dtype == original.dtype
    assert _copies(given)[1].stride() == given[1].stride()
    assert _copies([]) == []
