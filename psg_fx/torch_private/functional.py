"""`ExportedProgram.run_decompositions` in one trace, where that is all that it would do.

Torch makes a module of the program again, makes its state fake again, runs it once to learn what it writes into, traces
it, and sets up and checks what export promises to those who save a program.  Here the graph that export left is traced
once under functionalisation, and what it wrote into is read afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from psg_fx.errors import PsgError
from psg_fx.torch_private.composites import remembered_composites
from psg_fx.torch_private.tracer import trace_fakes

log = logging.getLogger("psg_fx")
Decompositions = Mapping[Any, Callable[..., Any]]
_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)
_NAMESPACES = ("aten", "psg_fx", "psg_fx_functions")


@dataclass(frozen=True)
class Functional:
    """What of an exported program is used: its graph, what its placeholders and outputs are, and their values."""

    graph_module: GraphModule
    graph_signature: ExportGraphSignature
    constants: Mapping[str, Any]
    state_dict: Mapping[str, torch.Tensor]


def functional(exported: ExportedProgram, table: Decompositions) -> Functional:
    """The program in functional ATen ops, those of `table` written out, other composite ones kept whole."""
    with remembered_composites():
        try:
            found = _traced(exported, table) if _is_plain(exported) else None
        except PsgError:
            raise
        except Exception as error:  # of this torch, or of the program: then torch has the words for it
            log.debug("left to run_decompositions: %s: %s", type(error).__name__, error)
            found = None
        if found is not None:
            return found
        program = exported.run_decompositions(dict(table))
    return Functional(program.graph_module, program.graph_signature, program.constants, program.state_dict)


def _is_plain(exported: ExportedProgram) -> bool:
    """Whether the program is ATen ops on fake tensors with sizes that are known, and nothing else."""
    if any(spec.kind not in _KINDS for spec in exported.graph_signature.input_specs):
        return False
    nodes = exported.graph_module.graph.nodes
    inputs = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    if (
        not inputs
        or not all(isinstance(value, FakeTensor) for value in inputs)
        or len({*map(id, inputs)}) < len(inputs)
    ):
        return False
    return all(_is_plain_op(node) for node in nodes if node.op not in ("placeholder", "output"))


def _is_plain_op(node: Node) -> bool:
    if node.op != "call_function" or node.meta.get("unbacked_bindings"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _NAMESPACES
    return getattr(node.target, "__module__", None) in (operator.getitem.__module__, "math", "torch")


def _traced(exported: ExportedProgram, table: Decompositions) -> Functional | None:
    """None: it writes into an input that is not a buffer, or into memory that another input has, too."""
    from torch._functorch._aot_autograd.functional_utils import (
        from_fun,
        has_data_mutation,
        has_metadata_mutation,
        to_fun,
    )
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    old = exported.graph_module
    placeholders = old.graph.find_nodes(op="placeholder")
    specs = exported.graph_signature.input_specs
    written: list[int] = []
    reshaped: list[int] = []

    def program(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
            inputs = [to_fun(a) for a in args]
            outputs = Interpreter(old).run(*inputs, enable_io_processing=False)
        written[:] = [i for i, value in enumerate(inputs) if has_data_mutation(value)]
        pairs = enumerate(zip(inputs, args, strict=True))
        reshaped[:] = [i for i, (new, a) in pairs if has_metadata_mutation(new, a, check_only_storage_mutation=False)]
        return pytree.tree_map(from_fun, (*[inputs[i] for i in written], *outputs))

    values = [node.meta["val"].detach() for node in placeholders]
    mode = values[0].fake_mode
    with (
        _as_export_does(mode, table) as rest, FunctionalTensorMode(export=True), preserve_node_meta(),
    ):  # fmt: skip
        gm = trace_fakes(program, values, decomposition_table=rest)
    shared = len({value.untyped_storage()._cdata for value in values}) < len(values)
    if reshaped or (written and shared) or any(specs[i].kind is not InputKind.BUFFER for i in written):
        return None
    gm.graph.eliminate_dead_code()
    ops = {node.name for node in gm.graph.nodes if node.op != "placeholder"}
    for new, node in zip(gm.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        if node.name in ops:
            new._rename(node.name)
        else:  # `_rename` would not call anything `input`
            new.name = node.name
        new.target, new.meta = new.name, dict(node.meta)
    gm.graph.output_node().meta.clear()
    outputs: Any = gm.graph.output_node().args[0]
    signature = _signature(exported.graph_signature, [specs[i] for i in written], outputs)
    return Functional(gm, signature, exported.constants, exported.state_dict)


def _signature(old: ExportGraphSignature, written: Sequence[InputSpec], outputs: Sequence[Any]) -> ExportGraphSignature:
    """Buffers that are written into are the first outputs."""
    kind = OutputKind.BUFFER_MUTATION
    added = [OutputSpec(kind, TensorArgument(n.name), s.target) for n, s in zip(outputs, written, strict=False)]
    return ExportGraphSignature(list(old.input_specs), [*added, *old.output_specs])


@contextlib.contextmanager
def _as_export_does(fake_mode: Any, table: Decompositions) -> Iterator[Any]:
    """The state in which `run_decompositions` traces; yields the decompositions of ops that are not composite."""
    from torch._guards import TracingContext, tracing
    from torch.export import _trace, exported_program

    state: Any = _trace
    composites, rest = exported_program._split_decomp_table_to_cia_and_python_decomp(dict(table))
    with (
        fake_mode, exported_program._override_composite_implicit_decomp(composites), tracing(TracingContext(fake_mode)),
        state._ignore_backend_decomps(), state._compiling_state_context(), torch.no_grad(),
    ):  # fmt: skip
        yield rest
