"""Measures the rates of a device for the cost model, once, when asked: `psg-fx calibrate`, `psg_fx.calibrate()`.

Every rate is taken where a step spends its time: on shapes of middle size, in memory that has been used before.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from psg_fx.errors import BadArgument, first_line
from psg_fx.generators import generators_kept
from psg_fx.measure.clock import median_seconds
from psg_fx.ops.products import convolutions_in_parts, in_parts, products_here
from psg_fx.ops.products.elsewhere import elsewhere
from psg_fx.planner import rates
from psg_fx.planner.cost import FILLED, REPLAYED, SIDE_BY_SIDE, Device
from psg_fx.progress import Progress
from psg_fx.torch_private import native

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Rates = dict[tuple[str, torch.dtype], float]


def calibrate(device: str | torch.device = "cpu") -> Device:
    """Measure a device's table in some seconds, and keep it for all steps that are built from now on, in this process
    and others: for this hardware, version of torch and number of threads.  The machine should be otherwise idle.
    Raises BadArgument for a device that is not here, or is neither a CPU nor one of CUDA.
    """
    where = _device(device)
    shipped = rates.shipped(where.type)
    line = Progress(True)
    with generators_kept(where):
        with line.doing("measuring products and convolutions"):
            flops = dict(shipped.flops) | measured_rates(where)
        with line.doing("measuring compiled kernels"):
            flops |= _fused(where)
        with line.doing("measuring memory and single ops"):
            bandwidth = _bandwidth(where)
            table = Device(
                where.type, flops, bandwidth, _launch(where), shipped.kept, _extra(where, flops, bandwidth),
                f"rates measured {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            )  # fmt: skip
    path = rates.table_path(where.type)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(rates.to_json(table), encoding="utf-8")
    os.replace(whole, path)  # others may read it now
    return table


def _device(device: Any) -> torch.device:
    """A device that is here, and whose times can be taken."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        why = f"rates of {found.type} are not measured"
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        found, why = torch.device("meta"), f"{type(error).__name__}: {first_line(error)}"
    if found.type not in ("cpu", "cuda"):
        raise BadArgument(
            f"the device {device!r} cannot be measured", where="psg_fx.calibrate(device)", why=why,
            fix='"cpu", or "cuda" where there is one',
        )  # fmt: skip
    return found


def seconds(run: Callable[[], object], device: torch.device, total: float = 0.08) -> float:
    """The median time of one run.  On CUDA that of the device: many runs are replayed as one graph, so that telling
    it what to do takes no time.
    """
    if device.type == "cuda":
        return _replayed_seconds(run, total)
    with torch.no_grad():
        run()
    return median_seconds(run, total)


def _replayed_seconds(run: Callable[[], object], total: float, runs: int = 20) -> float:
    """Seconds of one run of `runs` in a CUDA graph, the median of its replays."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    graph.replay()
    found: list[float] = []
    while sum(found) < total:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found) / runs


def measured_rates(device: torch.device) -> Rates:
    """flop/s of each kind of step in each dtype that the device has."""
    found: Rates = {}
    for dtype in (*_DTYPES, *([torch.float16] if device.type == "cuda" else [])):
        for kind, flops, run in _samples(device, dtype):
            try:
                found[kind, dtype] = flops / seconds(run, device)
            except RuntimeError:  # no kernel for this dtype
                continue
    return found


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(kind, flops, what runs) for each kind of step."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    large = device.type == "cuda"
    n, m, k = (4096, 512, 768) if large else (768, 256, 128)
    a, b = random(n, n), random(n, n)
    by = elsewhere(lambda op: True) if device.type == "cpu" and dtype is torch.float32 else None
    gradient = _weight_gradient
    if by is in_parts.in_parts:
        for library in (in_parts.LIBRARY, convolutions_in_parts.WEIGHT_GRADIENTS):
            native.begin(library)
        native.finish()
        gradient = _weight_gradient_in_parts
    yield "gemm", 2 * n**3, lambda: by(a, b, None) if by else a @ b
    c, d = random(16, m, k), random(16, k, m)
    yield "bmm", 2 * 16 * k * m**2, lambda: torch.bmm(c, d)
    samples = 128 if large else 6
    x, g = random(samples, 64, 16, 16), random(samples, 64, 16, 16)
    yield "conv", 2 * samples * 256 * 64 * 64 * 9, lambda: gradient(x, g, 1)
    if not large and dtype is torch.float32:
        native.begin(products_here.LIBRARY)
        native.finish()
        yield "tile", 2 * 16 * k * m**2, lambda: products_here.squares(d, d)
    if not large:  # there a product of two tensors says no more than the bandwidth
        e, out = random(2**17), random(2**17)
        yield "pointwise", 2**17, lambda: torch.mul(e, e, out=out)


def _fused(device: torch.device) -> Rates:
    """flop/s of what only a compiled graph does: a product that is summed without being stored, and, on CUDA, many
    pointwise steps on a value that is read once.
    """
    rows = 2048 if device.type == "cuda" else 256
    a, b = torch.randn(rows, 1, 512, device=device), torch.randn(rows, 16, 512, device=device)
    summed = torch.compile(lambda x, y: (x * y).sum(-1), dynamic=False)
    found = {("reduce", torch.float32): 2 * b.numel() / seconds(lambda: summed(a, b), device)}
    if device.type == "cuda":
        chained = torch.compile(_chain, dynamic=False)
        found["pointwise", torch.float32] = 2 * _STEPS * b.numel() / seconds(lambda: chained(b), device)
    return found


_STEPS = 64


def _chain(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(_STEPS):
        y = y * x + 0.5
    return y


def _weight_gradient(x: torch.Tensor, grad: torch.Tensor, groups: int) -> object:
    """Of a 3×3 convolution with padding 1."""
    template = x.new_empty([grad.shape[1], x.shape[1] // groups, 3, 3])
    return torch.ops.aten.convolution_backward(
        grad, x, template, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [False, True, False]
    )


def _weight_gradient_in_parts(x: torch.Tensor, grad: torch.Tensor, groups: int) -> object:
    return convolutions_in_parts.weight_gradients_in_parts(grad, x, groups, [3, 3], [1, 1], [1, 1])


def _bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy larger than the caches."""
    size = 2**28 if device.type == "cuda" else 2**26
    a, b = torch.randn(size // 4, device=device), torch.empty(size // 4, device=device)
    return 2 * size / seconds(lambda: b.copy_(a), device)


def _launch(device: torch.device) -> float:
    """Seconds of a kernel that does next to nothing, of many in a row: on CUDA what it takes to tell the device."""
    one, count = torch.ones(1, device=device), 100

    def many() -> None:
        for _ in range(count):
            one.add_(1.0)

    many()
    return median_seconds(many, 0.08) / count


def _filled(device: torch.device, dtype: torch.dtype, rate: float) -> float:
    """Elements of a batched product that take as long as the few of this one, at a rate in flop/s."""
    depth = 4096
    a, b = (torch.randn(4, *sides, device=device).to(dtype) for sides in ((128, depth), (depth, 128)))
    return seconds(lambda: torch.bmm(a, b), device) * rate / (2 * depth)


def _side_by_side(device: torch.device) -> float:
    """Seconds of an element in a kernel that scales eight matrices and writes them into one, for each of the eight."""
    matrices = [torch.randn(1024, 1024, device=device).to(torch.bfloat16) for _ in range(8)]
    scale = torch.rand(1024, 1, device=device).to(torch.bfloat16)
    joined = torch.compile(lambda *each: torch.cat([scale * matrix for matrix in each]), dynamic=False)
    return seconds(lambda: joined(*matrices), device) / (len(matrices) * sum(m.numel() for m in matrices))


def _extra(device: torch.device, flops: Rates, bandwidth: float) -> dict[str, float]:
    """Constants of single methods: what their time holds beside flops and bytes, for each call or element."""
    tiny = torch.randn(1, 16, 4, 4, device=device)
    found = {"convolution": seconds(lambda: _weight_gradient(tiny, tiny, 1), device)}
    if device.type == "cuda":
        found[REPLAYED] = seconds(lambda: tiny.mul_(1.0), device)
        found |= {name: _filled(device, dtype, flops["bmm", dtype]) for dtype, name in FILLED.items()}
        found[SIDE_BY_SIDE] = _side_by_side(device)
    for name, samples, channels, plane in (
        ("grouped_conv_output", 16, 64, 8), ("grouped_conv_small_output", 4, 256, 2),
    ):  # fmt: skip
        x = torch.randn(1, samples * channels, plane, plane, device=device)
        elements = samples * channels * channels * 9
        known = 2 * elements * plane**2 / flops["conv", torch.float32] + found["convolution"]
        found[name] = max(seconds(lambda x=x, n=samples: _weight_gradient(x, x, n), device) - known, 0.0) / elements  # type: ignore[misc]
    rows, width, table = 4096, 64, torch.zeros(8192, 64, device=device)
    ids, values = torch.randint(8192, (rows,), device=device), torch.randn(rows, width, device=device)
    taken = seconds(lambda: table.index_add_(0, ids, values), device)
    found["scatter"] = max(taken - 3 * 4 * rows * width / bandwidth, 0.0) / (rows * width)
    if device.type == "cpu":
        rows, width, products = 16, 64, 128
        x = torch.randn(products * rows, width)
        ends = torch.arange(rows, products * rows + 1, rows, dtype=torch.int32)
        known = 2 * products * rows * width**2 / flops["gemm", torch.float32]
        taken = seconds(lambda: F.grouped_mm(x.t(), x, offs=ends), device)
        found["product"] = max(taken - known, 0.0) / products
        a, b = torch.randn(64, 512, 8), torch.randn(64, 8, 1024)
        out = torch.empty(64, 512, 1024)  # 134 MB, which the caches of a large server do not hold
        taken = seconds(lambda: torch.bmm(a, b, out=out), device)
        found["fetched"] = max(taken * bandwidth / (4 * out.numel()) - 1, 0.0)
        x, elements = torch.randn(16, 512, 1, 1), 512 * 512 * 9
        known = 2 * 16 * elements / flops["conv", torch.float32] + found["convolution"]
        found["conv_output"] = max(seconds(lambda: _weight_gradient(x, x, 1), device) - known, 0.0) / elements
    return found
