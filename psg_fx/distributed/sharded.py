"""A step of a model that is spread over processes, sums placed like their parameters after.

Under `fully_shard`: whole parameters while it runs.

    unshard() of every part  ->  the step, as of the model before it was sharded  ->  reshard()  ->  a reduce-scatter of
    the sums, to the placements of their parameters

These collectives are kept out of the compiled graph: processes plan and compile by themselves, for batches of their own
sizes, and collectives in graphs of their own would not meet in one order.

After `parallelize_module`: slices of parameters, in the processes of a mesh that compute the same samples together.
Their graphs are the same, and have collectives (`psg_fx/passes/spread.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from psg_fx.distributed.placed import Placed
from psg_fx.distributed.sums import check_joins, local, over_processes
from psg_fx.distributed.tensor_parallel import TensorParallel, said_of_slices
from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.slices import Slices
from psg_fx.program.arguments.call import Call
from psg_fx.program.program import Program
from psg_fx.program.state import Tracked
from psg_fx.reference.validate import ValidationReport
from psg_fx.step.compiled import CompiledStep, StepOutput
from psg_fx.step.settings import Settings
from psg_fx.step.with_loss import LossModule
from psg_fx.torch_private.sharded import Sharding


class ShardedModule(LossModule):
    """A step with a loss, of a model whose parameters are spread over processes by `fully_shard`, by
    `parallelize_module`, or by both.

    Every process calls it at the same time, with samples of its own.  Sums and means come back over the samples of all
    processes, as DTensors placed like their parameters; what has a row for every sample is that of its own samples.
    """

    _sharding: Sharding
    _parallel: TensorParallel
    _inside: bool

    def __init__(self, model: nn.Module, loss_fn: Any, settings: Settings) -> None:
        super().__init__(model, loss_fn, settings)
        if settings.reuse_outputs:
            raise NotYetSupported(
                "reuse_outputs keeps whole tensors, and this model is sharded", where="transform(reuse_outputs=True)",
                why="sums are scattered into new memory after each step", fix="leave reuse_outputs out",
            )  # fmt: skip
        check_joins(settings.joins_of_processes, "transform(quantities=...)")
        self._sharding, self._parallel = Sharding(model), TensorParallel(model)
        self._parallel.check(settings.quantities)
        Placed(model, self._parallel)  # which refuses what is spread over several sets of processes
        if settings.warm and self._parallel.group is not None:
            raise NotYetSupported(
                "warm is not for tensor-parallel models", where="transform(warm=...)",
                why="one process would run what is compiled while another still runs the graph, whose collectives need "
                "not come in the same order", fix="leave warm out",
            )  # fmt: skip
        self._inside = False

    def forward(self, *args: Any, **given: Any) -> StepOutput:
        """The step on this process's samples, and the sums over those of all."""
        given = self._given(given)
        return self._over_processes(lambda: super(ShardedModule, self).forward(*args, **given))

    def in_parts(self, call: Call, given: Mapping[str, Any], *args: Any, **options: Any) -> StepOutput:
        """Parts are of this process's samples alone: each process may have another number of them."""
        given = self._given(given)
        return self._over_processes(lambda: super(ShardedModule, self).in_parts(call, given, *args, **options))

    def _over_processes(self, run: Callable[[], StepOutput]) -> StepOutput:
        """Gathers once and adds up once, however often the step runs in between."""
        if self._inside:
            return run()
        with self._own():
            out = run()
        placed = Placed(self.model, self._parallel)
        if self._parallel.group is not None:
            out = placed.of_slices(out)
            out.together = self._parallel.ranks()
        return over_processes(out, placed) if placed.ways else out

    def _slices(self) -> Slices | None:
        return self._parallel.slices()

    def _build(self, tracked: Tracked, call: Call, *args: Any, **given: Any) -> tuple[CompiledStep, Program]:
        """Processes that compute the same samples together see to it that they do."""
        if (slices := self._slices()) is None:
            return super()._build(tracked, call, *args, **given)
        named = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        equal = {f"model.{name}": t for name, t in named.items() if name not in slices.parameters}
        self._parallel.check_equal(equal, "seed all processes alike before the model is made, or broadcast its state")
        self._parallel.check_equal(dict(zip(call.names, call.tensors, strict=True)),
                                   "give the same samples to all processes of this mesh")  # fmt: skip
        step, program = super()._build(tracked, call, *args, **given)
        constants = {name: t for name, t in facts.graph_facts(step.gm).constants.items() if name not in call.names}
        self._parallel.check_equal(constants, "compute what differs between processes outside of the model and loss")
        self._parallel.check_graphs(step.gm)
        return step, program

    def _given(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is given for parameters (directions), of this process: gathered, and cut as the parameters are."""
        if self._inside or all(value is None for value in given.values()):
            return dict(given)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))

        def own(name: str, value: Any) -> Any:
            return self._parallel.part(parameters.get(name), whole(value))

        return {
            key: {name: own(name, v) for name, v in value.items()} if isinstance(value, Mapping) else whole(value)
            for key, value in given.items()
        }

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """Whole parameters, and calls that concern this process alone."""
        with self._sharding.whole(), self._parallel.local():
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def export(self, *args: Any, **given: Any) -> Path:
        """Refused: every process would write the file."""
        raise NotYetSupported(
            "a step of a sharded model is not exported", where="step.export(path, inputs, targets)",
            why="a file takes whole parameters, and every process would write the same one",
            fix="export a step of the model before it is sharded, in one process",
        )  # fmt: skip

    def validate(self, *args: Any, **given: Any) -> ValidationReport:
        """Compare the per-sample gradients of this process's samples with a float64 loop; sums are those of its own.
        Every process calls it.
        """
        if self._parallel.group is not None:
            raise NotYetSupported(
                "a step of a tensor-parallel model is not validated", where="step.validate(inputs, targets)",
                why="the loop that it is compared with takes whole parameters",
                fix="validate a step of the model before parallelize_module, in one process, and compare with that",
            )  # fmt: skip
        with self._own():
            return super().validate(*args, **given)

    def explain(self, measure: bool = False, device: str | None = None, wide: bool = False) -> str:
        """As of every step, and what the parameters of the whole model take while it runs, or what is sent."""
        parts = [super().explain(measure, device, wide)]
        if self._parallel.group is not None:
            parts.append(said_of_slices(self._last.gm, self._parallel.group.size))
        if self._sharding:
            parts.append(self._said_of_shards(self._last.gm))
        return "\n\n".join(parts)

    def _said_of_shards(self, gm: GraphModule) -> str:
        values = [node.meta["val"] for node in facts.placeholders(gm) if facts.input_spec(node).kind == "parameter"]
        joins = self.settings.joins_of_processes
        sums = [
            node.meta["val"] for spec, node in facts.returned(gm)
            if node is not None and spec.kind == "answer" and joins.get(spec.field) in ("sum", "mean", "variance")
        ]  # fmt: skip
        own = [local(p.detach()) for p in self.model.parameters()]
        return (
            f"Sharded: the step is one graph of the whole model, so all parameters are gathered before it and kept "
            f"until its end: {_size(values)} on each process, beside its own {_size(own)}; sums are "
            f"whole until they are scattered: {_size(sums)} more"
        )


def _size(values: Iterable[torch.Tensor]) -> str:
    count = sum(v.numel() * v.itemsize for v in values)
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def whole(value: Any) -> Any:
    """A tensor, gathered where it is spread."""
    return value.full_tensor() if isinstance(value, DTensor) else value
