"""How the flat inputs of a graph are found at a call, and what its outputs mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import GraphModule

from psg_fx.algebra.members import MEMBERS
from psg_fx.errors import BadArgument, NotYetSupported, PsgError, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import InputSpec, OutputSpec
from psg_fx.interrupts import deferred
from psg_fx.program.ambient import without_autocast
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.conditions import CONDITIONS, require
from psg_fx.program.changes.written import WRITTEN, Written
from psg_fx.program.guard import Lying
from psg_fx.program.state import IN_PLACE, holder
from psg_fx.step.groups import Groups
from psg_fx.tensors import memory_order, place_of, storage_of
from psg_fx.torch_private.modes import no_grad


def plain_mode() -> contextlib.AbstractContextManager[Any]:
    """No autograd and no autocast: a captured graph has its casts written out."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return no_grad()
    stack = contextlib.ExitStack()
    stack.enter_context(no_grad())
    stack.enter_context(without_autocast())
    return stack


def in_one_block(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps in memory, its dims in the order that they have: what a graph was captured with.

    A contiguous tensor has any strides in dims of one element, and convolutions take them for a memory format: they
    become those of a new tensor.
    """
    if tensor.is_contiguous():
        return tensor.view(-1).view(tensor.shape) if tensor.ndim > 2 and 1 in tensor.shape else tensor
    order = memory_order(tensor)
    ordered = tensor.permute(order)
    if ordered.is_contiguous():
        return tensor
    return ordered.contiguous().permute([order.index(d) for d in range(tensor.ndim)])


class Binding:
    """How the flat inputs of a graph are found at a call, and what its outputs mean.

    given: the dtype of every further input.  shapes: the shape of each, None for as many as there is asked of.
    """

    def __init__(self, gm: GraphModule, model: nn.Module, loss_fn: Any) -> None:
        nodes, known = facts.placeholders(gm), facts.graph_facts(gm)
        self.specs = [facts.input_spec(n) for n in nodes]
        self.given = {s.name: n.meta["val"].dtype for s, n in zip(self.specs, nodes, strict=True) if s.kind == "given"}
        groups = _counts_of_groups(gm)
        counted = (groups or [known.batch])[0]
        self.shapes = {
            s.name: tuple(None if size == counted else size for size in facts.shape(n.meta["val"]))
            for s, n in zip(self.specs, nodes, strict=True) if s.kind == "given"
        }  # fmt: skip
        by_samples = not groups and not known.one_size  # else any size may be B
        self._each = {name for name, shape in self.shapes.items() if by_samples and shape[:1] == (None,)}
        self.outputs = known.outputs
        self._written: Sequence[Written] = WRITTEN.of(gm)
        self._sizes = (known.batch, *known.rows)
        self._of_groups = _dims_of_groups(gm)
        self._constants = {i: known.constants[s.name] for i, s in enumerate(self.specs) if s.kind == "constant"}
        own = _by_place(model, loss_fn) if known.runs_code else {}
        self.read_inside = {i: own[p] for i, value in self._constants.items() if (p := place_of(value)) in own}
        """Parameters and buffers that are constants of the graph: a custom function reads them by itself."""
        self._slots = [self._slot(i, spec, model, loss_fn) for i, spec in enumerate(self.specs)]
        self._numbers: dict[int, int] | None = None
        self._containers: Sequence[int | None] = ()
        self._arrange()
        self._fields = _fields(self.outputs)
        self._mixing = next((i for i, spec in enumerate(self.outputs) if spec.kind == "mixing"), None)
        self._conditions = () if self._mixing is None else CONDITIONS.of(gm)
        self._checks = [(i, spec) for i, spec in enumerate(self.outputs) if spec.kind == "check"]
        self._buffers = [
            (i, *holder(model, loss_fn, spec.name)) for i, spec in enumerate(self.outputs) if spec.kind == "buffer"
        ]
        self._not_alone = known.not_alone
        self._asks = self._mixing is not None or bool(self._checks)
        self._keeps = bool(self._buffers or self._written)

    def _slot(self, index: int, spec: InputSpec, model: nn.Module, loss_fn: Any) -> Any:
        if spec.kind in ("parameter", "buffer"):
            return holder(model, loss_fn, spec.target)
        if index in self.read_inside:
            return holder(model, loss_fn, self.read_inside[index])
        return self._constants.get(index, spec)

    def _arrange(self) -> None:
        """Sort the slots by what a call does for them.  Another thread may be in a call."""
        slots = [s for s in self._slots if not isinstance(s, InputSpec) or s.kind in ("given", "input", "target")]
        held = [slot if isinstance(slot, torch.Tensor) else None for slot in slots]
        self._held = held, [(i, *slot) for i, slot in enumerate(slots) if isinstance(slot, tuple)]
        specs = [(i, slot) for i, slot in enumerate(slots) if isinstance(slot, InputSpec)]
        self._extras = [(i, spec.name) for i, spec in specs if spec.kind == "given"]
        self._of_each = [i for i, name in self._extras if name in self._each]
        self._data = [i for i, spec in specs if spec.kind != "given"]

    def arguments(self, call: Call, extras: Mapping[str, torch.Tensor]) -> list[Any]:
        """The graph's inputs for one call, the model's state as it is now; tangents are left to the caller."""
        held, state = self._held
        found: list[Any] = held[:]
        with IN_PLACE:
            for i, group, name in state:
                found[i] = group[name]
        for i, name in self._extras:
            found[i] = extras[name]
        for i, tensor in zip(self._data, call.tensors, strict=True):
            found[i] = in_one_block(tensor)
        if self._buffers:
            self._refuse_buffers(call)
        return found

    def _refuse_buffers(self, call: Call) -> None:
        """The code may write into a buffer before it reads an input; a graph reads what both were."""
        places = {storage_of(group[key]): self.outputs[i].name for i, group, key in self._buffers}
        for name, tensor in zip(call.names, call.tensors, strict=True):
            if (place := storage_of(tensor)) is not None and place in places:
                raise BadArgument(
                    f"{name} lies in the memory of a buffer that the code writes into", where=places[place],
                    why="whether the code reads it before or after is not followed", fix="pass a clone of it",
                )  # fmt: skip

    def of_sample(self, arguments: Sequence[Any], call: Call, sample: int) -> list[Any]:
        """The graph's inputs with those of one sample in place of all."""
        inputs = self.without_tangents(arguments)
        for i, tensor, dim in zip(self._data, call.tensors, call.dims, strict=True):
            inputs[i] = in_one_block(tensor if dim is None else tensor.narrow(dim, sample, 1))
        for i in self._of_each:
            inputs[i] = inputs[i].narrow(0, sample, 1)
        return inputs

    def further(self, arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Of the graph's inputs, those that are neither the model's nor the batch's, by name."""
        return {name: arguments[i] for i, name in self._extras}

    def without_tangents(self, arguments: Sequence[Any]) -> list[Any]:
        """Of all inputs, None in the places of those that come with the backward."""
        found = iter(arguments)
        return [None if spec.kind == "tangent" else next(found) for spec in self.specs]

    def before(self) -> dict[int, torch.Tensor]:
        """The model's state by its places among the graph's inputs, if a call changes it: buffers that it writes are
        copied.
        """
        if not self._keeps:
            return {}
        written = {(id(group), name) for _, group, name in self._buffers}
        with IN_PLACE:
            found = {i: (group[name], (id(group), name) in written) for i, group, name in self._held[1]}
        return {i: value.clone() if copied else value for i, (value, copied) in found.items()}

    def buffers(self) -> list[torch.Tensor]:
        """Those that a call writes."""
        with IN_PLACE:
            return [group[name] for _, group, name in self._buffers]

    def write_back(self, results: Sequence[Any], call: Call) -> None:
        """Leave in the model's buffers, and in the Python around it, what an ordinary forward would; which raises where
        its own checks fail.  results: none lies in a buffer.
        """
        if self._asks:
            self.check(results.__getitem__)
        if not self._keeps:
            return
        if self._not_alone and call.batch_size() == 1:
            raise squeezed_alone(self._not_alone)
        kept = (v for v, spec in zip(results, self.outputs, strict=True) if spec.kind == "written")
        sizes = dict(zip(self._sizes, (call.batch_size(), *call.row_sizes), strict=True)) if self._written else {}
        with deferred():  # all of them, or none
            for buffer, (index, _, _) in zip(self.buffers(), self._buffers, strict=True):
                buffer.copy_(results[index])
            for entry in self._written:
                entry.store(kept, sizes)

    def check(self, result: Callable[[int], Any]) -> None:
        """Raise where the model's own checks fail, or where rows of several samples meet.  result: by its index."""
        if self._mixing is not None:
            require(self._conditions, result(self._mixing))
        for index, spec in self._checks:
            if result(index).any():
                raise failed_check(spec.name, spec.field)

    def check_arms(self, gm: GraphModule, call: Call) -> None:
        """Raise where a mask picks something whose arm the graph leaves out, before anything is compiled."""
        if places := [i for i, spec in enumerate(self.outputs) if spec.field == facts.ARM]:
            given: Any = dict.fromkeys(self.given)
            arguments = self.without_tangents(self.arguments(call, given))
            for i, picks in zip(places, facts.computed(gm, places, arguments), strict=True):
                if picks.any():
                    raise failed_check(self.outputs[i].name, facts.ARM)

    def check_apart(self, gm: GraphModule, arguments: Sequence[Any]) -> None:
        """The same, found without the rest of the graph."""
        self.check(lambda index: facts.computed(gm, [index], arguments)[0])

    def follow(self, lying: Lying) -> None:
        """Read constants where they lie, so that another tensor that comes to lie there is the one read; write into the
        lists and dicts that are there.
        """
        if self._numbers is None:
            numbers = {i: lying.number(constant) for i, constant in self._constants.items()}
            self._numbers = {i: number for i, number in numbers.items() if number is not None}
            self._containers = [lying.number_of_container(entry.container) for entry in self._written]
        for index, number in self._numbers.items():
            self._slots[index] = lying.at(number)
        self._written = [
            entry if number is None else entry.into(lying.containers[number])
            for entry, number in zip(self._written, self._containers, strict=True)
        ]
        self._arrange()

    def of_groups(self, results: Sequence[Any], groups: Groups) -> Sequence[Any]:
        """Results with all groups in place of those of the graph."""
        if groups.slots is None and groups.sound is None:
            return results
        each = zip(results, self._of_groups, self.outputs, strict=True)
        return [groups.every(value, dims) if spec.kind == "answer" else value for value, dims, spec in each]

    def fields(self, results: Sequence[Any]) -> dict[str, Any]:
        """Results by field: losses and what the quantities asked."""
        return {
            field: results[at] if isinstance(at, int) else {name: results[i] for name, i in at}
            for field, at in self._fields
        }


def _by_place(model: nn.Module, loss_fn: Any) -> dict[Any, str]:
    """Parameters and buffers by where they lie: code that no capture follows, such as a custom function that is given a
    module, reads them as they are, and another one tomorrow.
    """
    roots = {"model": model} | ({"loss": loss_fn} if isinstance(loss_fn, nn.Module) else {})
    named = ((f"{root}.{name}", tensor) for root, module in roots.items()
             for name, tensor in (*module.named_parameters(), *module.named_buffers()))  # fmt: skip
    return {place: name for name, tensor in named if (place := place_of(tensor)) is not None}


def _fields(outputs: Sequence[OutputSpec]) -> list[tuple[str, int | list[tuple[str, int]]]]:
    """Where each field is found among the results; of one with a part for every parameter, all of its parts."""
    found: dict[str, Any] = {}
    for i, spec in enumerate(outputs):
        if spec.kind == "loss":
            found["losses"] = i
        elif spec.kind == "answer" and spec.name:
            found.setdefault(spec.field, []).append((spec.name, i))
        elif spec.kind == "answer":
            found[spec.field] = i
    return list(found.items())


def _dims_of_groups(gm: GraphModule) -> list[tuple[int, ...]]:
    """For each output, the dims that have a place for each group."""
    counts = _counts_of_groups(gm)
    shapes = [facts.shape(n.meta["val"]) if n is not None else () for n in facts.outputs(gm)]
    return [tuple(d for d, size in enumerate(shape) if size in counts) for shape in shapes]


def _counts_of_groups(gm: GraphModule) -> list[sympy.Expr]:
    """The symbol of the number of groups, if the graph is for groups."""
    given = {facts.input_spec(n).name: n for n in facts.placeholders(gm) if facts.input_spec(n).kind == "given"}
    return [facts.shape(given[MEMBERS.name].meta["val"])[0]] if MEMBERS.name in given else []


_FAILED: dict[str, tuple[type[PsgError], str, str, str]] = {
    "": (
        BadArgument, "the code of the model or loss refuses these values",
        "its branch that only raises an error is not in the graph; its condition is, and holds for this batch",
        "call model and loss on the batch themselves to see that error",
    ),
    facts.PLACES: (
        SamplesMixed, "values that a mask places mix samples in this batch, so per-sample gradients do not exist",
        "places are counted through all samples, and one of them has more or fewer places than values of its own",
        "give every sample as many places as values: as many image tokens as features of its image",
    ),
    facts.DRAWN: (
        BadArgument, "a random number is exactly zero",
        "the graph holds what the code does where it is not; one draw of 2^24 is",
        "call the step again, which draws other numbers; or leave the draw out where its bound is 0",
    ),
    facts.ARM: (
        NotYetSupported, "a mask picks something in this batch, and the arm that runs then is not in the graph",
        "the code branches on values of a tensor, whether a mask picks anything; it is not seen that the arm changes "
        "nothing where it does not, so the graph serves batches in which it picks nothing",
        "leave the branch out, and loop over all (what is read by a mask that picks nothing has no rows; a mean is "
        "x[m].sum() / m.sum().clamp(min=1)), replace it by torch.where, or leave such samples out of the batch",
    ),
    facts.PICKS: (
        BadArgument, "a mask picks other numbers of places than in the call that was captured",
        "rows that it picks are put into samples, so the graph holds how many each sample has",
        "give masks that pick as many places of each sample; for another number make another step",
    ),
}  # fmt: skip
"""The field of a check -> the error where it fails: what, why, and the way out."""


def failed_check(line: str, of: str) -> PsgError:
    """The model's or loss's own code would have raised an error, or samples would meet.  of: the field of the check."""
    kind, what, why, fix = _FAILED[of]
    return kind(what, where=line, why=why, fix=fix)


def squeezed_alone(line: str) -> PsgError:
    """The code keeps something in which a batch of one sample has fewer dims."""
    return NotYetSupported(
        "squeeze treats a batch of one sample differently", where=line,
        why="it takes the sample dim, too, so what the code keeps from call to call would be another value",
        fix="name the dim: x.squeeze(1), or x.flatten(1); or call the step on several samples",
    )  # fmt: skip


def no_samples(gm: GraphModule, device: torch.device, groups: int = 0) -> list[torch.Tensor]:
    """A graph's results for no samples, in so many groups: empty where samples are counted, and sums over nothing are
    zero.
    """
    sizes = {facts.graph_facts(gm).batch: 0, **dict.fromkeys(_counts_of_groups(gm), groups)}
    values = [(node.meta["val"] if node is not None else torch.zeros(())) for node in facts.outputs(gm)]
    shapes = [[int(size.subs(sizes)) for size in facts.shape(value)] for value in values]
    return [torch.zeros(shape, dtype=v.dtype, device=device) for v, shape in zip(values, shapes, strict=True)]
