"""Sums over samples of gradients that lie in a CUDA device's memory: by inductor, and by the kernel of psg_fx.

    python bench/weighted_sums.py [--scan] [--tag NAME]

y_k[i] = Σ_b w[b] x_k[b, i] of some tensors at once, replayed as CUDA graphs; what must be moved over the time is the
rate of memory that is reached.  --scan: also with other constants of the kernel.
Writes `bench/results/weighted_sums-<tag>.json` and `.md`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from _results import keep_of_device, options, require_cuda
from tabulate import tabulate
from torch import Tensor

from psg_fx.measure.calibrate import seconds
from psg_fx.ops.products.weighted_sums import weighted_sums

SHAPES = (
    (16, 768 * 3072, 3, torch.bfloat16), (16, 768 * 2304, 3, torch.bfloat16), (8, 256 * 1024, 8, torch.float32),
    (128, 256 * 2304, 2, torch.float32), (64, 128 * 9216, 1, torch.float32), (64, 128 * 9216, 1, torch.bfloat16),
)  # fmt: skip
"""Samples, elements of a gradient, how many gradients, dtype: layers of transformers, of a ResNet, of a small CNN."""

HEADERS = ["samples", "elements", "tensors", "dtype", "inductor, µs", "TB/s", "kernel, µs", "TB/s", "ratio", "error"]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--scan", action="store_true")
    args = parser.parse_args()
    require_cuda()
    rows = [measured(*shape, scan=args.scan) for shape in SHAPES]
    shown = [
        [r["samples"], r["elements"], r["tensors"], r["dtype"], f"{r['inductor_us']:.1f}", f"{rate(r, 'inductor'):.2f}",
         f"{r['kernel_us']:.1f}", f"{rate(r, 'kernel'):.2f}", f"{r['kernel_us'] / r['inductor_us']:.2f}",
         f"{r['error']:.0e}"]
        for r in rows
    ]  # fmt: skip
    path = keep_of_device(
        "weighted_sums", args.tag, "Weighted sums of gradients that are stored", {"rows": rows},
        "Replayed as CUDA graphs; errors are those of the kernel, relative to float64.",
        tabulate(shown, HEADERS, "github", disable_numparse=True), *scans(rows),
    )  # fmt: skip
    print(f"wrote {path}.json and .md")
    return 0


def rate(row: dict[str, Any], way: str) -> float:
    return float(row["bytes"] / row[f"{way}_us"] / 1e6)


def measured(samples: int, elements: int, tensors: int, dtype: torch.dtype, scan: bool) -> dict[str, Any]:
    """Microseconds of both ways."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    weights = torch.randn(samples, device=device)
    values = [torch.randn(samples, elements, device=device, dtype=dtype) for _ in range(tensors)]

    def plain(weights: Tensor, *values: Tensor) -> list[Tensor]:
        return [(value.float() * weights[:, None]).sum(0) for value in values]

    compiled = torch.compile(plain, dynamic=False)
    want = weights.double() @ values[0].double()
    got = weighted_sums(weights, values, False)[0]
    found: dict[str, Any] = {
        "samples": samples, "elements": elements, "tensors": tensors, "dtype": str(dtype).removeprefix("torch."),
        "bytes": samples * elements * tensors * dtype.itemsize + elements * tensors * 4,
        "inductor_us": 1e6 * seconds(lambda: compiled(weights, *values), device),
        "kernel_us": 1e6 * seconds(lambda: weighted_sums(weights, values, False), device),
        "error": float((got.double() - want).abs().max() / want.abs().max()),
    }  # fmt: skip
    if scan:
        found["scan"] = scanned(weights, values, dtype)
    return found


def scanned(weights: Tensor, values: Sequence[Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Constants of the kernel -> microseconds."""
    from psg_fx.ops.products import weighted_sum_kernels as kernels  # needs Triton

    found = {}
    sums = [torch.empty(value.shape[1], device="cuda") for value in values]
    for warps, rows, bytes_ in itertools.product((4, 8), (4, 8), (16, 32)):
        own = kernels.meta(dtype, len(values), False)
        own |= {"num_warps": warps, "ROWS": rows, "BLOCK": 32 * warps * bytes_ // dtype.itemsize}

        def run(own: dict[str, Any] = own) -> None:
            kernels.weighted_sum_kernel[kernels.grid(values, own)](*kernels.arguments(weights, values, sums), **own)

        found[f"{warps} warps, {rows} rows, {bytes_} bytes"] = 1e6 * seconds(run, weights.device)
    return found


def scans(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Other constants, the fastest first."""
    parts = []
    for row in rows:
        if "scan" in row:
            best = sorted(row["scan"].items(), key=lambda item: item[1])
            shown = [[name, f"{us:.1f}"] for name, us in [*best[:5], best[-1]]]
            named = f"### {row['samples']} × {row['elements']}, {row['tensors']} of {row['dtype']}"
            parts += [named, tabulate(shown, ["constants", "µs"], "github", disable_numparse=True)]
    return parts


if __name__ == "__main__":
    sys.exit(main())
