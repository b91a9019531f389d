"""Every way to the per-sample weight gradients of convolutions, and to their norms, layer by layer.

    python bench/convolutions.py [--rounds N] [NAME ...]

Each way is compiled by inductor, all of a layer run in interleaved rounds; medians in milliseconds.  The table of
docs/design/convolutions.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _results import options
from tabulate import tabulate
from torch import Tensor

from psg_fx.algebra.network import Axes, Dense, Patches
from psg_fx.machine import cpu_model
from psg_fx.planner.methods import METHODS, Arg, Pair
from psg_fx.planner.methods.dense import MatMul
from psg_fx.planner.methods.patches import ConvWeight, densify
from psg_fx.planner.methods.pixels import PixelGram

Way = Callable[[Tensor, Tensor], Tensor]
WIDE = 8
"""Channels of a group above which a multiply and reduce is not worth timing."""


@dataclass(frozen=True)
class Layer:
    """B samples of `channels` planes, each `size` in every dim, to `outputs`; patches of `kernel` in every dim."""

    name: str
    batch: int
    channels: int
    outputs: int
    size: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    groups: int = 1
    dims: int = 2

    @property
    def form(self) -> Patches:
        out = (self.size + 2 * self.padding - self.kernel) // self.stride + 1
        kernel, stride, padding, space, outs = (
            (n,) * self.dims for n in (self.kernel, self.stride, self.padding, self.size, out)
        )
        return Patches(kernel, stride, padding, (1,) * self.dims, self.groups, space, outs)


LAYERS = [
    Layer("first", 64, 1, 32, 28, padding=0), Layer("simplecnn", 64, 32, 64, 26, padding=0),
    Layer("resnet-stem", 16, 3, 64, 32, 7, 2, 3), Layer("resnet-8", 16, 64, 64, 8), Layer("resnet-4", 16, 128, 128, 4),
    Layer("resnet-2", 16, 256, 256, 2), Layer("wide-16", 16, 64, 64, 16), Layer("wide-8", 16, 128, 128, 8),
    Layer("depthwise-32", 16, 96, 96, 32, groups=96), Layer("depthwise-32/2", 16, 96, 96, 32, 3, 2, 1, 96),
    Layer("depthwise-16", 16, 192, 192, 16, groups=192), Layer("depthwise-8", 16, 576, 576, 8, groups=576),
    Layer("convnext", 16, 96, 96, 14, 7, 1, 3, 96), Layer("grouped", 16, 64, 64, 16, groups=8),
    Layer("conv1d", 16, 64, 64, 128, dims=1), Layer("conv3d", 8, 16, 32, 8, dims=3),
]  # fmt: skip


def gradients(layer: Layer) -> dict[str, Way]:
    """Every method for the gradient of each sample, and the ordinary gradient, all samples summed."""
    form, f32 = layer.form, torch.float32
    t = torch.Size(form.out_space).numel()
    inside = layer.channels // layer.groups
    sizes = {"b": layer.batch, "t": t, "g": layer.groups, "i": inside * layer.kernel**layer.dims,
             "o": layer.outputs // layer.groups}  # fmt: skip
    patches, grad = Arg(tuple("btgi"), form, f32), Arg(tuple("bgot"), Dense(), f32)
    pair = Pair(patches, grad, tuple("bgoi"), sizes)
    built = Pair(Arg(patches.axes, Dense(), f32), grad, pair.out, sizes)
    summed = Pair(patches, grad, tuple("goi"), sizes)
    found: dict[str, Way] = {
        m.name: lambda x, g, m=m: m.emit(pair, x, g)  # type: ignore[misc]
        for m in METHODS
        if m.applies(pair) and (m.name != "windows" or inside <= WIDE)
    }
    if sizes["o"] > 1:
        found["unfold+matmul"] = lambda x, g: MatMul().emit(built, densify(x, form), g)
    return found | {"(summed)": lambda x, g: ConvWeight().emit(summed, x, g)}


def norms(layer: Layer) -> dict[str, Way]:
    """By Gram matrices of patches: from the patches built, or from the pixels."""
    form, f32 = layer.form, torch.float32
    t = torch.Size(form.out_space).numel()
    sizes = {"b": layer.batch, "t": t, "s": t, "g": 1, "o": layer.outputs,
             "i": layer.channels * layer.kernel**layer.dims}  # fmt: skip

    def pair(one: str, two: str, form: Any) -> Pair:
        return Pair(Arg(tuple(one), form, f32), Arg(tuple(two), form, f32), tuple("bgts"), sizes)

    def times(gram: Tensor, axes: Axes, g: Tensor) -> Tensor:
        p = pair("bgot", "bgos", Dense())
        assert [a for a in axes if a != "g"] == [a for a in MatMul().out(p) if a != "g"]
        other = MatMul().emit(p, g, g)
        return (gram.reshape(other.shape) * other).flatten(1).sum(1)

    def unfolded(x: Tensor, g: Tensor) -> Tensor:
        rows, p = densify(x, form), pair("btgi", "bsgi", Dense())
        return times(MatMul().emit(p, rows, rows), MatMul().out(p), g)

    def pixels(x: Tensor, g: Tensor) -> Tensor:
        p = pair("btgi", "bsgi", form)
        return times(PixelGram().emit(p, x, x), PixelGram().out(p), g)

    return {"gram of patches": unfolded, "gram of pixels": pixels} if layer.groups == 1 and t <= 256 else {}


def race(layer: Layer, rounds: int) -> dict[str, float]:
    """Medians in milliseconds."""
    t = torch.Size(layer.form.out_space).numel()
    x = torch.randn(layer.batch, 1, layer.channels, *layer.form.space)
    g = torch.randn(layer.batch, layer.groups, layer.outputs // layer.groups, t)
    ways = {}
    torch.compiler.reset()
    for name, way in (gradients(layer) | norms(layer)).items():
        ways[name] = torch.compile(way, dynamic=False, fullgraph=True, options={"layout_optimization": False})
        ways[name](x, g)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, compiled in ways.items():
            start = time.perf_counter()
            compiled(x, g)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = options(__doc__, tag=False)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of layers; all if none is given")
    args = parser.parse_args()
    rows = []
    for layer in LAYERS:
        if args.names and layer.name not in args.names:
            continue
        found = race(layer, args.rounds)
        what = f"{layer.name}: {layer.batch}, {layer.channels}→{layer.outputs}, {layer.size}^{layer.dims}"
        rows.append({"layer": what, **{name: f"{ms:.2f}" for name, ms in found.items()}})
        print(rows[-1], flush=True)
    print(f"torch {torch.__version__}, {cpu_model()}, {torch.get_num_threads()} threads, float32, milliseconds")
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
