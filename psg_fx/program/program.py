"""The program that is captured: the model and its loss as one module, and what its outputs mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import replace
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument, InternalError, NotYetSupported
from psg_fx.graph import facts
from psg_fx.plain_objects import NotWritten
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import is_packed
from psg_fx.program.changes.effects import Change, Effects
from psg_fx.program.changes.set_up import SetUp
from psg_fx.program.changes.written import Written
from psg_fx.program.code import line_naming
from psg_fx.program.decisions.alike_masks import AlikeMasks
from psg_fx.program.decisions.assumptions import Assumption, assuming
from psg_fx.program.decisions.emptiness import Branches, Place
from psg_fx.program.decisions.equal_picks import EqualPicks
from psg_fx.program.made_objects import opened
from psg_fx.program.objects import MISSING, contents, slot, slots_of
from psg_fx.program.reads.observe import observing
from psg_fx.program.reads.observed import Observed
from psg_fx.program.stand_ins import StandIns
from psg_fx.tensors import SYMBOLS, number_at, short_name
from psg_fx.torch_private.modes import hooks_of_all_modules


class Output:
    """The structure of the model's output, known once it has run; the leaves that are not tensors are constants."""

    spec: pytree.TreeSpec | None = None
    constants: Mapping[int, Any] = MappingProxyType({})
    assumed: tuple[tuple[str, str], ...] = ()  # lines whose conditions are outputs, after the results, and what of

    def rebuild(self, tensors: Sequence[Any], batch_size: int) -> Any:
        """The structure around `tensors`, with numbers that follow the batch size as they are for this one."""
        assert self.spec is not None
        rest = iter(tensors)
        count = len(self.constants) + len(tensors)
        constants = {i: _for(value, batch_size) for i, value in self.constants.items()}
        leaves = [constants[i] if i in constants else next(rest) for i in range(count)]
        return pytree.tree_unflatten(leaves, self.spec)


def _for(value: Any, batch_size: int) -> Any:
    """A number that code has computed of the batch size, for one batch size; what is none as it is."""
    if not isinstance(value, SYMBOLS):
        return value
    return number_at(value, dict.fromkeys(value.node.expr.free_symbols, batch_size))


class Program(nn.Module):
    """The model followed by the loss, on a flat list of tensors.

    observed: what their code has read.  written: what it leaves in the Python around it, by tensors that are returned
    after the loss or the outputs.  changes: the same, as it was at the last run.  set_up: what it did for good then.
    settled: labels of numbers that it reads, and changes once.  counted: of those that it may only count on with.
    several_sizes: what it does at several batch sizes is compared.  branches: where it asks whether masks pick
    anything; these are its last outputs, which a capture takes off.  left_out: where it is taken for granted that they
    pick nothing.  puts_picks: whether rows that masks pick were put
    into samples again.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, call: Call) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.call = call
        self.output = Output()
        self.observed = Observed(hidden=(self,))
        self.written: list[Written] = []
        self.settled: frozenset[str] = frozenset()
        self.counted: frozenset[str] = frozenset()
        self.several_sizes = False
        self.changes: list[Change] = []
        self.set_up = SetUp()
        self.stand_ins = StandIns()
        self.left_out: frozenset[Place] = frozenset()
        self.branches = Branches()
        self.puts_picks = False
        self._ids: list[torch.Tensor | None] = []

    def like(self) -> Program:
        """The same, not run yet."""
        found = Program(self.model, self.loss_fn, self.call)
        found.settled, found.counted, found.several_sizes = self.settled, self.counted, self.several_sizes
        found.leave_out(self.left_out)
        return found

    def leave_out(self, places: frozenset[Place]) -> None:
        """From the next run on, masks that are asked for there pick nothing, and no others."""
        self.left_out = places
        self.branches = Branches(left_out=self.left_out)

    def release(self) -> None:
        """It is captured: the tensors of the call that it was captured with are not needed any more."""
        self.call = replace(self.call, tensors=())

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        assumed: list[Assumption] = []
        caller = Program.results.__code__
        equal = EqualPicks(assumed, tensors, self.call.tensors)
        with (
            self.branches.answered(assumed), assuming(assumed, caller), equal, AlikeMasks(),
            self.stand_ins.own_in_place(),
        ):  # fmt: skip
            results = self.results(tensors)
        self.puts_picks = equal.put
        self.output.assumed = tuple((a.line, a.of) for a in assumed)
        ids = [ids for ids in self._ids if ids is not None]
        return (
            *results,
            *(a.violated for a in assumed),
            *ids,
            *(mask for branch in self.branches.found for mask in branch.masks),
        )

    def results(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The loss, or the tensors of the model's output."""
        given = NotWritten()
        with given.made():
            (args, kwargs), (targets, target_kwargs) = self.call.rebuild(tensors)
        _are_one_number(tensors, self.call.dims)
        roots = (self.model, self.loss_fn, *hooks_of_all_modules())
        effects = Effects(roots, self.settled, self.counted, without_tensors=self.several_sizes)
        loss, symbols = None, _symbols(tensors)  # of two that the code ties together, one is left
        try:
            with observing(self.observed, self.stand_ins):
                output = self.model(*args, **kwargs)
                if self.loss_fn is not None:
                    loss = self.loss_fn(output, *targets, **target_kwargs)
                self._ids = self.call.ids(tensors) if self.call.axes else []
        except BaseException:
            effects.undo(self.observed)
            raise
        if written := given.written():
            effects.undo(self.observed)
            raise NotYetSupported(
                f"the code writes into an object that it is given, {written}",
                where=line_naming(iter(self.observed.code), written.rpartition(".")[2]) or written,
                why="the code is given new objects, of which the caller sees nothing",
                fix="keep it in a local variable, or return it",
            )  # fmt: skip
        self.changes = effects.changes
        self.written, kept = effects.settle(self.observed, symbols | _symbols(tensors))
        self.set_up = effects.set_up
        return (*self._results(output, loss), *kept)

    def _results(self, output: Any, loss: Any) -> tuple[torch.Tensor, ...]:
        if self.loss_fn is not None:
            _require_loss(loss)
            return (loss,)
        leaves, self.output.spec = pytree.tree_flatten(opened(output), is_leaf=is_packed)
        _require_none_packed(leaves)
        self.output.constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        _require_no_tensors(self.output.constants.values())
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _symbols(tensors: Sequence[torch.Tensor]) -> set[str]:
    """The names of the sizes that have no number yet."""
    return {str(symbol) for t in tensors for size in facts.shape(t) for symbol in size.free_symbols}


def _are_one_number(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> None:
    """The sizes that are the number of samples: asked for, so that an export, which has a symbol for each of them and
    finds at its end that they are equal, knows it from the start, as where `torch.cat([a, b])` is cut in two.
    """
    sizes = [t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None]
    if not all(size == sizes[0] for size in sizes):
        raise InternalError(
            "inputs have several batch sizes", where=f"sizes {sizes}", why="a call is taken apart only if they agree",
            fix="please report this as a bug, with the inputs' shapes",
        )  # fmt: skip


def _require_loss(loss: Any) -> None:
    if isinstance(loss, (int, float, torch.SymInt, torch.SymFloat)):
        raise BadArgument(
            "the loss is a number of Python's, not a tensor", where="loss_fn(output, *targets)",
            why="a number has no gradient", fix="return the tensor that it was taken from, without .item()",
        )  # fmt: skip
    if not isinstance(loss, torch.Tensor):
        raise BadArgument(
            f"the loss is a {type(loss).__name__}, not a tensor", where="loss_fn(output, *targets)",
            why="per-sample gradients are those of a scalar loss or of a [B] tensor of losses",
            fix="return a tensor from loss_fn; if the model computes its loss itself: loss_fn=lambda out: out.loss",
        )  # fmt: skip
    if not loss.is_floating_point():
        raise BadArgument(
            f"the loss is of {short_name(loss.dtype)}", where="loss_fn(output, *targets)",
            why="only a real number that follows the parameters has a gradient",
            fix="return its real part or its absolute value" if loss.is_complex() else "return what is differentiated, "
            "and count hits outside of the step",
        )  # fmt: skip


def _require_none_packed(leaves: Iterable[Any]) -> None:
    if any(map(is_packed, leaves)):
        raise NotYetSupported(
            "the model returns a packed sequence", where="the model's output",
            why="in a graph it is padded, and the order in which torch would pack its steps is not known there",
            fix="return pad_packed_sequence(.., total_length=T), or the last states; or give the loss: "
            "transform(model, loss_fn)",
        )  # fmt: skip


def holds_tensors(leaf: Any) -> bool:
    """Whether an object that pytrees do not look into has tensors, in attributes of its own or of what these hold."""
    return _holds(leaf, (torch.Tensor,))


def _holds(leaf: Any, kinds: tuple[type, ...]) -> bool:
    seen: set[int] = set()
    waiting = [leaf]
    while waiting:
        value = waiting.pop()
        if isinstance(value, kinds):
            return True
        if id(value) in seen or isinstance(value, (nn.Module, type, ModuleType, str, bytes, *SYMBOLS)):
            continue
        seen.add(id(value))
        waiting += pytree.tree_leaves(_held_by(value))
    return False


def _held_by(value: Any) -> list[Any]:
    """What an object holds: attributes, elements, what a function closes over."""
    held = [*getattr(value, "__dict__", {}).values(), *(slot(value, name) for name in slots_of(type(value)))]
    if isinstance(value, Set | MappingView):
        held.extend(value)  # type: ignore[arg-type]
    elif isinstance(value, Mapping):
        held += value.values()
    elif isinstance(value, slice):
        held += [value.start, value.stop, value.step]
    elif isinstance(value, functools.partial):
        held += [value.func, value.args, value.keywords]
    elif isinstance(value, FunctionType):
        held += map(contents, value.__closure__ or ())
    return [each for each in held if each is not MISSING]


def _require_no_tensors(leaves: Iterable[Any]) -> None:
    """Refuse objects that `pytree` does not look into and that hold tensors: those of the capture, not of a call."""
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise NotYetSupported(
                f"the model returns a {type(leaf).__name__}, an iterator", where="the model's output",
                why="what comes out of it is computed after the model has returned",
                fix="return a list or a tuple of what it gives",
            )  # fmt: skip
        if holds_tensors(leaf):
            raise NotYetSupported(
                f"the model returns a {type(leaf).__name__} that holds tensors", where="the model's output",
                why="torch.utils._pytree does not know the class, so its tensors are no outputs of the graph",
                fix="return a tuple, a dict or a NamedTuple, or torch.utils._pytree.register_dataclass the class",
            )  # fmt: skip
        if not isinstance(leaf, SYMBOLS) and _holds(leaf, SYMBOLS):
            raise NotYetSupported(
                f"the model returns a {type(leaf).__name__} that holds a number of the batch size",
                where="the model's output", why="it would be that of the call that was captured",
                fix="return the number itself, in a tuple or a dict",
            )  # fmt: skip
