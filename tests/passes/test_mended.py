"""Steps are compiled by an inductor that is mended; other programs are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import lowering
from torch._inductor.codegen import cpp
from torch.fx import GraphModule

import psg_fx
from psg_fx.passes.compile import compile as compile_
from psg_fx.torch_private.mended import inductor_mended


def parts() -> tuple[object, object]:
    return cpp.CppTile2DKernel.store, cpp.CppKernelProxy.aggregate_reduction_buffers


def test_steps_are_compiled_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = [], parts()

    def compiler(gm: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
        seen.append(parts())
        return gm

    monkeypatch.setattr(compile_, "inductor", lambda options: compiler)
    psg_fx.transform(nn.Linear(3, 2), nn.functional.cross_entropy, quantities=psg_fx.Norms(), backend="inductor")(
        torch.randn(4, 3), torch.randint(2, (4,))
    )
    assert len(seen) == 1
    assert seen[0][1] is not own[1]
    assert (seen[0][0] is not own[0]) is ("index_expr" in vars(cpp.CppTile2DOverrides))
    assert parts() == own


def test_caches_of_other_code_are_not_shared() -> None:
    before = torch.compiler.config.cache_key_tag
    with inductor_mended():
        assert torch.compiler.config.cache_key_tag != before
    assert torch.compiler.config.cache_key_tag == before


def test_torch_does_not_warn_of_its_own_code() -> None:
    """`diagonal` is lowered by a function that torch 2.13 calls deprecated; here warnings are errors."""
    with inductor_mended():
        lowering.check(True, lambda: "")
        with pytest.raises(Exception, match="as it was"):
            lowering.check(False, lambda: "as it was")


def test_torch_does_not_warn_of_complex_numbers() -> None:
    lowering._warn_complex_not_supported.cache_clear()
    with inductor_mended():
        lowering._warn_complex_not_supported()
    with pytest.warns(UserWarning, match="complex"):
        lowering._warn_complex_not_supported()
