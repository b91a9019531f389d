"""A graph that breaks a promise of its stage is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import psg_fx
from psg_fx import InternalError
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.algebra.network import Kind, Source
from psg_fx.algebra.site import PREFIXES
from psg_fx.graph import facts
from psg_fx.graph.history import History, Snapshot, copy_graph
from psg_fx.graph.stages import Stage, broken, checks, verify
from psg_fx.passes.promises import same_axes
from psg_fx.passes.runner import graph_pass, run
from psg_fx.planner.plan import PLAN

aten = torch.ops.aten


class Small(nn.Module):
    """A layer used twice, and a parameter that is scaled before its use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scaled = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh()) @ (2 * self.scaled).t()


@cache
def graphs() -> dict[str, GraphModule]:
    """A sound graph of every stage."""
    torch.manual_seed(0)
    asked = [psg_fx.Norms(), psg_fx.ClippedSum(1.0)]
    step = psg_fx.transform(Small(), lambda out: out.square().sum(), quantities=asked, backend="eager")
    step(torch.randn(3, 4))
    return step.graphs


def graph(stage: Stage) -> GraphModule:
    return copy_graph(graphs()[stage.value])


def last_op(gm: GraphModule) -> Node:
    return [n for n in gm.graph.nodes if n.op == "call_function"][-1]


def carrier(gm: GraphModule) -> Node:
    return next(n for n in facts.placeholders(gm) if facts.input_spec(n).samples is not None)


def forget_an_input(gm: GraphModule) -> None:
    del facts.placeholders(gm)[0].meta["psg_fx_input"]


def forget_an_output(gm: GraphModule) -> None:
    info = facts.graph_facts(gm)
    gm.meta[facts.KEY] = dataclasses.replace(info, outputs=info.outputs[:-1])


def write_in_place(gm: GraphModule) -> None:
    node = last_op(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten.relu_.default, (node,)).meta = dict(node.meta)


def forget_a_fact(gm: GraphModule) -> None:
    del last_op(gm).meta[facts.KEY]


def sum_the_loss(gm: GraphModule) -> None:
    loss = facts.outputs(gm)[0]
    assert loss is not None
    facts.update(loss, samples=None)


def keep_a_cotangent(gm: GraphModule) -> None:
    info = facts.graph_facts(gm)
    outputs = (*info.outputs[:-1], facts.OutputSpec("cotangent", "linear.0"))
    gm.meta[facts.KEY] = dataclasses.replace(info, outputs=outputs)


def read_strides(gm: GraphModule) -> None:
    node = last_op(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten.view.default, (node, [-1])).meta = dict(node.meta)


def reduce_on_the_way(gm: GraphModule) -> None:
    facts.update(next(n for n in gm.graph.nodes if n.target is aten.tanh.default), reduced=True)


def the_site(gm: GraphModule) -> Node:
    return next(n for n in gm.graph.nodes if facts.fact(n).site)


def unmark_a_site(gm: GraphModule) -> None:
    facts.update(the_site(gm), site="")


def mark_a_second_site(gm: GraphModule) -> None:
    facts.update(next(n for n in gm.graph.nodes if n.target is aten.tanh.default), site="tanh")


def pass_a_site_by(gm: GraphModule) -> None:
    """A site that reads a value made of the same parameter by an op that says nothing of it."""
    facts.update(next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor), params=frozenset())


def forget_a_prefix(gm: GraphModule) -> None:
    PREFIXES.put(gm, dict(list(PREFIXES.of(gm).items())[1:]))


def change_outputs(gm: GraphModule, change: Callable[[list[Any]], list[Any]]) -> None:
    placed: list[Any] = change(facts.returned(gm))
    gm.graph.output_node().args = (tuple(node for _, node in placed),)
    facts.update_graph(gm, outputs=tuple(spec for spec, _ in placed))


def lose_a_cotangent(gm: GraphModule) -> None:
    change_outputs(gm, lambda placed: [(s, n) for s, n in placed if s.name != "linear_1.0"])


def exchange_two_cotangents(gm: GraphModule) -> None:
    def exchange(placed: list[Any]) -> list[Any]:
        nodes = {spec.name: node for spec, node in placed}
        names = {"linear_1.0": "matmul.0", "matmul.0": "linear_1.0"}
        return [(spec, nodes[names.get(spec.name, spec.name)]) for spec, _ in placed]

    change_outputs(gm, exchange)


def cast_a_cotangent(gm: GraphModule) -> None:
    node = next(n for s, n in facts.returned(gm) if s.kind == "cotangent")
    assert node is not None
    node.meta["val"] = node.meta["val"].to(torch.float64)


def differentiate_a_parameter(gm: GraphModule) -> None:
    spec = facts.OutputSpec("cotangent", "layer.weight")
    change_outputs(gm, lambda placed: [*placed, (spec, facts.placeholders(gm)[0])])


def change_gradients(gm: GraphModule, change: Callable[[Any], Any]) -> None:
    """The gradient of the layer's weight, in the plan too."""
    old = GRADIENTS.of(gm)["layer.weight"]
    GRADIENTS.put(gm, {**GRADIENTS.of(gm), "layer.weight": change(old)})


def lose_a_gradient(gm: GraphModule) -> None:
    GRADIENTS.put(gm, dict(list(GRADIENTS.of(gm).items())[1:]))


def lose_a_use(gm: GraphModule) -> None:
    change_gradients(gm, lambda g: dataclasses.replace(g, terms=g.terms[:1]))


def count_a_use_twice(gm: GraphModule) -> None:
    change_gradients(gm, lambda g: dataclasses.replace(g, terms=(*g.terms, g.terms[0])))


def change_term(gm: GraphModule, change: Callable[[Any], Any]) -> None:
    change_gradients(gm, lambda g: dataclasses.replace(g, terms=(change(g.terms[0]), *g.terms[1:])))


def read_what_is_not_there(gm: GraphModule) -> None:
    def change(term: Any) -> Any:
        first, *rest = term.network.leaves
        lost = dataclasses.replace(first, sources=(Source(Kind.ACTIVATION, "nothing"),))
        return dataclasses.replace(term, network=dataclasses.replace(term.network, leaves=(lost, *rest)))

    change_term(gm, change)


def sum_a_kept_axis(gm: GraphModule) -> None:
    def change(term: Any) -> Any:
        return dataclasses.replace(term, network=dataclasses.replace(term.network, out=term.network.out[:-1]))

    change_term(gm, change)


def merge_nothing(gm: GraphModule) -> None:
    GRADIENTS.put(gm, GRADIENTS.of(graphs()["networked"]))


def change_plan(gm: GraphModule, change: Callable[[Any], list[Any]]) -> None:
    """Other parts for the layer's weight."""
    plan = PLAN.of(gm)
    changed = [
        dataclasses.replace(p, parts=tuple(change(p))) if p.gradient.name == "layer.weight" else p
        for p in plan.parameters
    ]
    PLAN.put(gm, dataclasses.replace(plan, parameters=tuple(changed)))


def plan_without_a_parameter(gm: GraphModule) -> None:
    plan = PLAN.of(gm)
    PLAN.put(gm, dataclasses.replace(plan, parameters=plan.parameters[1:]))


def answer_one_question_less(gm: GraphModule) -> None:
    change_plan(gm, lambda p: p.parts[:-1])


def answer_a_question_twice(gm: GraphModule) -> None:
    change_plan(gm, lambda p: [*p.parts, p.parts[-1]])


def contract_something_else(gm: GraphModule) -> None:
    change_plan(gm, lambda p: [dataclasses.replace(part, tree=p.parts[0].tree) for part in p.parts])


def do_twice(gm: GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.op == "call_function" and len(n.users) > 1)
    with gm.graph.inserting_after(node):
        again = gm.graph.node_copy(node)
    next(iter(node.users)).replace_input_with(node, again)


def do_for_nothing(gm: GraphModule) -> None:
    node = last_op(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten.cos.default, (node,)).meta = dict(node.meta)


def count_twice(gm: GraphModule) -> None:
    size = next(n for n in gm.graph.nodes if n.target is aten.sym_size.int)
    other = next(n for n in gm.graph.nodes if n.target is aten.tanh.default)
    with gm.graph.inserting_after(other):
        again = gm.graph.call_function(aten.sym_size.int, (other, 0))
    again.meta = dict(size.meta)
    list(size.users)[-1].replace_input_with(size, again)


def fix_the_batch(gm: GraphModule) -> None:
    node = carrier(gm)
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(7, *value.shape[1:])


BREAKS: dict[str, tuple[Stage, Callable[[GraphModule], None], str]] = {
    "described-inputs": (Stage.CAPTURED, forget_an_input, "every placeholder has an InputSpec"),
    "described-outputs": (Stage.LOWERED, forget_an_output, "every output has an OutputSpec"),
    "functional": (Stage.BATCHED, write_in_place, "no op writes into a tensor"),
    "any_batch": (Stage.CAPTURED, fix_the_batch, "the batch size stays a symbol"),
    "captured": (Stage.CAPTURED, read_strides, "no op reads strides"),
    "batched": (Stage.BATCHED, forget_a_fact, "every op has a fact about its samples"),
    "unreduced": (Stage.UNREDUCED, sum_the_loss, "the loss carries the samples in dim 0"),
    "unreduced-way": (Stage.UNREDUCED, reduce_on_the_way, "nothing reduced over the samples leads to the loss"),
    "sited": (Stage.SITED, unmark_a_site, "a parameter meets the samples at a site, and nowhere else"),
    "sited-second": (Stage.SITED, mark_a_second_site, "a parameter meets the samples at a site, and nowhere else"),
    "sited-params": (Stage.SITED, pass_a_site_by, "what is made of parameters says of which"),
    "sited-prefix": (Stage.SITED, forget_a_prefix, "a site knows how its operands are made of parameters"),
    "differentiated": (Stage.JOINT, lose_a_cotangent, "what a site reads is an output, cotangent:linear_1.0 too"),
    "differentiated-shape": (
        Stage.JOINT, exchange_two_cotangents, "cotangent:linear_1.0 has the shape and dtype that its site says"
    ),
    "differentiated-dtype": (Stage.JOINT, cast_a_cotangent, "cotangent:linear.0 has the shape and dtype"),
    "differentiated-more": (
        Stage.JOINT, differentiate_a_parameter, "nothing is differentiated but what sites make"
    ),
    "networked": (Stage.NETWORKED, lose_a_use, "every use of layer.weight is in one term"),
    "networked-twice": (Stage.NETWORKED, count_a_use_twice, "every use of layer.weight is in one term"),
    "networked-all": (Stage.NETWORKED, lose_a_gradient, "every tracked parameter has a gradient"),
    "networked-leaf": (Stage.NETWORKED, read_what_is_not_there, "the networks of layer.weight read values of"),
    "networked-shape": (Stage.NETWORKED, sum_a_kept_axis, "the networks of layer.weight have its use's shape"),
    "merged": (Stage.MERGED, merge_nothing, "no two terms of layer.weight could be one"),
    "planned": (Stage.PLANNED, answer_one_question_less, "everything asked of layer.weight has a tree"),
    "planned-twice": (Stage.PLANNED, answer_a_question_twice, "everything asked of layer.weight has a tree"),
    "planned-all": (Stage.PLANNED, plan_without_a_parameter, "every gradient is planned"),
    "planned-tree": (Stage.PLANNED, contract_something_else, "the trees of layer.weight contract their networks"),
    "lowered": (Stage.LOWERED, keep_a_cotangent, "a lowered graph returns results only"),
    "tidied": (Stage.TIDIED, do_twice, "no op is done twice"),
    "tidied-dead": (Stage.TIDIED, do_for_nothing, "every value is read"),
    "tidied-batch": (Stage.TIDIED, count_twice, "one node computes the batch size"),
}  # fmt: skip


@pytest.mark.parametrize("stage", Stage, ids=lambda s: s.value)
def test_sound_graph_passes(stage: Stage) -> None:
    verify(graph(stage), stage)


@pytest.mark.parametrize("name", BREAKS)
def test_broken_graph_is_refused(name: str) -> None:
    stage, damage, promise = BREAKS[name]
    gm = graph(stage)
    damage(gm)
    for check in checks(stage):
        if check.__name__ != name.partition("-")[0] and name != "described-inputs":  # all read what inputs hold
            check(gm)  # nothing else would catch it
    with pytest.raises(InternalError, match=f"a pass broke the promise: {re.escape(promise)}"):
        verify(gm, stage)


def test_every_check_is_broken_here() -> None:
    names = {check.__name__ for stage in Stage for check in checks(stage)}
    assert names == {name.partition("-")[0] for name in BREAKS}


def test_every_stage_has_a_promise_of_its_own() -> None:
    """One that no stage before it makes."""
    made: set[str] = set()
    for stage in Stage:
        own = {check.__name__ for check in checks(stage)}
        assert own - made, stage
        made |= own


def test_runner_refuses_what_a_pass_breaks() -> None:
    careless = graph_pass("careless", before=Stage.CAPTURED, after=Stage.BATCHED)(lambda gm: gm)
    with pytest.raises(InternalError, match="every op has a fact about its samples"):
        run(careless, graph(Stage.CAPTURED), History())


def test_what_is_kept_is_not_what_a_later_pass_changes() -> None:
    def meddle(gm: GraphModule) -> GraphModule:
        node = last_op(gm)
        node.replace_all_uses_with(node.all_input_nodes[0])
        gm.graph.erase_node(node)
        forget_a_fact(gm)
        forget_an_output(gm)
        return gm

    nothing = graph_pass("nothing", before=Stage.BATCHED, after=Stage.BATCHED)(lambda gm: gm)
    meddling = graph_pass("meddling", before=Stage.BATCHED, after=Stage.BATCHED)(meddle)
    history, before = History(), graph(Stage.BATCHED)
    with pytest.raises(InternalError):
        run(meddling, run(nothing, before, history), history)
    kept = history.graphs["batched"]
    verify(kept, Stage.BATCHED)
    assert str(kept.graph) == str(graphs()["batched"].graph) != str(before.graph)
    assert history.graphs["batched"] is kept


def test_a_graph_is_held_to_a_stage_once_between_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[GraphModule] = []
    monkeypatch.setattr("psg_fx.passes.runner.verify", lambda gm, stage: held.append(gm))
    nothing = graph_pass("nothing", before=Stage.BATCHED, after=Stage.BATCHED)(lambda gm: gm)
    copied = graph_pass("copied", before=Stage.BATCHED, after=Stage.BATCHED)(copy_graph)
    history, first = History(), graph(Stage.BATCHED)
    second = run(copied, run(nothing, first, history), history)
    assert list(map(id, held)) == [id(first), id(first), id(second)]  # where it comes in, and what each pass leaves
    run(nothing, graph(Stage.BATCHED), history)
    assert len(held) == 5  # another graph than the one that was left


def test_snapshots_share_what_nodes_go_on_saying() -> None:
    gm = graph(Stage.BATCHED)
    first = Snapshot(gm)
    node = last_op(gm)
    node.meta["more"] = 1
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten.neg.default, (node,)).meta["val"] = node.meta["val"]
    second = Snapshot(gm, first)
    before, after = first.said, second.said
    assert {n for n in after if after[n] is not before.get(n)} == {node, node.next}
    one, other = first.module, second.module
    assert "more" not in last_op(one).meta
    assert len(other.graph.nodes) == len(one.graph.nodes) + 1
    for a, b in zip(one.graph.nodes, other.graph.nodes, strict=False):
        assert a.meta is not b.meta


def test_error_names_the_node() -> None:
    gm = graph(Stage.CAPTURED)
    error = broken("nothing", gm, last_op(gm))
    assert str(error).startswith("a pass broke the promise: nothing\n  where  %")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((6, 4), (6, 4), True), ((6, 4), (4, 6), False), ((24,), (4, 6), True), ((6, 4), (2, 3, 4), True),
        ((3, 2, 4), (2, 12), False), ((1, 6, 4), (6, 1, 4), True), ((), (1,), True), ((2,), (), False),
        ((2, 3, 20), (6, 4, 5), True), ((0, 3), (3, 0), True), ((0, 3), (3,), False), ((5, 2, 3), (5, 3, 2), False),
    ],
)  # fmt: skip
def test_axes_of_a_gradient_are_its_parameters(one: tuple[int, ...], other: tuple[int, ...], same: bool) -> None:
    assert same_axes(one, other) == same
