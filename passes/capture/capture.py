"""capture: a model and a loss become one functional ATen graph with a symbolic batch size.

Parameters and buffers become named placeholders.  The work is torch.export's (`export.py`), on inputs of a batch size
that occurs nowhere else; a parameter that the loss reaches through its closure is found again by where its data lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.export.graph_signature import InputSpec as Spec
from torch.fx import GraphModule

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import GraphFacts, Holds, InputSpec, OutputSpec, Returns
from psg_fx.graph.strides import free_of_strides
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.conditions import ROW_AXES
from psg_fx.program.changes.effects import Change, Unsettled, made
from psg_fx.program.changes.set_up import ANOTHER, EVERY_CALL
from psg_fx.program.changes.written import WRITTEN, computed_before, leave_the_same
from psg_fx.program.program import Program
from psg_fx.tensors import has_bits
from psg_fx.torch_private.graphs import module_without_code
from psg_fx.torch_private.symbols import known_by, make_one

from .casts import reads_roundings
from .examples import example_like, rows_in, sizes_of_their_own
from .export import Exported, export
from .fills import write_fills
from .fixed_sizes import same_program
from .unseen import computed_outside, of_an_earlier_call, view_by_a_bit


def capture(program: Program, call: Call, tracked: dict[str, str]) -> GraphModule:
    """Capture `program` with a symbolic batch size.

    tracked: name of every parameter -> its canonical name (the same for tied ones) if its gradients are asked, else "".
    """

    rows, sizes = rows_in(call), sizes_of_their_own(call, program)

    def example(size: int) -> list[torch.Tensor]:
        made = [example_like(t, d, size) for t, d in zip(call.tensors, call.dims, strict=True)]
        for k, place in enumerate(rows):
            if place is not None:
                made[k] = example_like(call.tensors[k], place[0], size + 1 if place[1] < 0 else sizes[1 + place[1]])
        return made

    def exported_from(program: Program) -> Exported:
        return export(program, example, call.dims, (sizes[0], call.batch_size()), rows)

    exported = _set_up(program, exported_from)
    held: dict[int, str] = {}
    if closed_over := _aliases(exported, program):
        with _moved(closed_over) as held:
            exported = exported_from(program)
    return _flat(exported, call, tracked, program, held)


def _set_up(program: Program, exported_from: Callable[[Program], Exported]) -> Exported:
    """The program; where its first run sets something up, as it is afterwards, which must be the same."""
    exported = _settled(program, exported_from)
    first = program.set_up
    if not first.kept:
        return exported
    first.keep()
    try:
        again = _settled(program, exported_from)
        if program.set_up.kept:
            raise first.refused(program.observed, EVERY_CALL)
        if not same_program(exported, again):
            raise first.refused(program.observed, ANOTHER)
    except BaseException:
        first.undo()
        raise
    return again


def _settled(program: Program, exported_from: Callable[[Program], Exported]) -> Exported:
    """The program; if it changes numbers that it reads, it must leave them alone once they are changed: then each value
    has a graph, and there are two; or it must only count on with them.
    """
    try:
        return exported_from(program)
    except Unsettled as refusal:
        changes, again = program.changes, Program(program.model, program.loss_fn, program.call)
        program.settled = frozenset(change.label for change in changes if change.counts)
        try:
            with made(changes):
                exported_from(again)
        except Unsettled:
            return _counted(program, exported_from, [c for c in again.changes if c.counts], refusal)
        return exported_from(program)


def _counted(
    program: Program, exported_from: Callable[[Program], Exported], changes: Sequence[Change], refusal: Unsettled
) -> Exported:
    """The program, if it does nothing with the numbers that it changes at every call but to count on.

    If it reads them, each value of those that follow the batch size has a graph, and others are refused.
    """
    as_it_is, settled, written = exported_from(program), program.settled, program.written
    program.counted = frozenset(change.label for change in changes)
    program.settled = settled - program.counted
    try:
        found = exported_from(program)
        if same_program(as_it_is, found) and leave_the_same(written, program.written):
            return found
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # whatever code does with something that is not quite a number
        pass
    if not all(change.by_size for change in changes):
        raise refusal from None
    program.settled, program.counted = settled, frozenset()
    return exported_from(program)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _aliases(exported: Exported, program: Program) -> dict[str, nn.Parameter]:
    """The parameters in whose memory a constant lies: a loss may reach a parameter through its closure."""
    lifted = {_place(t) for t in exported.constants.values() if isinstance(t, torch.Tensor) and t.numel()}
    return {name: p for name, p in program.named_parameters() if p.numel() and _place(p) in lifted}


@contextlib.contextmanager
def _moved(parameters: dict[str, nn.Parameter]) -> Iterator[dict[int, str]]:
    """The parameters lie elsewhere for a while: where -> name.  A constant that follows one is the parameter itself;
    one that stays is another tensor on the same memory, such as `p.detach()`.
    """
    data = {name: p.data for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.data = p.data.clone()
        yield {_place(p): name for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.data = data[name]


def _flat(
    exported: Exported, call: Call, tracked: dict[str, str], program: Program, held: dict[int, str]
) -> GraphModule:
    """The exported program as a graph module whose placeholders and outputs say what they hold.

    held: where the data of the parameters lie that the loss reaches through its closure -> their names.
    """
    gm = module_without_code(exported.graph_module, exported.graph_module.graph, "PerSample")
    write_fills(gm)
    nodes = facts.placeholders(gm)
    constants: dict[str, torch.Tensor] = {}
    inputs = iter(range(len(call.tensors)))
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            index = next(inputs)
            node.meta["psg_fx_input"] = _input(call, index, "input" if index < call.inputs else "target")
            continue
        unread = spec.kind is InputKind.CONSTANT_TENSOR and not node.users  # but for its sizes, which are numbers
        own = _constant(spec) if unread else _own(spec, exported, tracked, program, held)
        node.meta["psg_fx_input"] = own
        if own.kind == "constant":
            value = exported.constants[spec.target or ""]
            constants[own.name] = value.detach() if unread else value
    left_out = dict.fromkeys(line for line, of in program.output.assumed if of == facts.ARM)
    notes = (
        *filter(None, [exported.note]),
        *(f"{line} its arm is left out, and a batch for which it runs refused" for line in left_out),
    )
    gm.meta[facts.KEY] = GraphFacts(
        _batch_symbol(nodes), _outputs(exported, program), notes, constants, exported.one_size,
        frozenset(held.values()), exported.written_copy, exported.squeezed, exported.trims,
        rows=_row_symbols(nodes, call), most=exported.most, rounds=reads_roundings(gm),
    )  # fmt: skip
    known = known_by(nodes[0].meta["val"])
    WRITTEN.put(gm, tuple(entry.of_graph(known) for entry in program.written))
    ROW_AXES.put(gm, call.axes)
    return free_of_strides(gm)


def _own(given: Spec, exported: Exported, tracked: dict[str, str], program: Program, held: dict[int, str]) -> InputSpec:
    """What a placeholder holds that is none of the call's tensors.  held: as in `_flat`."""
    where = given.target or ""
    target = where.removeprefix("model.")
    if given.kind is InputKind.PARAMETER:
        if target == where:  # of the loss, which may hold the model
            of_model = {id(p): f"model.{name}" for name, p in program.model.named_parameters()}
            where = of_model.get(id(program.get_parameter(where)), where)
            if target == where and exported.state_dict[target].requires_grad:
                raise _of_the_loss(target)
        return _parameter(where, tracked)
    if given.kind is InputKind.BUFFER:
        return InputSpec("buffer", target, target=where)
    if given.kind is not InputKind.CONSTANT_TENSOR:
        raise NotYetSupported(
            f"the model uses a {given.kind.name.lower()}", where=where,
            why="only tensors can be inputs of a compiled step", fix="replace it by tensors",
        )  # fmt: skip
    value = exported.constants[where]
    if has_bits(value):
        raise view_by_a_bit(where.removeprefix("model."))
    if value.requires_grad:
        raise computed_outside(value)
    if stored := computed_before(value):
        raise of_an_earlier_call(stored)
    shared = value.numel() and _place(value) in held
    return _parameter(held[_place(value)], tracked) if shared else _constant(given)


def _constant(given: Spec) -> InputSpec:
    return InputSpec("constant", (given.target or "").removeprefix("model."))


def _of_the_loss(target: str) -> NotYetSupported:
    return NotYetSupported(
        f"the loss has a trainable parameter of its own, {target.removeprefix('loss_fn.')}", where="loss_fn",
        why="a step has the gradients of the model's parameters, and this one would be left out without a word",
        fix="make the loss a part of the model that returns it: loss_fn=lambda out: out; or freeze the parameter",
    )  # fmt: skip


def _parameter(target: str, tracked: dict[str, str]) -> InputSpec:
    name = target.removeprefix("model.")
    canonical = tracked.get(name, "") if target.startswith("model.") else ""
    return InputSpec("parameter", canonical or name, tracked=bool(canonical), target=target)


def _input(call: Call, index: int, kind: Holds) -> InputSpec:
    """What an input of the call holds."""
    place = call.places[index] if call.places else None
    spec = InputSpec(kind, call.names[index], call.dims[index])
    if not call.axes:
        return spec
    about = {axis.tensor for axis in call.axes}
    return replace(spec, rows=None if place is None else place.dim, structure=index in about)


def _row_symbols(nodes: Sequence[torch.fx.Node], call: Call) -> tuple[Any, ...]:
    """The symbol of the number of rows of each axis."""
    inputs = [n for n in nodes if facts.input_spec(n).kind in ("input", "target")]
    found: dict[int, Any] = {}
    for node, place in zip(inputs, call.places, strict=False):
        if place is not None:
            found[place.axis] = facts.expr(node.meta["val"].shape[place.dim])
    return tuple(found[k] for k in range(len(call.axes)))


def _batch_symbol(nodes: Sequence[torch.fx.Node]) -> Any:
    """What counts the samples, in every input that carries them."""
    places = [(node, facts.input_spec(node).samples) for node in nodes]
    sizes = [node.meta["val"].shape[dim] for node, dim in places if dim is not None]
    make_one(sizes)
    return facts.expr(sizes[0])


def _value_at(exported: Exported, index: int) -> Any:
    """What an output of the program is."""
    results: Any = exported.graph_module.graph.output_node().args[0]
    return results[index].meta.get("val")


def _require_one_shape(program: Program, target: str, value: Any) -> None:
    """Refuse a buffer that the forward pass makes larger or smaller."""
    shape = program.get_buffer(target).shape
    if isinstance(value, torch.Tensor) and tuple(map(str, value.shape)) != tuple(map(str, shape)):
        name = target.removeprefix("model.")
        raise NotYetSupported(
            f"the forward pass resizes the buffer {name}", where=name,
            why=f"it has the shape {list(shape)} before, and {list(value.shape)} afterwards",
            fix="register it with the shape that it comes to have; one forward pass before the first step may give it",
        )  # fmt: skip


def _outputs(exported: Exported, program: Program) -> tuple[OutputSpec, ...]:
    found = []
    result: Returns = "output" if program.loss_fn is None else "loss"
    kept, checks = sum(entry.tensors for entry in program.written), program.output.assumed
    axes = [k for k, axis in enumerate(program.call.axes) if axis.rows.ids is not None]
    end = len(exported.graph_signature.output_specs) - len(axes)
    last = end - len(checks)
    for index, spec in enumerate(exported.graph_signature.output_specs):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            _require_one_shape(program, spec.target or "", _value_at(exported, index))
            found.append(OutputSpec("buffer", spec.target or ""))
        elif spec.kind is OutputKind.USER_OUTPUT:
            if index >= end:
                found.append(OutputSpec("ids", str(axes[index - end])))
                continue
            kind: Returns = result if index < last - kept else "written"
            found.append(
                OutputSpec(kind, f"{kind}_{index}") if index < last else OutputSpec("check", *checks[index - last])
            )
        else:
            into_parameter = spec.kind is OutputKind.PARAMETER_MUTATION
            raise NotYetSupported(
                f"the forward pass writes into {spec.target or 'one of its inputs'}", where=str(spec.target),
                why="a step never changes its inputs or parameters",
                fix="write into it after the step, under torch.no_grad(); for nn.Embedding(max_norm=m): leave max_norm "
                "out, and call weight.data.renorm_(2, 0, m) after each step of the optimizer"
                if into_parameter else "clone the tensor before writing into it",
            )  # fmt: skip
    return tuple(found)
