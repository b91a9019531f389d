"""Rows whose values all lie otherwise in memory than traces have seen: what a graph means never depends on that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from psg_fx.graph.strides import laid_out_as_read, with_rows
from psg_fx.passes.compile import compile
from quantities.test_quantities import compare
from support.cases import CASES, Case
from support.expected import tolerance_of
from support.rows import answered
from support.selection import one_in

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def otherwise(value: Tensor) -> Tensor:
    """The same with gaps, and the first dim in the place of the last."""
    turned = value.transpose(0, -1) if value.ndim else value
    return torch.stack([turned, turned], -1)[..., 0].transpose(0, -1) if value.ndim else value


class Otherwise(Interpreter):
    """Runs a graph whose values lie so, but for those that are laid out on purpose."""

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        laid_out = n.target in (torch.Tensor.contiguous, with_rows) or "memory_format" in n.kwargs
        if n.op == "output" or laid_out:
            return found
        return pytree.tree_map_only(Tensor, otherwise, found)


@pytest.mark.parametrize("case", one_in(5, [case for case in CASES if not case.refused]))
def test_row(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(gm: GraphModule) -> Any:
        laid = laid_out_as_read(gm)

        def forward(*tensors: Tensor) -> list[Any]:
            return [v if v is None else v.contiguous() for v in Otherwise(laid).run(*tensors)]

        return SimpleNamespace(forward=forward)

    monkeypatch.setattr(compile, "laid_out_as_read", run)
    answered.cache_clear()
    try:
        found = answered(case.name)
    finally:
        answered.cache_clear()
    compare(found.out, found.truth, found.quantities, tolerance_of(case))
