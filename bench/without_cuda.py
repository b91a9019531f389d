"""What steps would launch, move and take on a CUDA device, found out without one: `make cuda`.

    python bench/without_cuda.py [--models mlp,gpt] [--precisions float32,bfloat16] [--batches static,dynamic]
                                 [--steps norms,clipped_sum] [--again]

Every graph is captured on the CPU, planned and lowered by the table of a CUDA device, and compiled by inductor to
Triton, PTX and machine code for an H100 (sm_90; for every batch size, "dynamic", and of vmap to Triton alone: launches
and bytes are counted, kernels not compiled); nothing is timed.  In small sizes and float32 the generated code is also
executed, its kernels by triton's interpreter, and held against the graph that it was made of.

Needs `.venv-cuda` (torch with CUDA, triton; no driver).  Writes `bench/results/cuda-without-a-device.json` and `.md`
after each part, and goes on from there: a step whose numbers are there is passed over, unless told `--again`; what
failed is tried again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _results import RESULTS, keep, options, printed_by, written_by
from _sizes import BATCH, WIDE

NAME = "cuda-without-a-device"
PRECISIONS = ("float32", "bfloat16")
BATCHES = ("static", "dynamic")
OWN = ("ordinary", "grads", "norms", "clipped_sum", "mean_grad")
PEERS = ("vmap_grads", "vmap_norms", "vmap_clipped_sum")
TOLERANCE = 1e-5

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 3},
    "simplecnn": {"batch": 3, "image": 10, "width": 4, "hidden": 8},
    "gpt": {"batch": 2, "layers": 1, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 20},
    "encoder": {"batch": 3, "layers": 1, "width": 16, "heads": 2, "hidden": 16, "tokens": 5},
    "vit": {"batch": 3, "layers": 1, "width": 16, "heads": 2, "image": 8, "patch": 4},
    "lstm": {"batch": 3, "layers": 1, "width": 8, "hidden": 8, "tokens": 4, "vocabulary": 20},
    "resnet18gn": {"batch": 2, "width": 8, "groups": 4, "blocks": (1, 1), "image": 8},
}
SMALL |= {f"{name}-fused": SMALL[name] for name in ("lstm", "simplecnn", "resnet18gn")}
"""The models in sizes that the interpreter can bear; "-fused": with all kernels of psg_fx, asked for."""

LARGE: dict[str, dict[str, Any]] = {f"{name}-large": {"batch": BATCH, **sizes} for name, sizes in WIDE.items()}
"""What `bench/kernels.py` measures in bfloat16: of these that precision and a static batch alone."""


def main() -> int:
    args = arguments()
    if args.part:
        kind, *which = args.part[0].split()
        Path(args.part[1]).write_text(
            json.dumps({"compiled": compiled, "executed": executed}[kind](args.steps, *which))
        )
        return 0
    from no_device.page import page

    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def missing(part: str, steps: list[str]) -> list[str]:
        known = found.get(part, {})
        return [s for s in steps if args.again or "failure" in known.get(s, {"failure": "not tried"})]

    wanted = {part: left for part, steps in parts(args).items() if (left := missing(part, steps))}
    start, total, done = time.monotonic(), sum(map(len, wanted.values())), 0
    for number, (part, steps) in enumerate(wanted.items(), 1):
        spent = time.monotonic() - start
        left = f", about {spent / done * (total - done) / 60:.0f} min left" if done else ""
        print(f"== {number}/{len(wanted)} {part} ({spent / 60:.0f} min so far{left})", flush=True)
        found[part] = found.get(part, {}) | in_own_process(part, steps)
        done += len(steps)
        keep(NAME, found, *page(found))
    keep(NAME, found, *page(found))
    print(f"wrote {path} and .md")
    return int(not all(map(fine, found.values())))


def arguments() -> argparse.Namespace:
    parser = options(__doc__, tag=False)
    parser.add_argument("--models", default=",".join(SMALL), help=f"also {', '.join(LARGE)}")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--batches", default=",".join(BATCHES))
    parser.add_argument("--steps", default=",".join((*OWN, *PEERS)))
    parser.add_argument("--again", action="store_true", help="also steps whose numbers are there")
    parser.add_argument("--part", nargs=2, metavar=("PART", "FILE"), help="one part into a file, in this process")
    args = parser.parse_args()
    args.steps = args.steps.split(",")
    return args


def parts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Part -> its steps, the quick ones first."""
    models = args.models.split(",")
    found = {f"executed {model}": [s for s in args.steps if s in OWN] for model in models if model in SMALL}
    for batch in args.batches.split(","):
        for precision in args.precisions.split(","):
            for model in models:
                if model in SMALL or (precision, batch) == ("bfloat16", "static"):
                    peers = batch == "static" and not model.endswith("-fused")
                    steps = [s for s in args.steps if s in OWN or peers]
                    found[f"compiled {model} {precision} {batch}"] = steps
    return found


def in_own_process(part: str, steps: list[str]) -> dict[str, Any]:
    """Step -> its numbers, or why there are none."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        found = written_by([__file__, "--steps", ",".join(steps), "--part", part, out.name], Path(out.name))
    return dict.fromkeys(steps, found) if "failure" in found else found


def fine(steps: dict[str, Any]) -> bool:
    """Whether nothing of psg_fx's failed, and what was executed answered rightly."""
    return all(("failure" not in s or name in PEERS) and s.get("error", 0.0) <= TOLERANCE for name, s in steps.items())


def compiled(steps: list[str], model: str, precision: str, batch: str) -> dict[str, Any]:
    """Step -> its numbers."""
    from no_device.count import counted
    from no_device.retarget import compiled_for_cuda

    def run(name: str, step: Callable[[], object]) -> dict[str, Any]:
        return counted(compiled_for_cuda(step, binaries=batch == "static" and name in OWN))

    return each(steps, model, LARGE.get(model, {}), precision, batch, run)


def executed(steps: list[str], model: str) -> dict[str, Any]:
    """Step -> launches, outputs, and the worst relative error of an output."""
    from no_device import interpret
    from no_device.retarget import compiled_for_cuda

    def run(name: str, step: Callable[[], object]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            interpret.keep_for(Path(file.name), compiled_for_cuda(step, run=True, binaries=False))
            own = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
            return printed_by(interpret.__file__, file.name, **own)

    return each(steps, model, SMALL[model], "float32", "static", run)


def each(
    steps: list[str], model: str, sizes: dict[str, Any], precision: str, batch: str,
    what: Callable[[str, Callable[[], object]], Any],
) -> dict[str, Any]:  # fmt: skip
    """Something of these steps of a model, or why it failed."""
    import torch
    from no_device.steps import steps_of

    torch.set_num_threads(1)
    made, found = steps_of(model, sizes, batch == "dynamic"), {}
    for name in steps:
        start = time.monotonic()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            try:
                found[name] = what(name, made[name]())
            except Exception as error:
                found[name] = {"failure": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        print(f"   {name}: {found[name].get('failure', 'done')}, {time.monotonic() - start:.0f} s", flush=True)
        torch._dynamo.reset()
    return found


if __name__ == "__main__":
    sys.exit(main())
