"""Where the constants of the cost model come from, and a decision about inductor.

    python bench/calibrate.py [--device cpu|cuda] [--tag NAME] [--steps]

Prints and writes to `bench/results/calibrate-<tag>.json`: the rates of a device; every way to get a convolution's
per-sample weight gradients, norms and sums, layer by layer; with --steps also whole clipped steps with and without
inductor's layout pass, in interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _results import about, device_tag, keep, options
from tabulate import tabulate

import psg_fx
from psg_fx import zoo
from psg_fx.algebra.network import Patches
from psg_fx.planner import rates
from psg_fx.planner.methods import patches

LAYERS = [  # B, C, O, H, kernel, stride, padding
    (16, 3, 64, 32, 7, 2, 3), (16, 64, 64, 8, 3, 1, 1), (16, 64, 128, 8, 3, 2, 1), (16, 128, 128, 4, 3, 1, 1),
    (16, 256, 256, 2, 3, 1, 1), (16, 512, 512, 1, 3, 1, 1), (64, 1, 32, 28, 3, 1, 0), (64, 32, 64, 26, 3, 1, 0),
]  # fmt: skip


def milliseconds(run: Callable[[], object], device: str, rounds: int = 15) -> float:
    """The median of `rounds` runs after two for warm-up."""
    times = []
    for index in range(rounds + 2):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if index >= 2:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measured_rates(device: str) -> dict[str, Any]:
    """The table that `psg-fx calibrate` keeps, which this measures and keeps too."""
    found: dict[str, Any] = json.loads(rates.to_json(psg_fx.calibrate(device)))
    return found


def convolution(layer: tuple[int, ...], device: str) -> dict[str, float]:
    """Milliseconds of each way for one layer."""
    n, c, o, h, k, stride, padding = layer
    out = (h + 2 * padding - k) // stride + 1
    x, g = torch.randn(n, 1, c, h, h, device=device), torch.randn(n, o, out, out, device=device)
    form = Patches((k, k), (stride, stride), (padding, padding), (1, 1), 1, (h, h), (out, out))
    rows = patches.densify(x, form).squeeze(2)
    flat = g.flatten(2)

    def weight_gradient(groups: int, data: torch.Tensor, cotangent: torch.Tensor) -> object:
        template = data.new_empty([cotangent.shape[1], data.shape[1] // groups, k, k])
        return torch.ops.aten.convolution_backward(
            cotangent, data, template, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups,
            [False, True, False],
        )  # fmt: skip

    def shifted() -> object:
        views = patches.shifted_views(x, form)
        return torch.stack([flat @ view.reshape(n, c, -1).transpose(1, 2) for view in views], -1)

    def gram() -> object:
        return ((rows @ rows.transpose(1, 2)) * (flat.transpose(1, 2) @ flat)).sum((1, 2))

    ways: dict[str, Callable[[], object]] = {
        "summed: conv-weight": lambda: weight_gradient(1, x[:, 0], g),
        "per sample: grouped-conv": lambda: weight_gradient(n, x.reshape(1, n * c, h, h), g.reshape(1, -1, out, out)),
        "per sample: unfold+matmul": lambda: torch.bmm(flat, patches.densify(x, form).squeeze(2)),
        "per sample: shifted": shifted,
        "norm: gram of unfolded": gram,
    }
    return {name: milliseconds(way, device) for name, way in ways.items()}


def steps(device: str) -> dict[str, dict[str, float]]:
    """Medians of whole clipped steps with and without inductor's layout pass, in interleaved rounds."""
    return {f"{name}: layout pass": race(name, device) for name in ("simplecnn", "resnet18gn")}


def race(name: str, device: str) -> dict[str, float]:
    """Compile a clipped step under each setting and time them in turn."""
    ex = zoo.example(name, device=device)
    made = {
        setting: psg_fx.transform(
            ex.model, ex.loss_fn, quantities=psg_fx.ClippedSum(1.0), options={"layout_optimization": setting == "on"},
            batch_dim=ex.batch_dim, dynamic=False,
        )
        for setting in ("on", "off")
    }  # fmt: skip
    for step in made.values():
        step(ex.inputs, ex.targets)
    times: dict[str, list[float]] = {setting: [] for setting in made}
    for _ in range(21):
        for setting, step in made.items():
            start = time.perf_counter()
            step(ex.inputs, ex.targets)
            if device == "cuda":
                torch.cuda.synchronize()
            times[setting].append(1e3 * (time.perf_counter() - start))
    return {setting: statistics.median(values[1:]) for setting, values in times.items()}


def main() -> None:
    parser = options(__doc__, device=True)
    parser.add_argument("--steps", action="store_true")
    args = parser.parse_args()
    measured = measured_rates(args.device)
    layers = {str(layer): convolution(layer, args.device) for layer in LAYERS}
    print(tabulate([[k, v] for k, v in measured.items() if k != "flops"]))
    print(tabulate(measured["flops"], ["kind", "dtype", "flop/s"], floatfmt=".3g"))
    rows = [[layer, *(f"{v:.2f}" for v in ways.values())] for layer, ways in layers.items()]
    print(tabulate(rows, ["B, C, O, H, k, stride, padding (ms)", *next(iter(layers.values()))], disable_numparse=True))
    whole = steps(args.device) if args.steps else {}
    for name, found in whole.items():
        print(f"{name}: " + ", ".join(f"{setting} {ms:.1f} ms" for setting, ms in found.items()))
    data = {
        "environment": about(args.device),
        "rates": measured, "convolutions_ms": layers, "steps_ms": whole,
    }  # fmt: skip
    print(f"wrote {keep(f'calibrate-{args.tag or device_tag(args.device)}', data)}.json")


if __name__ == "__main__":
    main()
