"""Torch's ops have rules or are composed of ops that have; where there is a rule, trying it out agrees with it."""

import pytest
import torch
from test_batch import APART
from torch import Tensor

from psg_fx.errors import NotYetSupported, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.op_table import changed
from psg_fx.passes.independence.batch import batch
from psg_fx.passes.independence.probe import probe
from support.graphs import captured


def test_an_op_of_torch_without_a_rule_is_refused() -> None:
    """It is neither tried out nor taken on anyone's word."""
    with changed("cumsum", samples=None), pytest.raises(NotYetSupported) as error:
        batch(captured(lambda x: x.cumsum(1), None, (torch.randn(4, 6),)))
    assert error.value.what == "aten.cumsum cannot be shown to keep samples apart"
    assert error.value.why == "it has no rule that says how it treats the samples"


def test_an_op_composed_of_others_needs_no_rule() -> None:
    names = ("matmul", "softmax", "renorm")
    with changed(*names, samples=None):
        gm = batch(captured(lambda x: (x @ torch.ones(6, 6)).softmax(1).renorm(2, 0, 1.0), None, (torch.randn(4, 6),)))
        assert [facts.fact(n).proof for n in gm.graph.nodes if n.name in names] == ["written out"] * 3
        with pytest.raises(SamplesMixed, match=r"in aten\.softmax: aten\._softmax mixes samples"):
            batch(captured(lambda x: x.softmax(0), None, (torch.randn(4, 6),)))


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
