"""Products on a CPU: by the BLAS of torch, by oneDNN, and by the kernels of psg_fx in C++, each after other products
so that caches are as in a step.

    python bench/kernels_in_cpp.py [--tag NAME] [--rounds N]

Gradients x[n, t, i]ᵀ ȳ[n, t, o] of samples by `bmm`, and with the sums of their squares in a second pass; by the kernel
in one (`tile-matmul`), rounded (`tile-matmul-bf16`), and the sums alone (`tile-squares`); of one position also by a
broadcast multiplication (`multiply`). Inner products of Gram matrices of positions by two `bmm` and a dot, and by the
kernel (`gram-dot`). Linear layers of [rows, in] and their two gradients by `addmm` and `mm`, by oneDNN
(`ops/products/by_onednn.py`), which copies what is transposed for the weight's gradient, and, where there is one, by a
matrix unit (`in_parts.py`). With one, also convolutions of step one and their gradients, those of weights for each
sample and summed, by torch (oneDNN) and by the unit (`convolutions_in_parts.py`). Medians, in turns; answers are
compared with float64 first.  What is kept is written to memory that has been used before.
Writes `bench/results/kernels-in-cpp-<tag>.json` and `.md`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median

import torch
from _results import about, bullets, device_tag, keep, options
from tabulate import tabulate
from torch import Tensor

from psg_fx.blocks import Memory
from psg_fx.ops.define import of_torch_alone
from psg_fx.ops.products import by_onednn, convolutions_in_parts, gram_products, in_parts, products_here
from psg_fx.ops.products.matrix_product import by_torch
from psg_fx.torch_private import native
from psg_fx.torch_private.compiler import allocating
from psg_fx.torch_private.matrix_unit import has_matrix_unit

SHAPES = {
    "GPT 4×256: up": (8, 128, 256, 1024), "down": (8, 128, 1024, 256), "q, k, v": (8, 128, 256, 768),
    "out": (8, 128, 256, 256), "ViT 6×192: up": (16, 65, 192, 768), "ViT 6×192: down": (16, 65, 768, 192),
    "LSTM 128": (32, 32, 128, 512), "patches of ResNet18's images": (16, 256, 147, 64),
    "patches of its sixth block": (8, 4, 256, 2304), "of its eighth": (16, 1, 512, 4608),
}  # fmt: skip
"""Samples, positions, elements of a row of x and of ȳ."""

ERRORS = {"tile-matmul-bf16": 2**-7, "bmm, squares": 5e-4}
"""Relative ones of a sum of squares, where more than 1e-5 is to be expected: `vector_norm` of 600,000 numbers is off by
1.5e-5, of 2.4 million by 2e-4.
"""

WAYS = [
    "bmm", "bmm, squares", "multiply", "tile-matmul", "tile-matmul-bf16", "tile-squares", "two Gram matrices",
    "gram-dot",
]  # fmt: skip

LAYERS = {
    "GPT 4×256: up": (1024, 256, 1024), "down": (1024, 1024, 256), "q, k, v": (1024, 256, 768),
    "out": (1024, 256, 256), "ViT 6×192: up": (1040, 192, 768), "ViT 6×192: down": (1040, 768, 192),
    "LSTM 128": (1024, 128, 512), "SimpleCNN: first": (64, 9216, 128),
}  # fmt: skip
"""Rows, elements of a row of x and of y."""

CONVOLUTIONS = {
    "SimpleCNN: second": (64, 32, 64, 26, 3, 0), "images 32²": (16, 64, 64, 32, 3, 1), "16²": (16, 128, 128, 16, 3, 1),
    "8²": (16, 256, 256, 8, 3, 1), "images 224²: 56²": (4, 64, 64, 56, 3, 1), "28²": (4, 128, 128, 28, 3, 1),
    "16 channels, 32²": (64, 16, 16, 32, 3, 1), "one place, 16²": (16, 256, 256, 16, 1, 0),
}  # fmt: skip
"""Samples, channels of x and of y, rows and columns of x and of the kernel, zeros around."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of each way (default 60)")
    args = parser.parse_args()
    Memory(keep=False)  # the C library keeps freed memory, as it does beside steps
    of_the_unit = [in_parts.LIBRARY, convolutions_in_parts.CONVOLUTION, convolutions_in_parts.WEIGHT_GRADIENTS]
    for name in ("products", "gram_dots", *(of_the_unit if has_matrix_unit() else [])):
        native.begin(name)
    native.finish()
    rows = {name: measured(shape, args.rounds) for name, shape in SHAPES.items()}
    shown = [
        [name, " × ".join(map(str, SHAPES[name])), *(f"{row[way]:.2f}" if way in row else "–" for way in WAYS)]
        for name, row in rows.items()
    ]
    layers = {name: layer(shape, args.rounds) for name, shape in LAYERS.items()}
    of_layers = [
        [name, " × ".join(map(str, LAYERS[name])), *(f"{ms:.2f}" for ms in row.values())]
        for name, row in layers.items()
    ]
    headers = list(next(iter(layers.values())))
    images = (
        {name: convolution(shape, args.rounds) for name, shape in CONVOLUTIONS.items()} if has_matrix_unit() else {}
    )
    of_images = [[name, " × ".join(map(str, CONVOLUTIONS[name])), *row.values()] for name, row in images.items()]
    of_convolutions = ["layer", "n × c × o × space × kernel × zeros", *next(iter(images.values()), {})]
    there = about("cpu")
    path = keep(
        f"kernels-in-cpp-{args.tag or device_tag('cpu')}",
        {"environment": there, "milliseconds": rows, "layers": layers, "convolutions": images},
        "# Products on a CPU", bullets(there), "Milliseconds, float32; `bench/kernels_in_cpp.py` says of what.",
        "## Gradients of samples", tabulate(shown, ["layer", "n × t × i × o", *WAYS], "github", disable_numparse=True),
        "## Layers", tabulate(of_layers, ["layer", "rows × in × out", *headers], "github", disable_numparse=True),
        *(["## Convolutions", tabulate(of_images, of_convolutions, "github", floatfmt=".2f")] if images else []),
    )  # fmt: skip
    print(f"wrote {path}.json and .md")


def measured(shape: tuple[int, int, int, int], rounds: int) -> dict[str, float]:
    """Way -> median milliseconds."""
    n, t, i, o = shape
    torch.manual_seed(0)
    x, y = torch.randn(n, t, i), torch.randn(n, t, o)
    product, halves = torch.zeros(n, i, o), torch.zeros(n, i, o, dtype=torch.bfloat16)  # memory that has been touched

    def kept(rounded: bool) -> Tensor:
        with allocating(lambda size, stride, dtype: halves if rounded else product):
            return products_here.products(x, y, rounded=rounded)[1]

    ways: dict[str, Callable[[], Tensor]] = {
        "bmm": lambda: torch.bmm(x.mT, y, out=product).flatten(),
        "bmm, squares": lambda: torch.linalg.vector_norm(torch.bmm(x.mT, y, out=product), dim=(1, 2)).square(),
        "tile-matmul": lambda: kept(False),
        "tile-matmul-bf16": lambda: kept(True),
        "tile-squares": lambda: products_here.squares(x, y),
        "two Gram matrices": lambda: torch.linalg.vecdot(torch.bmm(x, x.mT).flatten(1), torch.bmm(y, y.mT).flatten(1)),
        "gram-dot": lambda: gram_products.gram_dots(x, y),
    }
    right = (x.double().mT @ y.double()).square().sum((1, 2))
    for way, run in ways.items():
        found = run().double()
        assert way == "bmm" or ((found - right).abs() <= ERRORS.get(way, 1e-5) * right).all(), way
    if t == 1:
        ways["multiply"] = lambda: torch.mul(x.mT, y, out=product)
    return in_turns(ways, rounds)


def layer(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Way -> median milliseconds."""
    rows, i, o = shape
    torch.manual_seed(0)
    x, dy, w, bias = torch.randn(rows, i), torch.randn(rows, o), torch.randn(o, i), torch.randn(o)
    products = {"y": (x, w.t(), bias), "gradient of x": (dy, w, None), "gradient of W": (dy.t(), x, None)}
    ways: dict[str, Callable[[], Tensor]] = {}
    for what, operands in products.items():
        a, b, c = (None if value is None else value.double() for value in operands)
        right = by_torch(a, b, c)
        for by, op in OPS.items():
            ways[f"{what}, {by}"] = functools.partial(op, *operands)
            assert (op(*operands).double() - right).abs().max() <= 1e-5 * right.abs().max(), (what, by)
    return in_turns(ways, rounds)


def convolution(shape: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Way -> median milliseconds."""
    n, c, o, side, k, zeros = shape
    torch.manual_seed(0)
    x, w, window = torch.randn(n, c, side, side), torch.randn(o, c, k, k), ([zeros] * 2, [1, 1])
    dy = torch.randn(n, o, *[side + 2 * zeros - k + 1] * 2)
    flat = [value.reshape(1, -1, *value.shape[2:]) for value in (dy, x)]
    convolved, gradients = convolutions_in_parts.convolution_in_parts, convolutions_in_parts.weight_gradients_in_parts
    asked = {
        "y": (convolved, (x, w, None, *window, False)), "gradient of x": (convolved, (dy, w, None, *window, True)),
        "gradients of W": (gradients, (*flat, n, [k, k], *window)), "summed": (gradients, (dy, x, 1, [k, k], *window)),
    }  # fmt: skip
    ways: dict[str, Callable[[], Tensor]] = {}
    for what, (op, arguments) in asked.items():
        right = of_torch_alone(op)(*(value.double() if isinstance(value, Tensor) else value for value in arguments))
        for by, run in {"oneDNN": of_torch_alone(op), "unit": op}.items():
            ways[f"{what}, {by}"] = functools.partial(run, *arguments)
            assert (run(*arguments).double() - right).abs().max() <= 1e-5 * right.abs().max(), (what, by)
    return in_turns(ways, rounds)


OPS: dict[str, Callable[..., Tensor]] = {"BLAS": by_torch, "oneDNN": by_onednn.by_onednn}
if has_matrix_unit():
    OPS["unit"] = in_parts.in_parts


def in_turns(ways: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Way -> median milliseconds, after another product each."""
    others = torch.randn(8, 512, 512)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            torch.bmm(others, others)
            start = time.perf_counter()
            ways[way]()
            times[way].append(1e3 * (time.perf_counter() - start))
    return {way: median(found) for way, found in times.items()}


if __name__ == "__main__":
    main()
