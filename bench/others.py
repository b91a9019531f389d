"""Steps of models that other libraries define, as they define them, beside ordinary training steps.

    python bench/others.py [--models resnet50,llama] [--seconds 3] [--tag NAME]

Image classifiers of torchvision and timm, text models of transformers, and layers of torch put together: none is in
psg_fx, in `compare.py`, or among what the planner's rates were fitted on. Random weights, `eval()` mode: batch norm on
its running statistics, no dropout. Every model has a process of its own, where answers are compared first, and all
contenders run in interleaved rounds. Writes `bench/results/others-<tag>.json` and `.md`, where other models that the
same machine and versions have measured stay. An hour; keep the machine otherwise idle.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.nn.functional as F
from _results import about, bullets, device_tag, keep, kept, options, written_by
from compare import ORDINARY, fastest, read
from tabulate import tabulate
from torch import Tensor, nn

from psg_fx.benchmarking.benchmark import benchmark
from psg_fx.benchmarking.report import BenchmarkReport
from psg_fx.zoo import token_cross_entropy

CLASSES, WORDS = 100, 1000
TEXT = {"vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


@dataclass(frozen=True)
class Example:
    """make: the model.  shape: of one sample of pixels or numbers; of words, (tokens,)."""

    title: str
    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    loss_fn: Callable[..., Tensor] = F.cross_entropy

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        if len(self.shape) == 1:
            words = torch.randint(WORDS, (self.batch, *self.shape))
            return words, words if self.loss_fn is token_cross_entropy else torch.randint(CLASSES, (self.batch,))
        inputs = torch.randn(self.batch, *self.shape)
        return inputs, inputs if self.loss_fn is F.mse_loss else torch.randint(CLASSES, (self.batch,))


def of_torchvision(name: str) -> nn.Module:
    from external.torchvision_import import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)  # type: ignore[no-any-return]


def of_timm(name: str, **options: Any) -> nn.Module:
    from external.torchvision_import import torchvision  # noqa: F401, I001  (timm imports it)
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)  # type: ignore[no-any-return]


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


def of_transformers(kind: str, task: str, **sizes: Any) -> nn.Module:
    from external.torchvision_import import torchvision  # noqa: F401, I001  (transformers imports it)
    import transformers

    config = getattr(transformers, f"{kind}Config")(**TEXT | sizes)
    return Logits(getattr(transformers, f"{kind}For{task}")(config))


class UNet(nn.Module):
    """An image to an image: group norms, upsampling by transposed convolutions, skip connections."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block(taken: int, given: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(taken, given, 3, padding=1), nn.GroupNorm(8, given), nn.SiLU(),
                nn.Conv2d(given, given, 3, padding=1), nn.GroupNorm(8, given), nn.SiLU(),
            )  # fmt: skip

        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList([block(a, b) for a, b in zip([3, *widths], widths, strict=False)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1]])
        self.joined = nn.ModuleList([block(2 * w, w) for w in widths[-2::-1]])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([up(x), skipped.pop()], 1))
        return self.last(x)  # type: ignore[no-any-return]


class DilatedConvolutions(nn.Module):
    """A WaveNet: gated convolutions along time, each over twice as far as the one before."""

    def __init__(self, width: int = 64, layers: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=2**k) for k in range(layers)])
        self.through = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(layers)])
        self.last = nn.Conv1d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for k, (gated, through) in enumerate(zip(self.gated, self.through, strict=True)):
            a, b = gated(F.pad(x, (2**k, 0))).chunk(2, 1)
            x = x + through(a.tanh() * b.sigmoid())
        return self.last(x).mean(2)  # type: ignore[no-any-return]


class Translation(nn.Module):
    """`nn.Transformer`: encoder, decoder and attention across."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 192)
        self.model = nn.Transformer(192, 6, 3, 3, 512, dropout=0.0, batch_first=True)
        self.last = nn.Linear(192, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.model(self.words(ids), self.words(ids)))  # type: ignore[no-any-return]


class Bags(nn.Module):
    """A recommender: large embedding bags, products of their sums, dense layers (a DLRM without dense features)."""

    def __init__(self, tables: int = 8, rows: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.dense = nn.Sequential(nn.Linear(tables * (width + tables), 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        each = torch.stack([t(part) for t, part in zip(self.tables, ids.chunk(len(self.tables), 1), strict=True)], 1)
        return self.dense(torch.cat([each.flatten(1), (each @ each.transpose(1, 2)).flatten(1)], 1))  # type: ignore[no-any-return]


def images(source: Callable[..., nn.Module], name: str, batch: int, size: int, **options: Any) -> Example:
    made = f"{name}, {size}², B={batch} ({source.__name__.removeprefix('of_')})"
    return Example(made, partial(source, name, **options), batch, (3, size, size))


def text(kind: str, task: str, batch: int, tokens: int, **sizes: Any) -> Example:
    loss_fn = token_cross_entropy if task == "CausalLM" else F.cross_entropy
    sizes |= {} if task == "CausalLM" else {"num_labels": CLASSES}
    made = f"{kind}For{task}, 4×256, T={tokens}, B={batch} (transformers)"
    return Example(made, partial(of_transformers, kind, task, **sizes), batch, (tokens,), loss_fn)


EXAMPLES = {
    "squeezenet": images(of_torchvision, "squeezenet1_1", 16, 96),
    "vgg11": images(of_torchvision, "vgg11", 8, 64),
    "mobilenet": images(of_torchvision, "mobilenet_v3_small", 16, 96),
    "regnet": images(of_torchvision, "regnet_y_400mf", 16, 64),
    "resnet50": images(of_torchvision, "resnet50", 8, 64),
    "convnext": images(of_torchvision, "convnext_tiny", 4, 64),
    "mixer": images(of_timm, "mixer_s32_224", 4, 224),
    "poolformer": images(of_timm, "poolformer_s12", 8, 64),
    "unet": Example("U-Net, 64², B=8", UNet, 8, (3, 64, 64), F.mse_loss),
    "wavenet": Example("WaveNet 10×64, T=1024, B=8", DilatedConvolutions, 8, (1, 1024)),
    "bert": text("Bert", "SequenceClassification", 8, 128, intermediate_size=1024),
    "llama": text("Llama", "CausalLM", 4, 128, intermediate_size=688, num_key_value_heads=2),
    "neox": text("GPTNeoX", "CausalLM", 4, 128, intermediate_size=1024),
    "translation": Example("nn.Transformer 3+3×192, T=64, B=8", Translation, 8, (64,), token_cross_entropy),
    "bags": Example("8 embedding bags of 20,000×32, B=256", Bags, 256, (32,)),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=",".join(EXAMPLES), help="separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing per contender (default 3)")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one[0], Path(args.one[1]), args.seconds)
        return
    result = f"others-{args.tag or device_tag('cpu')}"
    found = {name: r for name, r in kept(result).get("results", {}).items() if r.get("environment") == about()}
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            found[name] = written_by([__file__, "--one", name, str(out), "--seconds", str(args.seconds)], out)
        table = tabulate(
            [row(n, found[n]) for n in EXAMPLES if n in found], HEADERS, tablefmt="github", disable_numparse=True
        )
        made = "Made by `bench/others.py`. *Ordinary* is the fastest of three ordinary training steps of that model."
        facts = bullets(about())
        path = keep(result, {"results": found}, "# Other models", made, facts, table)
    print(f"\n{table}\nwrote {path}.json and .md")


def run_one(name: str, out: Path, seconds: float) -> None:
    """Races the contenders on one model, and writes the report."""
    torch.manual_seed(0)
    example = EXAMPLES[name]
    model = example.make().eval()
    inputs, targets = example.data()
    contenders = [*ORDINARY, "psg-compiled/norms", "psg-compiled/clipped_sum"]
    report = benchmark(
        model, example.loss_fn, inputs, targets, contenders=contenders, min_run_time=seconds, progress=False
    )
    print(f"\n== {example.title}\n{report}", flush=True)
    out.write_text(report.to_json(), encoding="utf-8")


HEADERS = [
    "model", "parameters", "ordinary ms", "clipped sum", "norms", "memory of the clipped sum",
    "its first call / torch.compile's", "error",
]  # fmt: skip


def row(name: str, result: dict[str, Any]) -> list[str]:
    """What `HEADERS` says; times and memory in those of the fastest ordinary step."""
    title = EXAMPLES[name].title
    if "failure" in result:
        return [title, result["failure"]]
    report = read(result)
    base, compiled = report.fastest_ordinary(), report.row("ordinary-compiled")
    clipped, norms = (fastest(report, ["psg-compiled"], quantity) for quantity in ("clipped_sum", "norms"))
    if base is None or clipped is None or norms is None:
        return [title, _failures(report)]
    first = clipped.first_call_s / compiled.first_call_s if compiled and compiled.first_call_s else None  # type: ignore[operator]
    return [
        title, f"{report.problem['parameters'] / 1e6:.1f} M", f"{1e3 * base.median_s:.0f}",  # type: ignore[operator]
        f"{clipped.ratio:.2f}", f"{norms.ratio:.2f}", f"{clipped.peak_bytes / base.peak_bytes:.2f}",  # type: ignore[operator]
        f"{first:.2f}" if first else "-", f"{max(clipped.error or 0.0, norms.error or 0.0):.0e}",
    ]  # fmt: skip


def _failures(report: BenchmarkReport) -> str:
    return "; ".join(f"{r.contender}/{r.quantity}: {r.failure}" for r in report.rows if r.failure)


if __name__ == "__main__":
    main()
