"""The proof of the joint graph: the cotangents that are read hold the samples where the values of the forward do.

What the forward proof has found is taken as it is; only the nodes between it and the cotangents are visited.  So a
backward that mixes samples is refused although its forward keeps them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.source import locate

from .arguments import numbers_of_samples
from .refused import mixed, not_shown
from .values import Result
from .walk import Prover

_FIX = "write the backward so that a sample's gradient is computed from that sample alone"


def prove_joint(
    gm: GraphModule, given: Mapping[Node, Result], wanted: Sequence[tuple[Node, Node, SampleAxis | None]]
) -> list[SampleAxis | None]:
    """Where the samples lie in each cotangent: where they do in its value, or in a value that is the same for all
    samples, in another order of the rows of one dim.  Refuses a joint graph whose cotangents are not those of single
    samples.

    given: what is known of nodes of the forward.  wanted: cotangents, each with the node of the forward graph to whose
    value it belongs, and where the samples of that value lie.
    """
    prover = JointProver(gm, given)
    leads = {cotangent: value for cotangent, value, _ in wanted}
    needed = facts.ancestors(leads, lambda node: node not in given)
    for node in gm.graph.nodes:
        if node in needed:
            try:
                prover.step(node)
            except PsgError as error:
                raise _backward(error, node, leads) from None
    if prover.rows is not None and prover.rows.links:
        raise not_shown(prover.rows.links[0].node, "its backward joins rows, which is checked for the forward alone")
    found = []
    for node, value, axis in wanted:
        try:
            found.append(_required(prover, node, axis, facts.fact(value).uniform))
        except PsgError as error:
            raise _backward(error, node, leads) from None
    return found


class JointProver(Prover):
    """The walk over what is not known yet."""

    def __init__(self, gm: GraphModule, given: Mapping[Node, Result]) -> None:
        super().__init__(gm, given)
        self.with_loss = any(spec.kind == "loss" for spec in facts.graph_facts(gm).outputs)

    def step(self, node: Node) -> None:
        """One node; with a loss, a number that depends on the batch size has no part in the gradient of a sample."""
        self.settle(node)
        numbers = numbers_of_samples(node, self.batch) if self.with_loss else []
        if numbers:
            raise mixed(node, f"%{numbers[0].name} depends on the batch size, which is 1 for the loss of one sample",
                        "do not divide by the batch size: the losses of the samples are summed")  # fmt: skip


def _backward(error: PsgError, node: Node, leads: Mapping[Node, Node]) -> PsgError:
    """The error with a line of the user's: ops of a backward have none, but what they lead to has."""
    seen, waiting = {node}, [node]
    for now in waiting:
        if now in leads:
            where = f"{error.where};  its result leads to the gradient of {locate(leads[now])}"
            return type(error)(f"in the backward pass, {error.what}", where=where, why=error.why, fix=error.fix)
        waiting += [n for n in now.users if n not in seen]
        seen.update(now.users)
    return error


def _required(prover: Prover, node: Node, axis: SampleAxis | None, uniform: bool) -> SampleAxis | None:
    """uniform: all samples have the same value, so that where they lie in it follows from who reads it."""
    found = prover.known[node]
    if found.index:
        raise mixed(node, "the gradient holds the numbers of the samples", _FIX)
    if not found.reduced and found.axes == axis:
        return axis
    if not found.reduced and isinstance(found.axes, SampleAxis) and axis is not None and found.axes.dim == axis.dim:
        if found.uniform:
            return axis
        if uniform and found.axes.outer * found.axes.inner == axis.outer * axis.inner:
            return found.axes
    where = "no dim" if found.reduced or found.axes is None else str(found.axes)
    origin = prover.origin.get(node, node)
    raise mixed(origin, f"the gradient holds the samples in {where}, and not in "
                f"{axis or 'no dim'} as its value does", _FIX)  # fmt: skip
