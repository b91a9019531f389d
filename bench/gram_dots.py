"""Inner products of Gram matrices on a CUDA device: by the kernel of psg_fx, and by two products and their dot.

    python bench/gram_dots.py [--tag NAME]

Both are replayed as CUDA graphs. The products pad columns to multiples of eight, as steps do (`passes/widen.py`); the
answer of each is compared with float64. Writes `bench/results/gram_dots-<tag>.json` and `.md`.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from _results import keep_of_device, options, require_cuda
from tabulate import tabulate
from torch import Tensor

from psg_fx.measure.calibrate import seconds
from psg_fx.ops.products.gram_products import gram_dots

SHAPES = (
    (16, 128, 768, 768), (16, 128, 768, 3072), (16, 197, 768, 768), (16, 197, 768, 2304), (16, 197, 768, 3072),
    (16, 256, 768, 768), (16, 256, 768, 3072), (16, 512, 768, 768), (16, 512, 768, 3072), (64, 197, 768, 3072),
    (128, 16, 2304, 256), (128, 64, 576, 64), (128, 256, 576, 64),
)  # fmt: skip
"""Samples, positions, elements of a row of x and of ȳ: layers of transformers, and of a ResNet on 32×32."""

HEADERS = ["samples", "positions", "x", "ȳ", "products, µs", "kernel, µs", "ratio", "error", "of products"]


def main() -> int:
    args = options(__doc__).parse_args()
    require_cuda()
    rows = [measured(*shape) for shape in SHAPES]
    shown = [
        [*shape, f"{r['products_us']:.1f}", f"{r['kernel_us']:.1f}", f"{r['kernel_us'] / r['products_us']:.2f}",
         f"{r['kernel_error']:.0e}", f"{r['products_error']:.0e}"]
        for shape, r in zip(SHAPES, rows, strict=True)
    ]  # fmt: skip
    path = keep_of_device(
        "gram_dots", args.tag, "Inner products of Gram matrices", {"rows": rows},
        "bfloat16, replayed as CUDA graphs; errors relative to float64.",
        tabulate(shown, HEADERS, "github", disable_numparse=True),
    )  # fmt: skip
    print(f"wrote {path}.json and .md")
    return 0


def measured(samples: int, positions: int, wide: int, other: int) -> dict[str, float]:
    """Microseconds and relative errors of both ways."""
    torch.manual_seed(0)
    x, y = (torch.randn(samples, positions, n, device="cuda", dtype=torch.bfloat16) for n in (wide, other))
    dot = torch.compile(lambda a, b: (a * b).sum((1, 2)), dynamic=True)

    def products() -> Tensor:
        found: Tensor = dot(gram(x), gram(y))
        return found

    want = ((x.double() @ x.double().mT) * (y.double() @ y.double().mT)).sum((1, 2))
    ways = {"products": products, "kernel": lambda: gram_dots(x, y)}
    found: dict[str, float] = {"samples": samples, "positions": positions, "x": wide, "y": other}
    for name, way in ways.items():
        found[f"{name}_us"] = 1e6 * seconds(way, torch.device("cuda"))
        found[f"{name}_error"] = float(((way().double() - want) / want).abs().max())
    return found


def gram(x: Tensor) -> Tensor:
    """[b, t, i] -> [b, t, t'] in float32."""
    positions = x.shape[1]
    right = F.pad(x.mT, (0, -positions % 8))
    return torch.bmm(x, right, out_dtype=torch.float32)[:, :, :positions]


if __name__ == "__main__":
    sys.exit(main())
