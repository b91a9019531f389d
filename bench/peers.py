"""psg_fx beside its peers: Opacus (hooks, ghost clipping), BackPACK, `call_for_per_sample_grads`, vmap, JAX, fastDP.

    python bench/peers.py [--models simplecnn,gpt] [--tag NAME] [--quick]

The models are those of `bench/compare.py`, each in a process of its own, all contenders side by side in it, every
answer checked before it is timed. Writes `bench/results/peers-<tag>.json`, `.md` and `.png`. All five models take
about half an hour, most of it compilation. A library that is not installed says so: pip install '.[bench,jax]'.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _results import device_tag, keep
from compare import RUNS, chosen, in_own_process, introduction, options, read, tables

from psg_fx.benchmarking.report import BenchmarkReport, BenchmarkRow

LIBRARIES = ("opacus", "backpack-for-pytorch", "jax", "fastDP")
NAMES = {
    "psg-compiled": "psg_fx",
    "psg-reused": "psg_fx, outputs reused",
    "psg-rounded": "psg_fx, kept in bfloat16",
    "psg-eager": "psg_fx, not compiled",
    "vmap": "vmap(grad)",
    "vmap-compiled": "vmap(grad), compiled",
    "opacus-hooks": "Opacus, hooks",
    "opacus-ghost": "Opacus, ghost clipping",
    "expanded-weights": "call_for_per_sample_grads",
    "backpack": "BackPACK, BatchGrad",
    "backpack-norms": "BackPACK, BatchL2Grad",
    "jax": "JAX, jit(vmap(grad))",
    "fastdp": "fastDP, book-keeping",
}
"""Contender -> what it is called in the plot, in the order of its bars."""

TITLES = {"grads": "gradients", "norms": "norms", "clipped_sum": "clipped sum"}
OURS, OTHERS, FAILED = "#c0392b", "#7f8c9b", "#a04000"


def main() -> int:
    args = arguments()
    results = {name: in_own_process(name, args) for name in chosen(args)}
    data = {"libraries": libraries(), "results": {n: r for n, r in results.items() if "failure" not in r}}
    head = introduction("psg_fx beside its peers", "peers", results, libraries())
    path = keep(f"peers-{args.tag or device_tag(args.device)}", data, *head, *tables(results))
    reports = {name: read(result) for name, result in data["results"].items()}
    if reports:
        plot(reports, path.with_suffix(".png"))
    print(f"\nwrote {path}.json, .md and .png")
    return int(any("failure" in r for r in results.values()))


def arguments() -> argparse.Namespace:
    args = options(__doc__).parse_args()
    args.contenders = ",".join(["ordinary*", *NAMES])
    return args


def libraries() -> dict[str, str]:
    """Versions of the libraries that were asked."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def plot(reports: dict[str, BenchmarkReport], path: Path) -> None:
    """A panel for each model: time relative to the fastest ordinary step; who does not answer says why."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(q, name) for q in TITLES for name in NAMES if any(r.row(name, q) for r in reports.values())]
    size = (3.4 * len(reports) + 2.2, 0.24 * (len(bars) + len(TITLES)) + 1.2)
    figure, axes = pyplot.subplots(1, len(reports), figsize=size, sharey=True, constrained_layout=True, squeeze=False)
    places, labels, place = [], [], 0.0
    for index, (quantity, name) in enumerate(bars):
        if index and bars[index - 1][0] != quantity:
            place += 1
        places.append(place)
        labels.append(f"{TITLES[quantity]}: {NAMES[name]}")
        place += 1
    for panel, (model, report) in zip(axes[0], reports.items(), strict=True):
        for y, (quantity, name) in zip(places, bars, strict=True):
            draw(panel, y, report.row(name, quantity))
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_title(RUNS[model].title, fontsize=9)
        panel.set_xlabel("time / ordinary step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(axis="x", alpha=0.3)
        low, high = panel.get_xlim()
        low, high = min(low, 0.4), max(high, 2.5) * 1.6
        ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= high]
        panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
        panel.set_xticks([], minor=True)
        panel.set_xlim(low, high)
    axes[0][0].set_yticks(places, labels)
    axes[0][0].invert_yaxis()
    figure.savefig(path, dpi=110)


def draw(panel: Any, y: float, row: BenchmarkRow | None) -> None:
    """One bar with its number, or the reason why there is none."""
    if row is None:
        return
    if row.ratio is None:
        reason = (row.failure or "not timed").split(": ", 1)[-1]
        text = reason if len(reason) <= 52 else reason[:51] + "…"
        panel.text(0.02, y, text, transform=panel.get_yaxis_transform(), va="center", fontsize=5.5, color=FAILED)
        return
    panel.barh(y, row.ratio, color=OURS if row.contender.startswith("psg") else OTHERS, height=0.75)
    panel.text(
        row.ratio, y, f" {row.ratio:.2f}" if row.ratio >= 0.1 else f" {row.ratio:.1g}", va="center", fontsize=6.5
    )


if __name__ == "__main__":
    sys.exit(main())
