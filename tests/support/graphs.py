"""Captured graphs for tests of single passes: what `capture` hands on, made here by a few lines of torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule

from psg_fx.graph import facts
from psg_fx.graph.facts import GraphFacts, InputSpec, OutputSpec
from psg_fx.op_table import decompositions
from psg_fx.passes.capture.functions import losses, recurrent_layers  # noqa: F401  (they fill the table)
from psg_fx.torch_private.functional import Functional, functional
from psg_fx.torch_private.remembered import remembered_results
from psg_fx.torch_private.tracer import without_tensor_meta


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Any, targets: Any) -> Any:
        out = self.model(*inputs)
        return out if self.loss is None else self.loss(out, *targets)


class Plain(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def captured(
    model: nn.Module | Callable[..., Any],
    loss: Callable[..., Any] | None,
    inputs: tuple[Any, ...],
    targets: tuple[Any, ...] = (),
    batch_dim: int = 0,
    shared: tuple[int, ...] = (),
) -> GraphModule:
    """The functional graph of model and loss; `shared` inputs hold no samples."""
    module = model if isinstance(model, nn.Module) else Plain(model)
    size = Dim("batch", min=2)
    dims = (
        tuple({} if i in shared else {batch_dim: size} for i in range(len(inputs))),
        tuple({0: size} for _ in targets),
    )
    with torch.enable_grad(), warnings.catch_warnings(), remembered_results(), without_tensor_meta():
        warnings.simplefilter("ignore")
        program = export(WithLoss(module, loss), (inputs, targets), strict=False, dynamic_shapes=dims)
        found = functional(program, decompositions())
    return described(found, dict(program.named_parameters()), len(inputs), batch_dim, shared, loss is not None)


def described(
    program: Functional, parameters: Mapping[str, nn.Parameter], count: int, batch_dim: int, shared: tuple[int, ...],
    has_loss: bool,
) -> GraphModule:  # fmt: skip
    gm = program.graph_module
    signature = program.graph_signature
    kinds = {s.arg.name: s for s in signature.input_specs}
    names: Mapping[InputKind, str] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
    users = 0
    symbols: set[Any] = set()
    for node in facts.placeholders(gm):
        spec = kinds[node.name]
        if spec.kind == InputKind.USER_INPUT:
            dim = None if users in shared else batch_dim if users < count else 0
            kind = "input" if users < count else "target"
            node.meta["psg_fx_input"] = InputSpec(kind, node.name, samples=dim)
            users += 1
            if isinstance(node.meta["val"], torch.Tensor):
                symbols |= {x for s in facts.shape(node.meta["val"]) for x in s.free_symbols}
        else:
            kind = names.get(spec.kind, "constant")
            name = (spec.target or node.name).removeprefix("model.")
            node.meta["psg_fx_input"] = InputSpec(kind, name, tracked=kind == "parameter")
    (batch,) = symbols
    outs = []
    for out in signature.output_specs:
        if out.kind == OutputKind.BUFFER_MUTATION:
            outs.append(OutputSpec("buffer", str(out.target)))
        else:
            outs.append(OutputSpec("loss" if has_loss else "output", out.arg.name))
    gm.meta[facts.KEY] = GraphFacts(batch, tuple(outs))
    values = {**program.state_dict, **program.constants, **parameters}
    gm.meta["state"] = [values[s.target] for s in signature.input_specs if s.kind != InputKind.USER_INPUT]
    return gm


def called(gm: GraphModule, *inputs: torch.Tensor) -> tuple[Any, ...]:
    """The flat outputs of a captured graph, run as it is."""
    return gm(*gm.meta["state"], *inputs)  # type: ignore[no-any-return]


class Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def record(self, *inputs: torch.Tensor) -> dict[torch.fx.Node, Any]:
        self.run(*self.module.meta["state"], *inputs)  # type: ignore[union-attr, index]
        return dict(self.env)
