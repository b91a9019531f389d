"""One compiled step for one capture key: reads the state, runs the graph, hands out the results."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from psg_fx.blocks import Memory
from psg_fx.errors import BadArgument
from psg_fx.generators import States, drawn_again, states_of
from psg_fx.graph import facts
from psg_fx.graph.history import History
from psg_fx.graph.same_op import any_draws
from psg_fx.passes.compile.own_memory import OwnMemory
from psg_fx.planner.plan import PLAN
from psg_fx.program.arguments.call import Call
from psg_fx.quantities.base import Joins
from psg_fx.step.binding import Binding, no_samples, plain_mode
from psg_fx.step.first_answer import OfOneSample
from psg_fx.step.groups import Groups
from psg_fx.tensors import apart_from
from psg_fx.torch_private.inductor import stance


class StepOutput:
    """What a step returns: `losses` [B], and a field for every quantity asked.

    joins: how each field follows from those of several processes; None where they have been put together.  together:
    ranks of the processes that have computed it together, each with its slices of the model.  Both are no fields.
    """

    __slots__ = ("__dict__", "joins", "together")

    def __init__(self, fields: dict[str, Any], joins: Joins | None = None) -> None:
        self.__dict__.update(fields)
        self.joins = joins
        self.together: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        meant = get_close_matches(name, self.__dict__, 1)
        how = f"did you mean {meant[0]}?" if meant else "ask for it with quantities=[...]"
        raise AttributeError(f"this step's output has no {name!r}, only {', '.join(self.__dict__)}; {how}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in self.__dict__.items())})"


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)}"
    return f"{{{len(value)} parameters}}"


@dataclass(frozen=True)
class Before:
    """What a call finds: the buffers that it writes and what else of the state it reads, by their places among the
    graph's inputs, and where the generators are that it draws from.
    """

    state: Mapping[int, torch.Tensor]
    generators: States

    def read_again(self) -> contextlib.AbstractContextManager[None]:
        """While open, what is drawn is what the call has drawn."""
        return drawn_again(self.generators) if self.generators else contextlib.nullcontext()


class CompiledStep:
    """A lowered and compiled graph with a loss.

    part: how many samples its plan has room for within a memory budget.  is_cut: whether the batch had more.
    larger: the batch size for which there is another plan, since this one has no room for it.
    expected: what the first answer must say of one sample; None once it has.
    """

    def __init__(
        self, gm: GraphModule, history: History, model: nn.Module, loss_fn: Any, run: Callable[..., Sequence[Any]],
        memory: Memory,
    ) -> None:  # fmt: skip
        self.gm, self.history, self._run, self._memory = gm, history, run, memory
        self.binding = Binding(gm, model, loss_fn)
        plan = PLAN.found(gm)
        self.part: int | None = None if plan is None else plan.part  # on disk are no plans within a budget
        self.is_cut = plan is not None and plan.cut > 0
        self.larger: int | None = None
        self.expected: OfOneSample | None = None
        self._own_memory = OwnMemory()
        self.statistics: tuple[str, ...] = facts.graph_facts(gm).statistics
        self.leaves_out: bool = facts.graph_facts(gm).leaves_out
        self._draws = facts.graph_facts(gm).runs_code or any_draws(gm)

    def before(self, call: Call) -> Before:
        """What a call is about to find, for a second run of it."""
        return Before(self.binding.before(), states_of(*{t.device for t in call.tensors}) if self._draws else {})

    def __call__(
        self, call: Call, extras: Mapping[str, torch.Tensor], out: StepOutput | None = None, *,
        before: Before | None = None, groups: Groups | None = None,
    ) -> StepOutput:  # fmt: skip
        """The results for one call, in the tensors of `out` if it is given.

        before: of a second run of a call, which writes no buffers: what the first one has found.
        groups: of the samples, in a graph for groups.
        """
        with plain_mode():
            if out is None:
                return StepOutput(self._fields(call, extras, before, groups))
            former = vars(out)
            with self._memory.lent(pytree.tree_leaves(former)):
                fields = self._fields(call, extras, before, groups)
            write_into(former, fields)
        return out

    def _fields(
        self, call: Call, extras: Mapping[str, torch.Tensor], before: Before | None, groups: Groups | None
    ) -> dict[str, Any]:
        arguments, count = self.binding.arguments(call, extras), 0 if groups is None else groups.grouping.groups
        if before is None:
            results = self._results(call, arguments, True, count)
        else:
            for i, value in before.state.items():
                arguments[i] = value
            with before.read_again():
                results = self._results(call, arguments, False, count)
        return self.binding.fields(results if groups is None else self.binding.of_groups(results, groups))

    def _results(self, call: Call, arguments: Sequence[torch.Tensor], buffers: bool, groups: int) -> Sequence[Any]:
        if call.batch_size() == 0:
            return no_samples(self.gm, arguments[0].device, groups)
        try:
            results = self._own_memory.of(self._run(*arguments), arguments, (call.batch_size(), stance()))
        except Exception:
            self.binding.check_apart(self.gm, arguments)  # perhaps what a check is there for
            raise
        if (expected := self.expected) is not None:  # another thread may answer first
            self.binding.check(results.__getitem__)
            fields = self.binding.fields(results)
            expected.require([fields["losses"]], call, self.gm, self.binding, arguments, fields)
            self.expected = None
        if not buffers:
            self.binding.check(results.__getitem__)
        else:
            self.binding.write_back(results, call)
        return results


def check_out(out: Any, keeps: bool) -> None:
    """Refuse what results cannot be written into.  keeps: whether the step uses the memory of former results again."""
    where = "step(inputs, targets, out=...)"
    if not isinstance(out, StepOutput):
        raise BadArgument(
            f"out is a {type(out).__name__}", where=where, why="results are written into those of a former call",
            fix="pass what the step has returned",
        )  # fmt: skip
    if not keeps:
        raise BadArgument(
            "out= needs a step that reuses its outputs", where=where,
            why="the results would be written to fresh memory first", fix="transform(..., reuse_outputs=True)",
        )  # fmt: skip
    if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in pytree.tree_leaves(vars(out))):
        raise BadArgument(
            "out was made under torch.inference_mode()", where=where,
            why="outside of that mode torch does not write into its tensors",
            fix="call the step inside of the mode, too; or leave out= out of the first call outside of it",
        )  # fmt: skip


def out_of_the_way(
    out: StepOutput, call: Call, extras: Mapping[str, torch.Tensor]
) -> tuple[Call, dict[str, torch.Tensor]]:
    """A call and what is given to it, copied where it lies in a former output: gradients of the batch before may be the
    directions of this one, which writes over them.
    """
    held = pytree.tree_leaves(vars(out))
    given = dict(zip(extras, apart_from(held, extras.values()), strict=True))
    tensors = tuple(apart_from(held, call.tensors))
    return call if all(map(operator.is_, tensors, call.tensors)) else call.like(tensors), given


def write_into(former: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Put the values of `fields` into the tensors of `former`; where a shape has changed, in their place."""
    values = dict(fields)
    if pytree.tree_structure(former) != pytree.tree_structure(values):
        raise BadArgument(
            f"out has the fields {', '.join(former)}", where="step(inputs, targets, out=...)",
            why=f"this call fills {', '.join(fields)}, for the parameters that are tracked now",
            fix="pass an output of the same step",
        )  # fmt: skip
    targets = pytree.tree_leaves(former)
    starts = {target.untyped_storage().data_ptr() for target in targets}

    def placed(target: torch.Tensor, value: torch.Tensor) -> bool:
        alike = target.shape == value.shape and target.dtype is value.dtype
        return target.data_ptr() == value.data_ptr() or not alike

    def moved(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The value, out of the way of what will be written."""
        inside = value.untyped_storage().data_ptr() in starts
        return value.clone() if inside and not placed(target, value) else value

    def written(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value if placed(target, value) else target.copy_(value)

    former.update(pytree.tree_map(written, former, pytree.tree_map(moved, former, values)))
