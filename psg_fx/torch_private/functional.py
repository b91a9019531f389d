"""`ExportedProgram.run_decompositions` in one trace, where that is all that it would do.

Torch makes a module of the program again, makes its state fake again, runs it once to learn what it writes into, traces
it, and sets up and checks what export promises to those who save a program.  Here a graph that writes nowhere is
copied, but for ops that must be written in others; any other is traced once under functionalisation, and what it wrote
into is read afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops import effects
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
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from psg_fx.errors import PsgError
from psg_fx.torch_private.composites import remembered_composites
from psg_fx.torch_private.ops import is_of_numbers, writes
from psg_fx.torch_private.patching import patched_here, wrapped_here
from psg_fx.torch_private.recorded import Copied
from psg_fx.torch_private.tracer import trace_fakes

aten = torch.ops.aten
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
            found = _in_one_trace(exported, table) if _is_plain(exported) else None
        except PsgError:
            raise
        except Exception as error:  # of this torch, or of the program: then torch has the words for it
            log.debug("left to run_decompositions: %s: %s", type(error).__name__, error)
            found = None
        if found is not None:
            return found
        with _without_checks(), _all_draws():
            program = exported.run_decompositions(dict(table))
    _drop_checks(program.graph_module)
    _without_what_is_known(program.graph_module)
    return Functional(program.graph_module, program.graph_signature, program.constants, program.state_dict)


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """While open, whether a factorization has failed is no effect, for which a program would have a token: under `vmap`
    ops are split into what computes and what checks, and elsewhere they are one.
    """
    own = effects.has_effects
    with patched_here(effects, "has_effects", lambda op: op is not _CHECK and own(op)):
        yield


@contextlib.contextmanager
def _all_draws() -> Iterator[None]:
    """While open, random ops stay that nobody reads: what draws after them would be given their numbers."""
    with wrapped_here(Node, "is_impure", lambda own: lambda node, *_, **__: own(node)):
        yield


def _drop_checks(gm: GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=_CHECK):
        gm.graph.erase_node(node)


_CHECK = aten._linalg_check_errors.default


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
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _NAMESPACES
    return is_of_numbers(node.target)


def _has_unknown_sizes(exported: ExportedProgram) -> bool:
    """Whether values decide about the sizes of some: what they are is asked again as it is traced."""
    return any(node.meta.get("unbacked_bindings") for node in exported.graph_module.graph.nodes)


def _writes(exported: ExportedProgram | Functional) -> bool:
    """Whether an op of the program writes into an argument."""
    return any(writes(node.target) for node in exported.graph_module.graph.nodes)


def _in_one_trace(exported: ExportedProgram, table: Decompositions) -> Functional | None:
    """None: torch must do it."""
    casts = torch._C._is_any_autocast_enabled()  # what composite ops read
    if not (casts or _writes(exported) or _has_unknown_sizes(exported)):
        found = _written_out(exported, table)
        if found is not None:
            return found
    return _traced(exported, table)


_SIZES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sym_size.int: torch.Tensor.size,
    torch.ops.aten.sym_stride.int: torch.Tensor.stride,
    torch.ops.aten.sym_numel.default: torch.Tensor.numel,
    torch.ops.aten.sym_storage_offset.default: torch.Tensor.storage_offset,
}
"""What a trace knows of every tensor: a node where it is read, of the first tensor that has it."""


class _Copying(Interpreter):
    """Runs what must be written in other ops; all other nodes are recorded with the values that they have.

    kept: composite ops that stay.
    """

    def __init__(self, gm: GraphModule, kept: Container[Any]) -> None:
        super().__init__(gm)
        self._copied = Copied(kept)

    def run_node(self, n: Node) -> Any:
        self._node = n
        found = super().run_node(n)
        self._copied.saw(found)
        return found

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _SIZES:
            return _SIZES[target](*args)
        known = self._node.meta.get("val")
        if isinstance(known, (FakeTensor, tuple, list)) and self._copied.record(target, args, kwargs, known):
            return known
        return super().call_function(target, args, kwargs)


def _written_out(exported: ExportedProgram, table: Decompositions) -> Functional | None:
    """A program that writes nowhere: nothing needs to be made functional.  None: what it is written as does write."""
    old = exported.graph_module
    values = [node.meta["val"].detach() for node in old.graph.find_nodes(op="placeholder")]

    with _as_export_does(values[0].fake_mode, table) as (rest, kept), preserve_node_meta():

        def program(*args: Any) -> Any:
            return tuple(pytree.tree_leaves(_Copying(old, kept).run(*args, enable_io_processing=False)))

        gm = trace_fakes(program, values, decomposition_table=rest)
    found = _like(exported, gm, [])
    return None if _writes(found) else found


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
            outputs = PropagateUnbackedSymInts(old).run(*inputs, enable_io_processing=False)
        written[:] = [i for i, value in enumerate(inputs) if has_data_mutation(value)]
        pairs = enumerate(zip(inputs, args, strict=True))
        reshaped[:] = [i for i, (new, a) in pairs if has_metadata_mutation(new, a, check_only_storage_mutation=False)]
        return pytree.tree_map(from_fun, (*[inputs[i] for i in written], *outputs))

    values = [node.meta["val"].detach() for node in placeholders]
    mode = values[0].fake_mode
    with (
        _as_export_does(mode, table) as (rest, _), FunctionalTensorMode(export=True), preserve_node_meta(),
    ):  # fmt: skip
        gm = trace_fakes(program, values, decomposition_table=rest)
    shared = len({value.untyped_storage()._cdata for value in values}) < len(values)
    if reshaped or (written and shared) or any(specs[i].kind is not InputKind.BUFFER for i in written):
        return None
    return _like(exported, gm, written)


def _like(exported: ExportedProgram, gm: GraphModule, written: Sequence[int]) -> Functional:
    """The program with another graph, whose first outputs are what it leaves in these inputs."""
    placeholders = exported.graph_module.graph.find_nodes(op="placeholder")
    _without_what_is_known(gm)
    ops = {node.name for node in gm.graph.nodes if node.op != "placeholder"}
    for new, node in zip(gm.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        if node.name in ops:
            new._rename(node.name)
        else:  # `_rename` would not call anything `input`
            new.name = node.name
        new.target, new.meta = new.name, dict(node.meta)
    gm.graph.output_node().meta.clear()
    outputs: Any = gm.graph.output_node().args[0]
    signature = exported.graph_signature
    signature = _signature(signature, [signature.input_specs[i] for i in written], outputs)
    return Functional(gm, signature, exported.constants, exported.state_dict)


def _without_what_is_known(gm: GraphModule) -> None:
    """Drop what export says of the argument of each `x.to`, which keeps x where nothing else reads it."""
    for node in gm.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def _signature(old: ExportGraphSignature, written: Sequence[InputSpec], outputs: Sequence[Any]) -> ExportGraphSignature:
    """Buffers that are written into are the first outputs."""
    kind = OutputKind.BUFFER_MUTATION
    added = [OutputSpec(kind, TensorArgument(n.name), s.target) for n, s in zip(outputs, written, strict=False)]
    return ExportGraphSignature(list(old.input_specs), [*added, *old.output_specs])


@contextlib.contextmanager
def _as_export_does(fake_mode: Any, table: Decompositions) -> Iterator[tuple[Any, Container[Any]]]:
    """The state in which `run_decompositions` traces; yields the decompositions of ops that are not composite, and
    those that are and stay whole.
    """
    from torch._guards import TracingContext, tracing
    from torch.export import _trace, exported_program

    state: Any = _trace
    composites, rest = exported_program._split_decomp_table_to_cia_and_python_decomp(dict(table))
    with (
        fake_mode, exported_program._override_composite_implicit_decomp(composites), tracing(TracingContext(fake_mode)),
        state._ignore_backend_decomps(), state._compiling_state_context(), torch.no_grad(),
    ):  # fmt: skip
        yield rest, composites.keys() - table.keys()
