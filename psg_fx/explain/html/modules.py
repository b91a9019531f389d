"""Where a node belongs on the page: to the forward pass, the backward pass or the per-sample part, and in which module.

Ops of the forward pass carry the module that ran them.  The others are placed by what they read or lead to, which is
good enough to look at and means nothing to the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.facts import OutputSpec, fact
from psg_fx.graph.lifetimes import is_view

LOSS, TOGETHER = "the loss", "all parameters together"
FORWARD, BACKWARD, PER_SAMPLE = "forward", "backward", "per sample"
_PER_SAMPLE = ("lower", "totals", "beside")
"""Passes that write what is asked."""


@dataclass(frozen=True)
class Position:
    """A phase, and the path of a module in it: "" for the model itself."""

    phase: str
    module: str = ""


def places(
    gm: GraphModule, outputs: Mapping[Node, OutputSpec], parameters: Iterable[str], cotangents: Mapping[str, str]
) -> dict[Node, Position]:
    """The place of every node but the output.

    outputs: what the results hold.  parameters: names of those with a plan.  cotangents: name of a node -> the module
    of the site whose ȳ it is.
    """
    labels = _leads_to(gm, outputs, frozenset(parameters))
    weights = _without_data(gm)
    found: dict[Node, Position] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found[node] = _of_input(node)
        elif node.meta.get("psg_fx_pass") in _PER_SAMPLE:
            found[node] = Position(PER_SAMPLE, _of_parameters(labels[node]))
        elif node.op != "output":
            path = module_of(node)
            found[node] = _of_backward(node, found, weights, cotangents) if path is None else Position(FORWARD, path)
    return found


def module_of(node: Node) -> str | None:
    """`encoder.0`, from what export noted; "" for the model itself, None where it noted nothing."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    inside = [path for path in paths if path == "model" or path.startswith("model.")]
    return inside[-1].removeprefix("model").removeprefix(".") if inside else LOSS


def class_names(gm: GraphModule) -> dict[str, str]:
    """Path of a module -> the name of its class."""
    found = {}
    for node in gm.graph.nodes:
        for entry in (node.meta.get("nn_module_stack") or {}).values():
            if isinstance(entry, tuple) and entry[0].startswith("model"):
                path, kind = entry
                name = getattr(kind, "__name__", str(kind)).rsplit(".", 1)[-1]
                found[path.removeprefix("model").removeprefix(".")] = name
    return found


def parent(path: str) -> str:
    """`encoder.0` of `encoder.0.weight`."""
    return path.rpartition(".")[0]


def common(paths: Iterable[str]) -> str:
    """The module that holds all of these."""
    split = [path.split(".") if path else [] for path in paths]
    if not split:
        return ""
    length = 0
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        length += 1
    return ".".join(split[0][:length])


def _of_input(node: Node) -> Position:
    spec = node.meta.get("psg_fx_input")
    if spec is None:  # kept by the forward half of a split step
        return Position(BACKWARD, module_of(node) or "")
    if spec.kind in ("parameter", "buffer"):
        return Position(FORWARD, LOSS if spec.target.startswith("loss_fn") else parent(spec.name))
    return Position({"tangent": BACKWARD, "given": PER_SAMPLE}.get(spec.kind, FORWARD))


def _of_backward(
    node: Node, found: Mapping[Node, Position], weights: set[Node], cotangents: Mapping[str, str]
) -> Position:
    """In the module whose parameters or values it reads; else with what it follows: a view of the ȳ of a site with the
    site; where gradients from several modules meet, in what holds these, or inside it around the site whose ȳ that is.
    """
    read = [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt)]
    owned = {found[n].module for n in read if n in weights}
    values = {found[n].module for n in read if found[n].phase == FORWARD and found[n].module}
    if owned or values:
        return Position(BACKWARD, common(owned or values))
    before = [n for n in read if found[n].phase == BACKWARD]
    if len(before) == 1 and before[0].name in cotangents and is_view(node):
        return Position(BACKWARD, cotangents[before[0].name])
    meeting = common(found[n].module for n in before)
    if len({found[n].module for n in before}) > 1 and node.name in cotangents:
        around = parent(cotangents[node.name])
        return Position(BACKWARD, around if common([around, meeting]) == meeting else meeting)
    return Position(BACKWARD, meeting)


def _of_parameters(names: frozenset[str]) -> str:
    """The module that owns all of these parameters."""
    module = common({parent(name) for name in names})
    return module if module or len(names) == 1 else TOGETHER


def _without_data(gm: GraphModule) -> set[Node]:
    """Parameters, and what is made of them alone, as a transposed weight is."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if _is_parameter(node) or (node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _is_parameter(node: Node) -> bool:
    spec = node.meta.get("psg_fx_input")
    return spec is not None and spec.kind == "parameter"


def _leads_to(
    gm: GraphModule, outputs: Mapping[Node, OutputSpec], parameters: frozenset[str]
) -> dict[Node, frozenset[str]]:
    """For every op of the per-sample part the parameters whose results it leads to: what `lower` says of contractions
    and results; in between, by the users, and where those are many, by what is read.
    """
    labels: dict[Node, frozenset[str]] = {}
    for node in reversed(gm.graph.nodes):
        if node.meta.get("psg_fx_pass") not in _PER_SAMPLE:
            continue
        contracts, spec = fact(node).contracts, outputs.get(node)
        if contracts:
            labels[node] = frozenset([contracts])
        elif spec is not None and spec.name in parameters:
            labels[node] = frozenset([spec.name])
        else:
            own = [user for user in node.users if user.meta.get("psg_fx_pass") != "totals"]  # totals read everything
            labels[node] = frozenset().union(*(labels.get(user, frozenset()) for user in own or node.users))
    for node in gm.graph.nodes:
        read = {labels[n] for n in node.all_input_nodes if n in labels}
        if len(labels.get(node, ())) > 1 and len(read) == 1 and len(*read) == 1:
            labels[node] = read.pop()
    return labels
