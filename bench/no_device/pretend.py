"""The private parts of torch, inductor and triton (2.13 and 3.7) that a compilation without a device stands on.

Nobody asks a driver anything while this is open: what inductor wants to know is answered for an H100.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.config
from torch._dynamo import device_interface
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton

H100 = SimpleNamespace(
    name="pretended H100", type="cuda", index=0, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, gcnArchName="", uuid="0", pci_bus_id=0, pci_device_id=0, pci_domain_id=0, is_integrated=0,
    is_multi_gpu_board=0, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip
"""What `torch.cuda.get_device_properties` says of an H100."""

CAPABILITY = (H100.major, H100.minor)


def _says(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _Interface(device_interface.CudaInterface):
    """What inductor asks of a device it compiles for (`DeviceProperties.create` and generated code's guards)."""

    class Worker(device_interface.CudaInterface.Worker):
        get_device_properties = staticmethod(_says(H100))
        current_device = staticmethod(_says(0))

    get_device_properties = staticmethod(_says(H100))
    get_compute_capability = staticmethod(_says(10 * H100.major + H100.minor))
    is_available = staticmethod(_says(True))
    is_bf16_supported = staticmethod(_says(True))
    device_count = staticmethod(_says(1))
    current_device = exchange_device = maybe_exchange_device = staticmethod(_says(0))
    get_raw_stream = memory_allocated = staticmethod(_says(0))
    set_device = synchronize = staticmethod(_says(None))


class _Driver:
    """What triton asks while it compiles: for which target."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    get_current_device = set_current_device = _says(0)
    get_device_interface = _says(_Interface)


class _OnCpu(TorchDispatchMode):
    """Ops on constants run on the CPU, whatever device they name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(leaf: Any) -> Any:
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return func(*map(here, args), **{key: here(value) for key, value in (kwargs or {}).items()})


def _folded_on_cpu(run_node: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_node)
    def folded(*args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return run_node(*args, **kwargs)

    return folded


_ANSWERS = {
    # `torch.cuda`, asked by inductor's lowering, its heuristics and the code that it generates
    "torch.cuda.is_available": True, "torch.cuda.is_initialized": True, "torch.cuda._lazy_init": None,
    "torch.cuda.device_count": 1, "torch.cuda.current_device": 0, "torch.cuda._exchange_device": 0,
    "torch.cuda._maybe_exchange_device": 0, "torch.cuda.get_device_properties": H100,
    "torch.cuda.get_device_capability": CAPABILITY, "torch.cuda.get_device_name": H100.name,
    "torch.cuda.synchronize": None, "torch.cuda.set_rng_state": None,
    "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "torch._C._cuda_getCurrentRawStream": 0,
    # a fake CUDA tensor would open a context
    "torch._subclasses.fake_tensor.init_gpu_context": None,
    # before each kernel inductor makes triton look for a driver
    "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
    # the static launcher loads cubins by the driver
    "torch._inductor.runtime.triton_heuristics.StaticTritonCompileResult.can_statically_launch": None,
}  # fmt: skip


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """While open, inductor and triton compile for an H100 that is not there.

    Nothing is taken from caches, so that every kernel is seen.  Products are not padded, and no algorithm is chosen by
    timing it, as that needs a device.
    """
    import triton

    known = dict(device_interface.get_registered_device_interfaces())
    registered = device_interface.device_interfaces
    saved = {name: registered[name] for name in known if name.startswith("cuda")}
    _forget()
    with contextlib.ExitStack() as stack:
        for target, answer in _ANSWERS.items():
            stack.enter_context(mock.patch(target, _says(answer)))
        for owner, name, value in (
            (torch._subclasses.fake_tensor.FakeTensorMode, "avoid_device_init", True),
            (triton.runtime.driver, "_active", _Driver()),
            (ConstantFolder, "run_node", _folded_on_cpu(ConstantFolder.run_node)),  # constants are folded for real
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(
            torch._inductor.config.patch(compile_threads=1, force_disable_caches=True, shape_padding=False)
        )
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        registered.update(dict.fromkeys(saved, _Interface))
        try:
            yield
        finally:
            registered.update(saved)
            _forget()


def _forget() -> None:
    """What torch remembers of the device, and of kernels that were compiled before."""
    has_triton.cache_clear()
    CompiledTritonKernels.cache_clear()


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Into the ops that inductor takes."""
    from torch._inductor import lowering  # some of them read it
    from torch._inductor.decomposition import select_decomp_table

    assert lowering
    return dict(select_decomp_table())


REAL_COMPILER = torch._inductor.compile_fx.compile_fx


def instead_of_inductor(compiler: Callable[..., Any] = REAL_COMPILER) -> contextlib.AbstractContextManager[Any]:
    """While open, `torch.compile` hands graphs to this one."""
    return mock.patch("torch._inductor.compile_fx.compile_fx", compiler)


@contextlib.contextmanager
def seen(kernel: Callable[[Any], None], graph: Callable[[Any], None], code: Callable[[str], None]) -> Iterator[None]:
    """While open: each Triton kernel (a `CachingAutotuner`) instead of being loaded; each graph of inductor when it
    has been scheduled; each wrapper that was generated.
    """
    compile_to_module = GraphLowering.compile_to_module

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = compile_to_module(self, *args, **kwargs)
        graph(self)
        return module

    def precompile(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel(self)

    with (
        mock.patch.object(GraphLowering, "compile_to_module", compiled),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(code)),
        mock.patch.object(triton_heuristics.CachingAutotuner, "precompile", precompile),
    ):
        yield


def binary(kernel: Any) -> Any:
    """Triton's binary of a kernel, with `asm` and `metadata`, in the first configuration that autotuning would try.
    Kernels that differ in their names alone are compiled once in a process: steps of one model share most of them.
    """
    del kernel.configs[1:]
    (config,), meta = kernel.configs, kernel.triton_meta
    source = kernel.fn.src.replace(kernel.fn.__name__, "kernel")
    key = repr((source, meta["signature"], meta.get("constants"), meta.get("configs"), config))
    if key not in _BINARIES:
        kernel._precompile_worker()
        _BINARIES[key] = kernel.compile_results[0].kernel
    return _BINARIES[key]


_BINARIES: dict[str, Any] = {}


def bytes_moved(graph: Any) -> int:
    """What inductor's scheduler counts as read and written, every read as one from memory; but what a kernel of psg_fx
    writes (and inductor passes to it as a buffer to be changed) is not read by it.
    """
    return sum(int(node.get_read_write_buffers_sizes()) - _only_written(node) for node in graph.scheduler.nodes)


def _only_written(node: Any) -> int:
    """Bytes that are counted as read of the buffers that a kernel written by hand changes."""
    from torch._inductor.ir import UserDefinedTritonKernel

    if not isinstance(node.node, UserDefinedTritonKernel):
        return 0
    changed = {name for output in node.get_outputs() for name in output.get_mutations()}
    reads = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
    return sum(size for name, size in reads.items() if name in changed)


def _everywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numpy as one of libdevice, which triton's interpreter does not have."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(*tensors: Any) -> Any:
        first = tensors[0]
        if first.dtype not in (tl.float32, tl.float64):
            raise NotImplementedError(f"libdevice of {first.dtype}")
        values = function(*(t.handle.data for t in tensors))
        return tl.tensor(TensorHandle(values.astype(first.handle.data.dtype), first.handle.dtype), first.type)

    return call


class _Libdevice:
    """Functions by name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import numpy as np

        own = {"rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power, "erf": np.vectorize(math.erf)}
        return _everywhere(own.get(name) or getattr(np, name))


class Interpreted:
    """A kernel whose `run` is triton's interpreter; blocks along axes that are not reduced are made as large as
    `LARGEST` elements allow, since the interpreter takes its time for each block.
    """

    LARGEST = 1 << 16
    launched = 0

    def __init__(self, function: Any, configuration: Any, meta: dict[str, Any], constants: dict[str, Any]) -> None:
        self.function, self.meta = function, meta
        own = {name: constants[name] for name in meta.get("declared_constexpr_names", ())}  # of kernels of psg_fx
        own |= {"AS_FLOAT32": True} if "AS_FLOAT32" in own else {}
        self.chosen = dict(configuration.kwargs) | own

    def run(self, *args: Any, stream: Any = None, **more: Any) -> None:
        names = [name for name in self.function.arg_names if name not in self.chosen]
        bound = dict(zip([*names, *self.meta.get("extra_launcher_args", ())], args, strict=False)) | more
        chosen = self.chosen | self._large(bound)
        grid = triton_heuristics.GridExpr.from_meta(self.meta, dict(chosen)).eval_slow(bound | chosen)
        self.function[grid](**{k: v for k, v in (bound | chosen).items() if k in self.function.arg_names})
        Interpreted.launched += 1

    def _large(self, bound: dict[str, Any]) -> dict[str, int]:
        room = max(1, self.LARGEST // _power(bound.get("r0_numel", 1)))
        found = {}
        for axis in "XY":
            if axis + "BLOCK" in self.chosen:
                found[axis + "BLOCK"] = min(_power(bound[axis.lower() + "numel"]), room)
                room = max(1, room // found[axis + "BLOCK"])
        return found


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """While open, code that inductor generated for CUDA runs on CPU tensors, its kernels in triton's interpreter.

    TRITON_INTERPRET=1 must have been set before triton was imported.
    """

    def autotuned(
        size_hints: Any, configs: Any, triton_meta: Any, *args: Any, inductor_meta: Any = None, **kwargs: Any
    ) -> Any:
        constants = triton_meta.get("constants", {})
        return lambda function: Interpreted(function, configs[0], inductor_meta or {}, constants)

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    helpers = "torch._inductor.runtime.triton_helpers"
    with (
        mock.patch.object(triton_heuristics, "cached_autotune", autotuned),
        mock.patch(f"{helpers}.set_driver_to_gpu", _says(None)),
        mock.patch(f"{helpers}.libdevice", _Libdevice()),
        mock.patch("torch._C._dynamo.guards._empty_strided_cuda", empty),
        mock.patch("torch._C._cuda_getCurrentRawStream", _says(0)),
        mock.patch("torch.cuda._DeviceGuard", _says(contextlib.nullcontext())),
        mock.patch("torch.cuda.set_device", _says(None)),
        torch.no_grad(),
    ):
        yield
