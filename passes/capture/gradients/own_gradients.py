"""Gradients that the model or loss takes itself: `torch.autograd.grad` as a node, and then as the ops of that backward.

Energies whose forces are a gradient, gradient penalties, score matching, residuals of differential equations.  Export
does not see what autograd runs.  So a call is recorded as one op of outputs, inputs and seeds.  In the functional graph
it then stands for the way from inputs to outputs, which is run under autograd and traced, and what the backward pass
does is put in its place; of the forward pass it reads what is there.  Gradients of gradients are such calls again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.same_op import draws
from psg_fx.graph.strides import free_of_strides
from psg_fx.graph.tracing import trace
from psg_fx.op_table import known
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.ops.of_users.own_gradient import own_gradient
from psg_fx.source import locate
from psg_fx.torch_private.modes import no_functorch_levels, not_recorded, untransformed, without_functions
from psg_fx.torch_private.tracer import node_of, recorded_so_far

from .twice_differentiable import FORMULAS, in_plain_ops, is_differentiable

Tensors = Tensor | Sequence[Tensor]
_DETACH = torch.ops.aten.detach.default


def recorded(
    outputs: Tensors, inputs: Tensors, grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None, create_graph: bool = False, only_inputs: bool = True,
    allow_unused: bool | None = None, is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`torch.autograd.grad` with its results known to the graph: d outputs / d inputs, weighted by grad_outputs."""
    if is_grads_batched:
        raise NotYetSupported(
            "torch.autograd.grad with is_grads_batched", where="torch.autograd.grad",
            why="it runs the backward pass under vmap", fix="take one gradient after the other",
        )  # fmt: skip
    heads, leaves = _listed(outputs), _listed(inputs)
    given: list[Any] = [None] * len(heads) if grad_outputs is None else _listed(grad_outputs)
    _require_torch_ops(way(recorded_so_far(), [*map(node_of, leaves)], [*map(node_of, heads)]))
    with not_recorded():  # as the user's program has them: what is not reached, and what cannot be differentiated
        taken = partial(torch.autograd.grad, heads, leaves, given, retain_graph=True, create_graph=True)
        found: Sequence[Any] = taken(allow_unused=allow_unused, materialize_grads=materialize_grads)
        reached: Sequence[Any] = taken(allow_unused=True)
    seeds = [ones(h) if s is None or _is_one(s) else s for h, s in zip(heads, given, strict=True)]
    made = _of_those_reached(heads, leaves, seeds, reached)
    results: list[Tensor | None] = []
    for leaf, as_torch, own in zip(leaves, found, made, strict=True):
        result = torch.zeros_like(leaf) if own is None and as_torch is not None else own
        results.append(result if create_graph or result is None else result.detach())
    return tuple(results)


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    """The same, also where a `vmap` runs: zeros for what no output depends on."""
    _require_torch_ops(way(recorded_so_far(), [*map(node_of, inputs)], [*map(node_of, outputs)]))
    with not_recorded(), no_functorch_levels(), without_functions():
        leaves = [untransformed(i) for i in inputs]
        heads = [whole for o in outputs if (whole := untransformed(o)).requires_grad]
        taken = partial(torch.autograd.grad, heads, leaves, [*map(ones, heads)], allow_unused=True)
        reached = taken(retain_graph=True) if heads else ()
    made = _of_those_reached(outputs, inputs, seeds, reached or [None] * len(inputs))
    return [torch.zeros_like(i) if own is None else own for i, own in zip(inputs, made, strict=True)]


def _of_those_reached(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], reached: Sequence[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if untransformed(o).requires_grad]
    wanted = [i for i, r in zip(inputs, reached, strict=True) if r is not None]
    made = iter(own_gradient([o for o, _ in pairs], wanted, [s for _, s in pairs]) if wanted else ())
    return [None if r is None else next(made) for r in reached]


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


def ones(output: Tensor) -> Tensor:
    """A seed of ones, which knows nothing of what the output is made of."""
    return torch.ones(output.shape, dtype=output.dtype, device=output.device)


def _is_one(seed: Tensor) -> bool:
    """Whether a seed is `torch.ones_like(sum)`, which knows nothing of what was summed."""
    node = node_of(seed)
    return seed.numel() == 1 and node is not None and node.target == torch.ops.aten.ones_like.default


def way(nodes: Iterable[Node], inputs: Sequence[Node | None], outputs: Sequence[Node | None]) -> list[Node]:
    """What is computed of inputs on the way to outputs, in order."""
    reached, needed, computed, found = set(inputs), set(outputs), [], []
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            computed.append(node)
    for node in reversed(computed):
        if node in needed:
            needed.update(node.all_input_nodes)
            found.append(node)
    return found[::-1]


def _require_torch_ops(way: Sequence[Node]) -> None:
    for node in way:
        if getattr(node.target, "namespace", "") not in ("psg_fx", "psg_fx_functions") or node.target == own_gradient:
            continue
        call, target = custom_call(node.target), getattr(node.target, "_opname", "")
        what = call.title if call else _WORDS.get(target, "a recurrent layer")
        raise NotYetSupported(
            f"the code takes a gradient through {what}",
            where=locate(node), why="its backward pass is an op that has none itself",
            fix="write it out with ordinary differentiable ops",
        )  # fmt: skip


_WORDS = {"ctc": "ctc_loss", "expert_mm": "a product of rows with their experts"}


def write_out(gm: GraphModule) -> None:
    """The ops of each backward pass in the place of the call that asks for it."""
    calls = gm.graph.find_nodes(op="call_function", target=own_gradient)
    if not calls:
        return
    free_of_strides(gm)
    for node in calls:
        _Call(gm, node).write_out()
    gm.graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Call:
    """One call of `torch.autograd.grad` in a functional graph."""

    gm: GraphModule
    node: Node

    @property
    def arguments(self) -> tuple[list[Node], list[Node], list[Node]]:
        """Outputs, inputs and seeds."""
        return cast("Any", self.node.args)  # type: ignore[no-any-return]

    @cached_property
    def way(self) -> list[Node]:
        """What is computed on the way from inputs to outputs, and the sizes that it reads, in order."""
        outputs, inputs, _ = self.arguments
        found = set(way(self.gm.graph.nodes, inputs, outputs))
        todo = [*found]
        while todo:
            sizes = [n for n in todo.pop().all_input_nodes if n not in found and not _is_tensor(n)]
            found.update(sizes)
            todo += sizes
        return [node for node in self.gm.graph.nodes if node in found]

    @cached_property
    def given(self) -> list[Node]:
        """What the way reads, and outputs that it does not lead to."""
        outputs, inputs, seeds = self.arguments
        inside = set(self.way)
        read = [n for node in self.way for n in node.all_input_nodes]
        return [n for n in dict.fromkeys([*inputs, *seeds, *read, *outputs]) if n not in inside]

    def write_out(self) -> None:
        """Put the gradients where the call is."""
        shared = self._results()
        kept: list[str] = []
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a backward of its backward
            traced = trace(
                self._gradients_and(shared, kept), [n.meta["val"].detach() for n in self.given],
                partial(_attach, kept=kept), decomposition_table=in_plain_ops(),
            )  # fmt: skip
        results: Any = traced.graph.output_node().args[0]
        count = len(results) - len(shared)
        there: dict[Node, Node] = dict(zip(facts.placeholders(traced), self.given, strict=True))
        for copy, node in zip(results[count:], shared, strict=True):
            there.setdefault(copy, node)
        self._copy(traced, results[:count], there)
        for user in list(self.node.users):
            user.replace_all_uses_with(there[results[user.args[1]]])
            self.gm.graph.erase_node(user)
        self.gm.graph.erase_node(self.node)

    def _results(self) -> list[Node]:
        """What the way computes, each result of ops with several as a node: what was drawn is not drawn again."""
        found = []
        for node in self.way:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                found.append(node)
            elif isinstance(value, (tuple, list)):
                there = {user.args[1]: user for user in node.users if user.target is operator.getitem}
                for k, each in enumerate(value):
                    if isinstance(each, Tensor) and not _has_gradient(node, k, each):
                        there.pop(k, None)  # it is computed anew, of what has one
                    elif isinstance(each, Tensor) and k not in there:
                        with self.gm.graph.inserting_after(node):
                            there[k] = self.gm.graph.call_function(operator.getitem, (node, k))
                        there[k].meta |= {**node.meta, "val": each}
                found += there.values()
        return list(dict.fromkeys(found))

    def _gradients_and(self, shared: Sequence[Node], kept: list[str]) -> Any:
        """A function of the values of `given`.  kept: is told by what autograd has kept results of ops."""
        outputs, inputs, seeds = self.arguments
        inside = set(self.way)

        def gradients(*values: Tensor) -> list[Tensor]:
            run = _Way(self.gm)
            run.env = dict(zip(self.given, values, strict=True))
            with torch.enable_grad():
                for node in inputs:
                    if node not in inside:
                        run.env[node].requires_grad_()
                for node in self.way:
                    run.env[node] = run.run_node(node)
                pairs = [(run.env[o], run.env[s]) for o, s in zip(outputs, seeds, strict=True)]
                pairs = [(o, s) for o, s in pairs if o.requires_grad]
                leaves = [run.env[n] for n in inputs]
                users = {node_of(run.env[n]) for n in self.way if n.target is _DETACH}
                kept[:] = [n.name for n in recorded_so_far() if n.target is _DETACH and n not in users]
                found = torch.autograd.grad([o for o, _ in pairs], leaves, [s for _, s in pairs], create_graph=True)
            return [*found, *map(run.result, shared)]

        return gradients

    def _copy(self, traced: GraphModule, results: Sequence[Node], there: dict[Node, Node]) -> None:
        """Whatever the results need that is not there."""
        needed, copied = set(results), []
        for node in reversed(traced.graph.nodes):
            if node in needed:
                _require_differentiable(node, self.node)
                if node not in there:
                    needed.update(node.all_input_nodes)
                    copied.append(node)
        line = {k: v for k, v in self.node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        with self.gm.graph.inserting_before(self.node):
            for node in reversed(copied):
                there[node] = copy = self.gm.graph.node_copy(node, there.__getitem__)
                copy.meta |= line
                if node.op == "get_attr":
                    copy.target = self._constant(getattr(traced, str(node.target)))

    def _constant(self, value: Any) -> str:
        name = f"_own_gradient_constant_{len(self.gm.graph.find_nodes(op='get_attr'))}"
        setattr(self.gm, name, value)
        return name


class _Way(Interpreter):
    """Runs ops as autograd must see them."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(FORMULAS.get(target) or known(target).under_autograd or target, args, kwargs)

    def result(self, node: Node) -> Any:
        """What was computed."""
        source: Any = node.args[0]
        return self.env[node] if node in self.env else self.env[source][node.args[1]]


def _attach(traced: GraphModule, kept: Sequence[str]) -> None:
    """Autograd keeps what an op returns detached, detaches it once more where a backward reads it, and then gives it
    its gradient, which no node says.
    """
    nodes = traced.graph.find_nodes(op="call_function", target=_DETACH)
    saved = {node for node in nodes if node.name in kept}
    for node in reversed(nodes):
        if node in saved or node.args[0] in saved:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _require_differentiable(node: Node, call: Node) -> None:
    """What a backward pass reads can be differentiated again, and is what the forward pass had."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    op = source.target
    result: Any = 0 if source is node else node.args[1]
    if source is node and draws(node):
        raise NotYetSupported(
            f"the code takes a gradient through {op}, which draws at random", where=locate(call),
            why="what it has drawn stays inside of the op, and its backward would draw again",
            fix="draw with nn.Dropout or torch.rand, or leave it out there",
        )  # fmt: skip
    if not _has_gradient(source, result, node.meta["val"]):
        raise NotYetSupported(
            f"the code takes a gradient through {op}", where=locate(call),
            why="its backward pass reads a result of it that torch does not differentiate",
            fix="write it out with ordinary differentiable ops",
        )  # fmt: skip


def _has_gradient(node: Node, result: int, value: Any) -> bool:
    """Whether a result of an op has the gradient that its value says; indices and masks have none to lose."""
    return not result or not value.is_floating_point() or is_differentiable(node.target, result)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
