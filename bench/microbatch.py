"""Clipped sums of large batches in parts: the memory is that of one part.

    python bench/microbatch.py [--batch 4096] [--size 32] [--tag NAME] [--quick]

The GPT of the zoo, its batch once as one part and then in many; every run is a process of its own, since the peak of
resident memory is a process's. Writes `bench/results/microbatch-<tag>.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

from _results import about, device_tag, keep, options, printed_by

import psg_fx
from psg_fx import zoo

SMALL = {"layers": 2, "width": 64, "heads": 4, "tokens": 64, "vocabulary": 500}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--size", type=int, default=32, help="samples in one part (default 32)")
    parser.add_argument("--quick", action="store_true", help="a small GPT")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, args.size, args.quick)))
        return
    rows = [in_own_process(batch, args) for batch in (args.size, args.batch)]
    for row in rows:
        print(f"B={row['batch']}: peak {row['peak_bytes'] / 1e6:.0f} MB, {row['seconds']:.1f} s a batch")
    data = {"size": args.size, "rows": rows, "environment": about()}
    path = keep(f"microbatch-{args.tag or device_tag('cpu')}", data)
    print(f"wrote {path}.json")


def in_own_process(batch: int, args: argparse.Namespace) -> dict[str, Any]:
    quick = ["--quick"] if args.quick else []
    return printed_by(__file__, "--one", str(batch), "--size", str(args.size), *quick)


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
