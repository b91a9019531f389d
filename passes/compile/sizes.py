"""Which compiled code serves which sizes: the first ones by themselves, then one code for what differs between calls.

Sizes of a call are the values of the symbols of the graph: of samples, of groups, of rows.  As under `torch.compile`,
dynamic=None compiles the first sizes as numbers, and makes a symbol of one as soon as it is another; True makes symbols
from the start, False never.  A size of 0 or 1 is a number always: broadcasting takes it for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.frames import with_room_for_frames
from psg_fx.garbage import without_collection
from psg_fx.graph import facts
from psg_fx.program.ambient import isolated
from psg_fx.source import warn
from psg_fx.tensors import memory_order, product
from psg_fx.torch_private.inductor import Compiler, Like, Sizes, compiled, stance
from psg_fx.torch_private.random_state import never_rewound

from .own_memory import OwnMemory

Flat = Callable[..., Sequence[Any]]
Layout = tuple[int, ...] | None
"""Dims from the slowest to the fastest in memory, of a tensor without gaps; None: it has gaps."""
MOST = 4096
"""Sizes whose code is found at once; beyond, all are forgotten, and looked for again."""


@dataclass(frozen=True)
class _Code:
    """Compiled for the numbers of `fixed`, and for all values of other symbols that `serves` accepts.

    threads: at most so many run it: what each of them sums has a place of its own.
    """

    fixed: Sizes
    layouts: tuple[Layout, ...]
    threads: int
    serves: Callable[[Sizes], bool]
    run: Flat

    def fits(self, sizes: Sizes, layouts: tuple[Layout, ...], threads: int) -> bool:
        free = [value for symbol, value in sizes.items() if symbol not in self.fixed]
        return (
            self.layouts == layouts
            and threads <= self.threads
            and all(sizes[symbol] == value for symbol, value in self.fixed.items())
            and all(value > 1 for value in free)
            and self.serves(sizes)
        )


class Background:
    """One task at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, task: Callable[[], Any], failed: Callable[[Exception], Any]) -> None:
        """Begin the task, unless another one runs.  failed: is told what it raises."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, args=(task, failed), name="psg_fx compiles")
            self._thread.start()

    def _run(self, task: Callable[[], Any], failed: Callable[[Exception], Any]) -> None:
        try:
            with never_rewound():
                task()
        except Exception as error:
            failed(error)

    def wait(self) -> None:
        """Until nothing runs."""
        if self._thread is not None:
            self._thread.join()


class Sized:
    """A lowered graph that a compiler makes code of, for sizes as calls bring them.

    compiler: of a graph and fake inputs.  otherwise: runs a call that is not served here: where the user has set
    another stance by `torch.compiler.set_stance`, and for inputs with gaps in memory.  replayed: the code is replayed
    as a CUDA graph, which reads parameters where they lie.  background: what is compiled meanwhile; None: a call waits
    for its code, and else `meanwhile`, the graph as torch runs it, is run until the code is there.
    """

    def __init__(
        self, gm: GraphModule, compiler: Compiler, dynamic: bool | None, otherwise: Flat, *, replayed: bool = False,
        background: Background | None = None, meanwhile: Flat | None = None,
    ) -> None:  # fmt: skip
        self._gm, self._compiler, self._dynamic, self._otherwise = gm, compiler, dynamic, otherwise
        self._replayed, self._background, self._meanwhile = replayed, background, meanwhile or gm
        nodes = facts.placeholders(gm)
        self._shapes = [facts.shape(node.meta["val"]) for node in nodes]
        self._on_cpu = any(t.device.type == "cpu" for n in nodes for t in facts.tensors(n.meta["val"]))
        self._asked = [i for i, node in enumerate(nodes) if not _is_state(node)]
        self._places = _places(self._shapes)
        self._codes: list[_Code] = []
        self._found: dict[Any, Flat] = {}
        self._lock = threading.Lock()
        self._failures: list[Exception] = []

    @staticmethod
    def suits(gm: GraphModule) -> bool:
        """Whether the sizes of a graph's inputs are those of tensors, products and sums of what some dim says."""
        values = [node.meta["val"] for node in facts.placeholders(gm)]
        shapes = [facts.shape(value) for value in values if isinstance(value, torch.Tensor)]
        if len(shapes) < len(values):
            return False
        symbols = {symbol for shape in shapes for size in shape for symbol in size.free_symbols}
        return symbols <= _places(shapes).keys() and all(
            size.is_polynomial(*size.free_symbols) for shape in shapes for size in shape if size.free_symbols
        )

    def __call__(self, *tensors: torch.Tensor) -> Sequence[Any]:
        how = stance()
        if how not in ("default", "fail_on_recompile"):
            return self._otherwise(*tensors)
        key = (torch.get_num_threads(), *[(tensors[i].shape, tensors[i].stride()) for i in self._asked])
        run = self._found.get(key)
        if run is None:
            with self._lock:
                run = self._look_for(tensors, how)
                if run is not self._meanwhile:
                    if len(self._found) >= MOST:
                        self._found.clear()
                    self._found[key] = run
        return run(*tensors)

    def _look_for(self, tensors: Sequence[torch.Tensor], how: str) -> Flat:
        layouts = tuple(_layout(tensors[i]) for i in self._asked)
        if None in layouts:
            return self._otherwise
        sizes = {symbol: int(tensors[i].shape[dim]) for symbol, (i, dim) in self._places.items()}
        threads = torch.get_num_threads() if self._on_cpu else 0
        for code in self._codes:
            if code.fits(sizes, layouts, threads):
                return code.run
        if self._codes and how == "fail_on_recompile":
            raise RuntimeError(f"a step would be compiled anew for the sizes {sizes} (torch.compiler.set_stance)")
        by_place = dict(zip(self._asked, layouts, strict=True))
        inputs = [
            _like(t, self._shapes[i], by_place.get(i), self._replayed and _stays(t)) for i, t in enumerate(tensors)
        ]
        if self._background is None:
            with without_collection():
                return self._compile(inputs, sizes, layouts, threads)
        if self._failures:  # of the task that the last call has begun
            raise self._failures.pop()
        self._background.begin(lambda: self._compile(inputs, sizes, layouts, threads), self._failures.append)
        return self._meanwhile

    @with_room_for_frames
    def _compile(self, inputs: Sequence[Like], sizes: Sizes, layouts: tuple[Layout, ...], threads: int) -> Flat:
        fixed = {symbol: value for symbol, value in sizes.items() if self._is_number(symbol, value)}
        if any((code.layouts, code.fixed) == (layouts, fixed) and threads <= code.threads for code in self._codes):
            fixed = dict(sizes)  # what was compiled for symbols does not serve these values
        free = {symbol: value for symbol, value in sizes.items() if symbol not in fixed}
        try:
            with isolated(), torch.no_grad():
                code, serves = compiled(self._compiler, self._gm, inputs, fixed, free)
        except NotYetSupported as refusal:
            if not free:
                raise
            self._dynamic = False
            found = self._compile(inputs, sizes, layouts, threads)  # raises again where symbols are not what it refuses
            warn(f"compiled for each batch size by itself: {refusal.why}")
            return found
        own = OwnMemory()

        def run(*tensors: torch.Tensor) -> Sequence[Any]:
            return own.of(code(*tensors), tensors)

        self._codes.append(_Code(fixed, layouts, threads, serves, run))
        return run

    def _is_number(self, symbol: sympy.Symbol, value: int) -> bool:
        """Whether the size is compiled as the number that it is."""
        if value < 2 or self._dynamic is not None:
            return value < 2 or not self._dynamic
        return all(code.fixed.get(symbol) == value for code in self._codes)


def _is_state(node: Node) -> bool:
    """A parameter or buffer: it has one layout as long as a captured step stands."""
    return "psg_fx_input" in node.meta and facts.input_spec(node).kind in ("parameter", "buffer")


def _places(shapes: Sequence[tuple[sympy.Expr, ...]]) -> dict[sympy.Symbol, tuple[int, int]]:
    """The input and dim whose size each symbol is."""
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    for i, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if size.is_Symbol:
                found.setdefault(size, (i, dim))
    return found


def _layout(tensor: torch.Tensor) -> Layout:
    """Sizes of 1 take part: where their strides place them, convolutions and others see a memory format."""
    order = memory_order(tensor)
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return None
        expected *= tensor.shape[dim]
    return tuple(order)


def _stays(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, which optimizers write in place, and not made for this call: those of functional calls
    and gathered shards are no `Parameter`.  It must lie where kernels expect it: they are not asked at each call.
    """
    return isinstance(tensor, torch.nn.Parameter) and tensor.data_ptr() % _ALIGNED == 0


_ALIGNED = 16
"""Bytes: kernels of inductor read so many at once."""


def _like(tensor: torch.Tensor, shape: tuple[sympy.Expr, ...], layout: Layout, stays: bool) -> Like:
    """The input, its sizes as symbols.  layout: None for its own strides, which are numbers."""
    if layout is None:
        return Like(shape, tuple(map(sympy.Integer, tensor.stride())), tensor.dtype, tensor.device, stays)
    strides = {dim: product(shape[d] for d in layout[place + 1 :]) for place, dim in enumerate(layout)}
    return Like(shape, tuple(sympy.sympify(strides[d]) for d in range(len(shape))), tensor.dtype, tensor.device, stays)
