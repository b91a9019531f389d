"""Graphs as bytes: to be compared by, and to be read in another process.

Bytes hold plain data, ops by name, and classes and functions of psg_fx, torch and sympy by name.  A value of a node is
written as its sizes, strides and type.  What else there is makes a graph `Unwritable`: objects of the user's, of which
a name says nothing, modules, tensors that the captured graph does not have.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from psg_fx import digests
from psg_fx.graph import facts
from psg_fx.op_table import key_of
from psg_fx.ops.define import op_named
from psg_fx.torch_private.fakes import FakeTensor, Values
from psg_fx.torch_private.graphs import module_without_code

_LIBRARIES = ("aten", "prims", "psg_fx")
_PACKAGES = ("psg_fx", "torch", "sympy", "builtins", "_operator", "operator", "math", "collections", "copyreg")
_KEPT = ("val", facts.KEY, "psg_fx_input", "psg_fx_pass")
"""What nodes go on saying.  The rest says where they come from, of which only texts are made."""
_DERIVED = ("outputs", "notes", "statistics", "one_size")
"""What passes may say anew of the whole graph."""


class Unwritable(Exception):
    """Something cannot be told by its bytes."""


class _Writer(pickle.Pickler):
    """values: sizes and descriptions of tensors -> their numbers in the bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.values: dict[Any, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Node):
            return "node", value.name
        if isinstance(value, OpOverload):
            return "op", _name_of(value)
        if isinstance(value, torch.Tensor):
            return self._numbered(self.tensor(value))
        if isinstance(value, torch.SymInt):
            return self._numbered(("size", facts.expr(value)))
        if isinstance(value, (torch.SymFloat, torch.SymBool, torch.nn.Module)):
            raise Unwritable(f"a {type(value).__name__}")
        return None

    def _numbered(self, description: Any) -> Any:
        return "value", self.values.setdefault(description, len(self.values))

    def tensor(self, value: torch.Tensor) -> Any:
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise Unwritable("a tensor that is not plain")
        strides = tuple(map(facts.expr, value.stride()))
        return "tensor", facts.shape(value), strides, value.dtype, value.device

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (frozenset, set)):
            return type(value), (sorted(value, key=str),)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            package = (value.__module__ or "").partition(".")[0]
            if package not in _PACKAGES or "<" in value.__qualname__:
                raise Unwritable(f"{value.__module__}.{value.__qualname__}")
        return NotImplemented


class _Describer(_Writer):
    """Writes what is equal equally, whether it is one object or two, and tensors with their elements."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True

    def tensor(self, value: torch.Tensor) -> Any:
        if not isinstance(value, FakeTensor):
            return "elements", tuple(value.shape), value.stride(), value.dtype, value.device, _elements(value)
        known = None if value.constant is None else _elements(value.constant)
        return *super().tensor(value), facts.expr(value.storage_offset()), value.requires_grad, known


class _Reader(pickle.Unpickler):
    """values: by their numbers, and nodes by their names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.values: list[Any] = []
        self.nodes: dict[str, Node] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, what = pid
        if kind == "op":
            return _op_of(what)
        return self.nodes[what] if kind == "node" else self.values[what]

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _PACKAGES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def digest(*values: Any) -> str:
    """The same for values that say the same.  Raises Unwritable."""
    file = io.BytesIO()
    writer = _Describer(file)
    _dump(writer, values)
    _dump(writer, tuple(writer.values))
    return hashlib.sha256(file.getbuffer()).hexdigest()


def said_of(gm: GraphModule) -> Any:
    """All that passes are told by a captured graph."""
    nodes = [(n.op, n.target, n.args, n.kwargs, n.name, _said(n), _modules(n)) for n in gm.graph.nodes]
    known = facts.graph_facts(gm)
    return nodes, replace(known, more={}), {str(entry): value for entry, value in known.more.items()}


@dataclass(frozen=True)
class Captured:
    """What a graph that is made of a captured one may refer to: the symbols of its inputs, and its constants."""

    symbols: frozenset[sympy.Symbol]
    constants: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, gm: GraphModule) -> Captured:
        """Of a captured graph."""
        values = [node.meta["val"] for node in facts.placeholders(gm)]
        sizes = [size for value in values for tensor in facts.tensors(value) for size in facts.shape(tensor)]
        return cls(frozenset(s for size in sizes for s in size.free_symbols), facts.graph_facts(gm).constants)


def write(gm: GraphModule, captured: Captured) -> bytes:
    """A graph that was made of a captured one.  Raises Unwritable."""
    known = facts.graph_facts(gm)
    theirs, ours = ({name: id(value) for name, value in f.constants.items()} for f in (captured, known))
    if ours.items() - theirs.items() or known.rows:
        raise Unwritable("constants or rows that the captured graph does not have")
    file = io.BytesIO()
    writer = _Writer(file)
    _dump(writer, (len(gm.graph.nodes), {name: getattr(known, name) for name in _DERIVED}))
    for node in gm.graph.nodes:
        _dump(writer, (node.op, node.target, node.args, node.kwargs, node.name, node.type, _said(node)))
    if {symbol for value in writer.values for symbol in _symbols(value)} - captured.symbols:
        raise Unwritable("symbols that the captured graph does not have")
    values = io.BytesIO()
    _dump(_Describer(values), tuple(writer.values))
    return pickle.dumps((values.getvalue(), file.getvalue()))


def read(data: bytes, captured: GraphModule) -> GraphModule:
    """The graph that was made of a captured one, with its symbols, constants, and what it says of the program."""
    values, nodes = _Reader(data).load()
    make = Values(n.meta["val"] for n in facts.placeholders(captured) if isinstance(n.meta["val"], torch.Tensor))
    reader, graph = _Reader(nodes), Graph()
    for kind, *rest in _Reader(values).load():
        reader.values.append(make.size(*rest) if kind == "size" else make.tensor(*rest))
    count, derived = reader.load()
    for _ in range(count):
        op, target, args, kwargs, name, kind, said = reader.load()
        node = graph.create_node(op, target, args, kwargs, name, kind)
        node.meta = said
        reader.nodes[name] = node
    gm = module_without_code({}, graph, "PerSample")
    gm.meta = dict(captured.meta)
    facts.update_graph(gm, **derived)
    return gm


def _dump(writer: _Writer, value: Any) -> None:
    try:
        writer.dump(value)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise Unwritable(str(error)) from error


def _said(node: Node) -> dict[str, Any]:
    if node.op == "get_attr":
        raise Unwritable("a subgraph")
    return {key: node.meta[key] for key in _KEPT if key in node.meta}


def _modules(node: Node) -> list[Any]:
    """Of which modules it was called."""
    found = (node.meta.get("nn_module_stack") or {}).values()
    return [(entry[0], str(entry[1])) for entry in found if isinstance(entry, tuple)]


def _symbols(value: Any) -> Iterator[sympy.Symbol]:
    """Those of a description."""
    for part in value:
        if isinstance(part, tuple):
            yield from _symbols(part)
        elif isinstance(part, sympy.Expr):
            yield from part.free_symbols


def _elements(tensor: torch.Tensor) -> str:
    return digests.digest(digests.data_of(tensor))


def _name_of(op: OpOverload) -> str:
    if op.namespace not in _LIBRARIES:
        raise Unwritable(f"an op of {op.namespace}")
    return str(key_of(op))


def _op_of(name: str) -> OpOverload:
    found = op_named(name)
    if found is None:
        raise pickle.UnpicklingError(name)
    return found
