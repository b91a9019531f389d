"""Ops without an independence rule are tried out on random values; where there is a rule, the trial agrees with it."""

import pytest
import torch
from torch import Tensor

from graphs import captured
from psg_fx import facts
from psg_fx.errors import SamplesMixed
from psg_fx.facts import SampleAxis
from psg_fx.passes.batch import batch
from psg_fx.passes.probe import probe
from test_batch import APART, Program


def unruled(function: Program, monkeypatch: pytest.MonkeyPatch, *names: str) -> torch.fx.GraphModule:
    from psg_fx.passes.independence import table

    monkeypatch.setattr(table, "RULES", {k: v for k, v in table.RULES.items() if k.split(".")[0] not in names})
    return batch(captured(function, None, (torch.randn(4, 6),)))


def test_an_op_without_a_rule_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = unruled(lambda x: x.cumsum(1).view(-1, 3).cumsum(1), monkeypatch, "cumsum")
    assert [facts.fact(n).proof for n in gm.graph.nodes if "cumsum" in n.name] == ["probed", "probed"]
    assert facts.graph_facts(gm).notes[0].startswith("aten.cumsum (%cumsum) has no rule")
    with pytest.raises(SamplesMixed, match="tried out on random values"):
        unruled(lambda x: x.cumsum(0), monkeypatch, "cumsum")


def test_rules_agree_with_the_trial() -> None:
    """Every op of the accepted programs, tried out, keeps the samples where its rule says."""
    tried = 0
    for name in ("softmax over classes", "fold and unfold", "sort of dim 1", "einsum of a sample", "layer norm",
                 "gather", "scatter", "cat then slice", "tiled samples", "conv of folded windows",
                 "fft of dim 1", "topk", "table", "own place of each sample", "group norm", "triangle"):  # fmt: skip
        gm = batch(captured(APART[name], None, (torch.randn(4, 6),)))
        symbol = facts.graph_facts(gm).batch
        for node in gm.graph.nodes:
            known = {n: facts.fact(n).samples for n in node.all_input_nodes}
            if (
                node.op != "call_function"
                or not isinstance(node.meta.get("val"), Tensor)
                or "number of the sample" in {facts.fact(n).proof for n in (node, *known)}
            ):
                continue
            if not any(isinstance(a, SampleAxis) for a in known.values()) or "sym_size" in node.name:
                continue
            found = probe(node, symbol, known, [])
            assert found.axes == facts.fact(node).samples, (name, node.name)
            tried += 1
    assert tried > 20
