"""The demo's picture: the samples with the largest gradients, and how soon the wrong labels turn up."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec
from torch import Tensor

from psg_fx.demo.digits import Digits

WRONG, RIGHT, INK = "#d1495b", "#b8bfc6", "#22313f"
ROWS, COLUMNS = 4, 10


def recall(corrupted_in_order: Tensor) -> Tensor:
    """Share of the corrupted samples among the first n, for n = 0..N: `[N]` of bool -> `[N + 1]`."""
    found = torch.cat([torch.zeros(1), corrupted_in_order.float().cumsum(0)])
    return found / corrupted_in_order.sum().clamp(min=1)


def save(path: Path, data: Digits, order: Tensor, norms: Tensor) -> None:
    """Draws the picture; `order` `[N]` ranks the samples by falling norm `[N]`."""
    figure = plt.figure(figsize=(15, 6.2), facecolor="white")
    whole = GridSpec(1, 2, figure=figure, width_ratios=[2.35, 1], left=0.02, right=0.975, top=0.84, bottom=0.11)
    grid = whole[0].subgridspec(ROWS, COLUMNS, hspace=0.62, wspace=0.18)
    shown = order[: ROWS * COLUMNS].tolist()
    for place, sample in enumerate(shown):
        _digit(figure.add_subplot(grid[place // COLUMNS, place % COLUMNS]), data, sample)
    _curve(figure.add_subplot(whole[1]), data.corrupted[order])
    wrong = int(data.corrupted[order[: len(shown)]].sum())
    figure.text(0.02, 0.95, f"The {len(shown)} training digits with the largest gradients", fontsize=15, color=INK)
    figure.text(
        0.02,
        0.905,
        f"framed: the label had been made wrong ({wrong} of {len(shown)}).  Norms fall from "
        f"{norms[shown[0]]:.1f} to {norms[shown[-1]]:.1f}; the median of all is {norms.median():.2g}.",
        fontsize=10.5,
        color="#5b6770",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _digit(axes: Axes, data: Digits, sample: int) -> None:
    wrong = bool(data.corrupted[sample])
    axes.imshow(data.images[sample, 0].numpy(), cmap="gray_r", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=WRONG if wrong else RIGHT, linewidth=3 if wrong else 1)
    given, true = int(data.given[sample]), int(data.true[sample])
    text = f"given {given}, is {true}" if wrong else f"given {given}"
    axes.set_xlabel(text, fontsize=9, color=WRONG if wrong else INK, labelpad=3)


def _curve(axes: Axes, corrupted: Tensor) -> None:
    total = len(corrupted)
    count = int(corrupted.sum())
    found = recall(corrupted)
    share = torch.arange(total + 1) / total
    axes.plot(share, found, color=WRONG, linewidth=2.4, label="by gradient norm")
    axes.plot([0, 1], [0, 1], color=RIGHT, linewidth=1.6, linestyle="--", label="by chance")
    for times in (1, 2):
        x, y = times * count / total, float(found[min(times * count, total)])
        axes.plot([x], [y], "o", color=WRONG, markersize=7)
        axes.annotate(
            f"{y:.0%} in the first {times * count}", (x, y), xytext=(10, -12), textcoords="offset points", fontsize=10
        )
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share of the training set looked at", ylabel="wrong labels found")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(f"{count} of {total} labels are wrong", fontsize=12, color=INK, loc="left")
