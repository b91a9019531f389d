"""Finds mislabelled digits by per-sample gradient norms, with every step compiled by psg_fx.

A wrong label pulls the model away from what the rest of the data says, so its gradient stays large when the others
have become small. The norm of each sample's gradient comes out of the step that trains, without a second pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import psg_fx
from psg_fx.benchmarking.benchmark import benchmark

try:
    from psg_fx.demo import digits, plot
except ImportError as error:
    sys.exit(f"the demo needs scikit-learn and matplotlib: pip install '.[demo]' in a checkout ({error})")

BATCH, WIDTH = 128, 150


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, ranks, shows the graph, times, draws."""
    args = _arguments(argv)
    print(f"psg_fx {psg_fx.__version__}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"threads {torch.get_num_threads()}, seed {args.seed}, backend {args.backend}")
    data = digits.corrupted_digits(args.fraction, args.seed)
    torch.manual_seed(args.seed)
    model = digits.DigitsCNN()
    train(model, data, epochs=args.epochs, seed=args.seed, backend=args.backend)
    norms, step = score(model, data, backend=args.backend)
    order = norms.argsort(descending=True)
    report(data, order)
    show_graph(step)
    if not args.no_timing:
        timing(model, data, backend=args.backend)
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "wrong_labels.png"
    plot.save(picture, data, order, norms)
    print(f"\nwrote {picture}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m psg_fx.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training digits (default 8)")
    parser.add_argument("--fraction", type=float, default=0.05, help="share of labels made wrong (default 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="decides the split, the wrong labels, weights and batches")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    parser.add_argument("--no-timing", action="store_true", help="skip the timing table")
    folder = Path("demo-output")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help=f"for the picture (default {folder})")
    return parser.parse_args(argv)


def train(model: torch.nn.Module, data: digits.Digits, *, epochs: int, seed: int, backend: str) -> None:
    """SGD on the given labels; the mean gradient and every sample's norm come from one compiled step."""
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=[psg_fx.MeanGrad(), psg_fx.Norms()], backend=backend, dynamic=False
    )
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    count = len(data.given)
    wrong = int(data.corrupted.sum())
    print(f"\ntraining on {count} digits, {wrong} of them with a wrong label; {len(data.test_labels)} for testing")
    start = time.perf_counter()
    step(data.images[:BATCH], data.given[:BATCH])
    print(f"captured and compiled forward, backward, mean gradient and norms in {time.perf_counter() - start:.1f} s")
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        total, clean, bad = 0.0, [], []
        for rows in torch.randperm(count, generator=draw).split(BATCH):
            out = step(data.images[rows], data.given[rows])
            for name, p in params.items():
                p.grad = out.mean_grad[name]
            optimizer.step()
            total += out.losses.sum().item()
            clean.append(out.norms[~data.corrupted[rows]])
            bad.append(out.norms[data.corrupted[rows]])
        with torch.no_grad():
            right = (model(data.test_images).argmax(1) == data.test_labels).float().mean().item()
        print(
            f"epoch {epoch:2d}   loss {total / count:.3f}   test accuracy {right:.1%}   median norm: right labels "
            f"{_median(clean):5.2f}, wrong labels {_median(bad):5.2f}   {time.perf_counter() - start:.1f} s"
        )


def _median(parts: list[Tensor]) -> float:
    return torch.cat(parts).median().item()


def score(model: torch.nn.Module, data: digits.Digits, *, backend: str) -> tuple[Tensor, psg_fx.PerSampleModule]:
    """The norm of each training sample's gradient, `[N]`, and the step that gave it."""
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend=backend, dynamic=False)
    batches = zip(data.images.split(BATCH), data.given.split(BATCH), strict=True)
    return torch.cat([step(images, labels).norms for images, labels in batches]), step


def report(data: digits.Digits, order: Tensor) -> None:
    """How many wrong labels are among the samples with the largest norms, against chance."""
    wrong, count = int(data.corrupted.sum()), len(order)
    print("\nsamples ranked by the norm of their gradient:")
    for k in (wrong, 2 * wrong):
        found = int(data.corrupted[order[:k]].sum())
        print(
            f"  top {k:4d} of {count}: {found:3d} of the {wrong} wrong labels ({found / wrong:.0%}); "
            f"by chance {wrong * k / count:.1f} ({k / count:.0%})"
        )


def show_graph(step: psg_fx.PerSampleModule, lines: int = 10) -> None:
    """The plan, and the head and tail of the graph that was compiled."""
    print("\nwhat was compiled for the norms (step.explain()):\n")
    print(step.explain())
    with contextlib.redirect_stdout(io.StringIO()) as caught:
        step.print_graph()
    text = caught.getvalue().strip().splitlines()
    if len(text) > 2 * lines:
        text = [*text[:lines], f"        ... {len(text) - 2 * lines} more lines ...", *text[-lines:]]
    text = [line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in text]
    print("\nhow its graph begins and ends (step.print_graph()):\n\n" + "\n".join(text))


def timing(model: torch.nn.Module, data: digits.Digits, *, backend: str) -> None:
    """Compiled, eager and vmap side by side for this model."""
    print("\ntiming one step, all contenders in turn on the same batch (compiling: most of a minute; ^C skips it)")
    try:
        found = benchmark(
            model,
            F.cross_entropy,
            data.images[:BATCH],
            data.given[:BATCH],
            quantities=("grads", "norms"),
            contenders=["ordinary-*", "vmap/grads", "vmap-compiled/grads", "psg-*"],
            backend=backend,
            min_run_time=0.6,
            rounds=3,
        )
    except KeyboardInterrupt:
        print("\nskipped")
        return
    print(f"\n{found}")


if __name__ == "__main__":
    sys.exit(main())
