"""A step that was captured on the CPU, planned and compiled as if it lay on a CUDA device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from no_device import pretend
from psg_fx.graph.history import copy_graph
from psg_fx.passes.compile import compile
from psg_fx.passes.compile.recurrences import with_own_loops
from psg_fx.planner import rates
from psg_fx.step.settings import FUSED_KERNELS, Settings

DEVICE = torch.device("cuda", 0)


@dataclass
class Compiled:
    """What inductor made of one graph.

    wrapper: the Python that it generated.  kernels: name -> triton's binary, or None.  graph: as
    inductor was given it.  arguments, results: of running that graph on the CPU, if it was.
    """

    graph: GraphModule
    wrapper: str = ""
    kernels: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    arguments: Sequence[Any] = ()
    results: Sequence[Any] = ()


class _Enough(BaseException):
    """Nothing more is wanted of a step once it has been compiled."""


def _are_wanted(settings: Settings, device: torch.device) -> bool:
    """Whether kernels of psg_fx that are no choice of a plan are in a step: by default, as on an H100."""
    return (settings.options or {}).get(FUSED_KERNELS) is not False


@contextlib.contextmanager
def planned_for_cuda() -> Iterator[None]:
    """While open, steps on the CPU are planned and lowered by the table of a CUDA device, with the kernels of psg_fx
    that are offered there where nobody asks for any.
    """
    patches = (
        mock.patch.object(rates, "device", return_value=rates.shipped("cuda")),
        mock.patch.object(rates, "fused_kernels_pay", return_value=True),
        mock.patch.object(Settings, "kernels_in_cpp", return_value=False),
        mock.patch.object(Settings, "own_kernels", _are_wanted),
        mock.patch.object(Settings, "compiles_kernels", _are_wanted),
        mock.patch.object(compile, "with_own_loops", lambda gm, device: with_own_loops(gm, "cuda")),
        mock.patch.object(compile, "elsewhere", return_value=None),
    )
    with contextlib.ExitStack() as open_now:
        for patch in patches:
            open_now.enter_context(patch)
        yield


def compiled_for_cuda(step: Callable[[], object], *, run: bool = False, binaries: bool = True) -> Compiled:
    """What a call of a step would execute on a device; `step` lies on the CPU and has not been called yet.

    run: also call the graph as it is, on the CPU.  binaries: compile the kernels, too.
    """
    found: list[Compiled] = []

    def compiler(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        found.append(_compiled(gm, inputs, options, binaries))

        def call(*arguments: Any) -> Any:
            if not run:
                raise _Enough
            found[-1].arguments, found[-1].results = arguments, gm(*arguments)
            return found[-1].results

        return call

    with planned_for_cuda(), pretend.instead_of_inductor(compiler), contextlib.suppress(_Enough):
        step()
    if len(found) != 1:
        raise RuntimeError(f"a step is one graph, and {len(found)} were compiled")
    return found[0]


def _compiled(gm: GraphModule, inputs: Sequence[Any], options: dict[str, Any], binaries: bool) -> Compiled:
    found = Compiled(gm)

    def kernel(made: Any) -> None:
        name = made.inductor_meta.get("kernel_name", made.fn.__name__)
        found.kernels[name] = pretend.binary(made) if binaries else None

    def graph(lowered: Any) -> None:
        found.bytes += pretend.bytes_moved(lowered)

    def code(text: str) -> None:
        found.wrapper = text

    with pretend.pretended(), pretend.seen(kernel, graph, code), pretend.instead_of_inductor(), torch.no_grad():
        mode = torch._guards.TracingContext.get().fake_mode
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        with mode:  # `torch.compile` notes its fake inputs, a step hands over its own
            values = [n.meta.get("example_value", value) for n, value in zip(nodes, inputs, strict=True)]
            there = [_there(value) for value in values]
        pretend.REAL_COMPILER(on_cuda(gm), there, **options)
    return found


def _there(value: Any) -> Any:
    """A fake tensor on the device in place of one on the CPU, symbols among its sizes kept; numbers as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


def on_cuda(gm: GraphModule) -> GraphModule:
    """A copy of the graph in which every device that an op names is the CUDA device."""

    def there(leaf: Any) -> Any:
        return DEVICE if isinstance(leaf, torch.device) else leaf

    moved = copy_graph(gm)
    for node in moved.graph.nodes:
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, there)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, there)
    moved.recompile()
    return moved
