"""Clipped sums of large batches in parts: the memory is that of one part.

    python bench/microbatch.py [--batch 4096] [--size 32] [--tag NAME] [--quick]

The GPT of the zoo, its batch once as one part and then in many; every run is a process of its own, since the peak of
resident memory is a process's. Writes `bench/results/microbatch-<tag>.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compare import device_tag

import psg_fx
from psg_fx import zoo
from psg_fx.machine import environment

RESULTS = Path(__file__).parent / "results"
SMALL = {"layers": 2, "width": 64, "heads": 4, "tokens": 64, "vocabulary": 500}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--size", type=int, default=32, help="samples in one part (default 32)")
    parser.add_argument("--tag", help="names the result file (default: the device)")
    parser.add_argument("--quick", action="store_true", help="a small GPT")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, args.size, args.quick)))
        return
    rows = [in_own_process(batch, args) for batch in (args.size, args.batch)]
    for row in rows:
        print(f"B={row['batch']}: peak {row['peak_bytes'] / 1e6:.0f} MB, {row['seconds']:.1f} s a batch")
    data = {"size": args.size, "rows": rows, "environment": environment(torch.device("cpu"))}
    out = RESULTS / f"microbatch-{args.tag or device_tag('cpu')}.json"
    out.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {out}")


def in_own_process(batch: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(batch), "--size", str(args.size)]
    command += ["--quick"] if args.quick else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(batch: int, size: int, quick: bool) -> dict[str, Any]:
    """Peak resident bytes of the process, compilation included, and seconds for one batch."""
    ex = zoo.example("gpt", batch, **(SMALL if quick else {}))
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=[psg_fx.ClippedSum(1.0)])
    run = psg_fx.microbatch(step, size, progress=True)
    run(ex.inputs[:size], ex.targets[:size])
    start = time.perf_counter()
    run(ex.inputs, ex.targets)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"batch": batch, "peak_bytes": peak, "seconds": seconds}


if __name__ == "__main__":
    main()
