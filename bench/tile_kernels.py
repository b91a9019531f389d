"""The kernels of psg_fx without a device: a part of `make cuda`.

    python bench/tile_kernels.py

Compiled for sm_80 and sm_90, and executed by triton's interpreter, alone against products in float64 and in whole
steps; nothing is timed.
Needs `.venv-cuda` (triton; no driver).  Writes `bench/results/tile-kernels-without-a-device.json` and `.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _results import bullets, keep, options, printed_by
from tabulate import tabulate

NAME = "tile-kernels-without-a-device"
TOLERANCE = 1e-5
UNITS = 4.0
"""Of the dtype of a product: its rounding, and that of its sums in float32."""


def main() -> int:
    options(__doc__, tag=False).parse_args()
    import torch
    import triton

    script, path = str(Path(__file__).parent / "no_device/tiles.py"), {"PYTHONPATH": str(Path(__file__).parent)}
    compiled = printed_by(script, "compiled", **path)
    executed = printed_by(script, "executed", **path, TRITON_INTERPRET="1")
    steps = printed_by(script, "steps", **path)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    rows = [
        [name, f"{e['error']:.1e}" if e["error"] else "", f"{e['product']:.2f}" if "product" in e else ""]
        for name, e in executed.items()
    ]
    said = {name: ", ".join(f"{k} {n}" for k, n in c["instructions"].items() if n) for name, c in compiled.items()}
    used = [[name, c["registers"], c["spilled"], c["shared"], said[name]] for name, c in compiled.items()]
    ran = [[name, len(s["kernels"]), s["launches"], f"{s['error']:.1e}"] for name, s in steps.items()]
    keep(
        NAME, {"versions": versions, "compiled": compiled, "executed": executed, "steps": steps},
        "# The kernels of psg_fx without a device", bullets(versions), "Nothing was timed.",
        "## Compiled", "Registers and bytes of stack a thread (where registers are spilled), shared bytes a block.",
        tabulate(used, ["kernel", "registers", "stack", "shared", "instructions in PTX"], "github"),
        "## Executed by the interpreter",
        "Samples x rows x positions x columns; the relative error of a squared norm, and that of the product in units "
        "of its dtype. Of cells, rows x units: the largest error of what is written, in units of its dtype.",
        tabulate(rows, ["operands", "squared norm", "product"], "github", disable_numparse=True),
        "## Steps of small models", "Planned as if products cost nothing, so that the kernels are in them; float32.",
        tabulate(ran, ["step", "kernels of psg_fx", "launches", "worst error"], "github", disable_numparse=True),
    )  # fmt: skip
    executed |= steps
    wrong = [name for name, e in executed.items() if not (e["error"] <= TOLERANCE and e.get("product", 0) <= UNITS)]
    spilling = [name for name, c in compiled.items() if c["spilled"]]
    print(f"wrote {NAME}; wrong: {wrong or 'none'}; spilling: {spilling or 'none'}")
    return int(bool(wrong or spilling))


if __name__ == "__main__":
    sys.exit(main())
