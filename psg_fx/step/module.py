"""What every step has: the model's state, its captured graphs, and what it says of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from psg_fx.blocks import Memory
from psg_fx.errors import BadArgument
from psg_fx.explain.explain import explain
from psg_fx.explain.html import write_report
from psg_fx.explain.readable import readable
from psg_fx.frames import with_room_for_frames
from psg_fx.graph import facts
from psg_fx.graph.history import History
from psg_fx.interrupts import deferred, raised_as_it_is
from psg_fx.passes.compile.compile import compile_graph
from psg_fx.passes.compile.sizes import Background
from psg_fx.program.ambient import ambient_key, isolated
from psg_fx.program.arguments.apart import Apart
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.key import call_key
from psg_fx.program.captured import Cache, Captured, Key
from psg_fx.program.changes.effects import Unsettled
from psg_fx.program.guard import Guard
from psg_fx.program.objects import Functions
from psg_fx.program.program import Program
from psg_fx.program.state import IN_PLACE, Tracked, refuse_hooks, tracked_parameters
from psg_fx.program.structure import Structure
from psg_fx.quantities.own import is_own
from psg_fx.source import warn
from psg_fx.step import copies, mistakes, own_code
from psg_fx.step.settings import Settings
from psg_fx.torch_private.kernel_files import begin_calls


class PerSampleModule(nn.Module):
    """What `transform` returns.  Its parameters, buffers and state_dict are the model's own.

    What is declared here is the step's own, by whatever names the model calls its parts: what looks these up by dotted
    names (`torch.func.functional_call`, `torch.distributed.checkpoint`) is given `step.model`.
    """

    model: nn.Module
    loss_fn: Any
    settings: Settings
    _memory: Memory
    _cache: Cache
    _apart: Apart
    _structure: tuple[Structure, Tracked] | None
    _last: Any
    _background: Background | None

    def __init__(self, model: nn.Module, loss_fn: Any, settings: Settings) -> None:
        super().__init__()
        self.model = model
        self._share()
        self.loss_fn = loss_fn
        nn.Module.register_load_state_dict_post_hook(self, _after_loading)
        self.settings = settings
        self._memory = Memory(keep=settings.reuse_outputs)
        self._cache = Cache()
        dims = settings.batch_dim if loss_fn is not None else (settings.batch_dim, None)
        self._apart = Apart(dims, self._arguments)
        self._structure = None
        self._last = None
        self._background = Background() if settings.warm else None

    def _share(self) -> None:
        """Have in common with the model what it has by now: nothing while one that holds this step is copied."""
        for group in copies.SHARED:
            vars(self).pop(group, None)
            if (found := getattr(self.model, group, None)) is not None:
                vars(self)[group] = found

    def __getattr__(self, name: str) -> Any:
        if "model" in vars(self) and not vars(self).keys() >= set(copies.SHARED):
            self._share()
        return vars(self)[name] if name in vars(self) else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in copies.CARRIED and name in self.__dict__:
            raise BadArgument(
                f"the {name} of a step is replaced", where=f"step.{name} = ...",
                why="its graphs and its modules are those of what it was made with",
                fix=f"make another step, psg_fx.transform(model, loss_fn, ...); or change step.{name} itself",
            )  # fmt: skip
        kind: type = type(self)
        if name in _declared(kind):  # nn.Module would take the model's part of that name away
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _arguments(self) -> list[str]:
        """The names of the model's arguments by position."""
        return list(inspect.signature(self.model.forward).parameters)

    @property
    def training(self) -> bool:
        """The model's flag: who sets those of all modules one by one meets the step in the place of its model."""
        model: nn.Module | None = vars(self).get("model")
        return model is None or model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in vars(self):  # nn.Module sets it first
            self.model.training = mode

    def train(self, mode: bool = True) -> PerSampleModule:
        """Set the model's training mode."""
        mistakes.check_apart(self, self.model)
        self.model.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> PerSampleModule:
        """Apply a function to the model and its modules."""
        self.model.apply(fn)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """The model's part of that name, which may begin with one of the step's own ("model.layers.0")."""
        return self.model.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """The model's parameter of that name."""
        return self.model.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The model's buffer of that name."""
        return self.model.get_buffer(target)

    def __getstate__(self) -> dict[str, Any]:
        return copies.carried(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies.restore(self, state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state_dict."""
        mistakes.check_apart(self, self.model)
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The model's own way to load, also where a module around this one is loaded (Opacus wraps it)."""
        self.model._load_from_state_dict(*args, **kwargs)

    @property
    def captures(self) -> tuple[Captured, ...]:
        """The captured steps that are kept, in the order of capture, each with its number, the batch size that it
        serves (None: every one), why it was made and its graphs.  A step that is captured at every call shows here
        what changes between calls.
        """
        return self._cache.entries()

    @property
    def graphs(self) -> Mapping[str, GraphModule]:
        """The graphs of the last capture by stage: of passes that lead to one stage, that of the last."""
        return self._history("graphs").whole().graphs

    @property
    def timings(self) -> dict[str, float]:
        """Seconds spent in each pass of the last capture, and in all that torch has compiled of it ("compile")."""
        found: dict[str, float] = {}
        for step in self._history("timings").passes:
            found[step.name] = found.get(step.name, 0.0) + step.seconds
        return found

    def wait(self) -> None:
        """Until nothing is compiled in the background (`transform(warm="eager")`)."""
        if self._background is not None:
            self._background.wait()

    def print_graph(self, stage: str = "tidied") -> str:
        """Print (and return) a stage's graph as readable Python."""
        graphs = self._history("print_graph()").whole().graphs
        if stage not in tuple(graphs):
            raise BadArgument(
                f"there is no stage {stage!r}", where="print_graph(stage)", why=f"stages are {', '.join(graphs)}",
                fix="use one of those",
            )  # fmt: skip
        text = readable(graphs[stage])
        print(text)
        return text

    def explain(self, measure: bool = False, device: str | None = None, wide: bool = False) -> str:
        """A table of every site: where the samples lie, what is computed, how, at what cost, and why not otherwise.

        measure: compile and time every part of the plan by itself, beside the predictions; some seconds for each.
        device: "h100", "h200", "a100", "l4" or "cpu": the plan for such a device instead, and where it differs from
        this step's own.  The device need not be here.  Raises BadArgument for another name.
        wide: a row for each site and parameter, with formulas, flops and bytes, instead of 120 columns in which layers
        that are alike share one.
        """
        return explain(self._history("explain()").whole().graphs, measure, device, wide)

    def report(self, path: str | PathLike[str], *, measure: bool = False) -> Path:
        """Write one HTML file that opens in any browser and needs nothing else: the graph after every pass with what
        is known of each node, the plan, time per site and memory over the step.

        path: of the file, in a folder that is there.  measure: as in `explain`.  Returns the path.
        """
        mistakes.check_file(path, "step.report(path)")
        return write_report(path, self.model, self.loss_fn, self._history("report").whole(), measure)

    def _history(self, what: str) -> History:
        if self._last is None:
            raise BadArgument(
                "nothing has been captured yet", where=f"step.{what}", why="a step is captured at its first call",
                fix="call the step once on a batch",
            )  # fmt: skip
        history: History = self._last.history
        return history

    def _compiled(self, gm: GraphModule, device: str, history: History, rounds: bool) -> Callable[..., Sequence[Any]]:
        """The graph compiled as the user wants it.  rounds: as in `facts.GraphFacts`, of what it is a part of."""
        s = self.settings
        return compile_graph(
            gm, s.backend, s.mode, s.compiler_options, s.dynamic, device, self._memory, history, self._background,
            s.own_kernels(torch.device(device)), rounds,
        )  # fmt: skip

    def _device(self, call: Call) -> torch.device:
        return call.tensors[0].device if call.tensors else torch.device("cpu")

    def _tracked(self) -> Tracked:
        """The parameters that are asked, as the model is now."""
        found = self._structure
        if found is None or not found[0].holds():
            with IN_PLACE:  # two threads that read it anew would take each other's for a change
                found = self._structure
                if found is None or not found[0].holds():
                    mistakes.check_apart(self, self.model)
                    roots = [m for m in (self.model, self.loss_fn) if isinstance(m, nn.Module)]
                    mistakes.check_tensors(self.model)
                    found = Structure(roots), tracked_parameters(self.model, self.settings.params)
                    self._structure = found
        structure, tracked = found
        if callable(self.settings.params):
            tracked = tracked_parameters(self.model, self.settings.params)
            self._structure = structure, tracked
        if structure.has_hooks():
            refuse_hooks(self.model, tracked)
        return tracked

    def _look_up(
        self, call: Call, tracked: Tracked, build: Callable[[], tuple[Any, Program]], variant: Hashable = None
    ) -> Any:
        """The compiled step for the model and the code around it as they are now, made if it is new."""
        assert self._structure is not None
        structure = self._structure[0]
        ambient = ambient_key(self._device(call).type)
        key = (variant, structure.meaning, tracked.key, call_key(call), ambient)  # the parts are named in KEY_PARTS
        found = self._cache.find(key, call.batch_size(), structure)
        if found is None:
            with deferred(), raised_as_it_is(), isolated():
                there = Functions()  # anew: another thread may have captured meanwhile
                found = self._cache.find(key, call.batch_size(), structure, there)
                found = found or self._capture(key, call, build, structure, there)
        if self._last is not found.step:  # a module looks at every attribute that is set
            self._last = found.step
        return found.step

    @with_room_for_frames
    def _capture(
        self, key: Key, call: Call, build: Callable[[], tuple[Any, Program]], structure: Structure, there: Functions
    ) -> Captured:
        if self.settings.is_compiled and self._device(call).type == "cpu":
            begin_calls()
        self._cache.tell(key, call.batch_size(), there)
        why = self._cache.why(key, call.batch_size(), there)
        try:
            step, program = own_code.built(build, self.model, self.loss_fn, call)
        except Unsettled as error:  # a kind that captures tell apart, and users need not
            raise error.as_known().with_traceback(error.__traceback__) from None
        program.release()
        own = [(type(q).__name__, q) for q in self.settings.quantities if is_own(q)]
        program.observed.functions([type(q).asks for _, q in own])
        guard = Guard(program.observed, [("the loss", self.loss_fn), *own], structure, step.binding.follow)
        known = facts.graph_facts(step.gm)
        if known.one_size and not self._cache.knows(key):
            warn(known.notes[0])
        size = call.batch_size() if self.settings.dynamic is False or known.one_size else None
        return self._cache.add(key, step, guard, size, why, known.most)


@functools.cache
def _declared(kind: type) -> frozenset[str]:
    """The fields of a kind of step."""
    own = [k for k in kind.__mro__ if issubclass(k, PerSampleModule)]
    return frozenset(name for k in own for name in k.__annotations__)


def _after_loading(step: PerSampleModule, found: Any) -> None:
    """The model's hooks, where a module around the step is loaded."""
    for hook in step.model._load_state_dict_post_hooks.values():
        hook(step.model, found)
