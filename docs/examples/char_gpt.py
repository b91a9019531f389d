"""A character-level GPT, trained by Hugging Face's Trainer, with the gradient noise scale measured on the way.

The simple noise scale (McCandlish et al. 2018, arXiv:1812.06162) says up to which batch size a larger batch still pays:

    B_simple = tr(Σ) / |G|²      (G: the true gradient, Σ: the covariance of the gradients of single samples)

Per-sample gradients give both from the same batches, without bias: with b samples the variances around their mean are
too small by (b - 1) / b, and the square of the mean is too large by tr(Σ) / b.

The text is the docstrings of Python's standard library, so that nothing is downloaded.

    python docs/examples/char_gpt.py                        # some minutes on two cores
    python docs/examples/char_gpt.py --steps 40 --every 20 --backend eager

It prints a table of loss and noise scale, and saves a picture. A sample is one sequence of --length characters.
"""

from __future__ import annotations

import argparse
import ast
import math
import platform
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import psg_fx

BATCH, MEASURED = 16, 32
"""Sequences in a training step, and in a batch of the measurement."""


def docstrings(characters: int) -> str:
    """Docstrings of the modules at the top of the standard library, in order of their names."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found.append(text)
        if sum(map(len, found)) > characters:
            break
    return "\n\n".join(found)[:characters]


class Sequences(Dataset[dict[str, Tensor]]):
    """Text cut into sequences of `length` characters; labels are the characters themselves, the model shifts them."""

    def __init__(self, text: str, length: int) -> None:
        self.characters = sorted(set(text))
        place = {c: i for i, c in enumerate(self.characters)}
        ids = torch.tensor([place[c] for c in text])
        self.ids = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        """What the model takes.  Without a mask GPT-2 looks for packed sequences, and branches on the batch size."""
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@dataclass(frozen=True)
class Measured:
    """One measurement.  noise: tr(Σ).  signal: |G|², which is below zero where the noise hides it."""

    step: int
    loss: float
    noise: float
    signal: float
    seconds: float

    @property
    def scale(self) -> float:
        """B_simple in sequences; NaN where the signal is hidden."""
        return self.noise / self.signal if self.signal > 0 else math.nan


class NoiseScale(TrainerCallback):
    """Measures loss and noise scale on `batches` random batches of the training text, every `every` steps."""

    def __init__(self, model: GPT2LMHeadModel, data: Sequences, *, every: int, batches: int, backend: str) -> None:
        self.step = psg_fx.transform(
            model, lambda output: output.loss, quantities=[psg_fx.SecondMoment(centered=True), psg_fx.MeanGrad()],
            backend=backend,
        )  # fmt: skip
        self.data, self.every, self.batches = data, every, batches
        self.draw = torch.Generator().manual_seed(0)
        self.rows: list[Measured] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step."""
        self.measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every step of the optimizer."""
        if state.global_step % self.every == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        """Adds a row, and prints it."""
        start = time.perf_counter()
        loss, variance = 0.0, 0.0
        mean: dict[str, Tensor] = {}
        for _ in range(self.batches):
            out = self.step(self.data[torch.randint(len(self.data), (MEASURED,), generator=self.draw)])
            loss += out.losses.mean().item() / self.batches
            variance += sum(v.sum().item() for v in out.second_moment.values()) / self.batches
            for name, g in out.mean_grad.items():
                mean[name] = mean.get(name, 0.0) + g / self.batches
        noise = variance * MEASURED / (MEASURED - 1)
        signal = sum(g.square().sum().item() for g in mean.values()) - noise / (self.batches * MEASURED)
        self.rows.append(Measured(step, loss, noise, signal, time.perf_counter() - start))
        row = self.rows[-1]
        print(f"{row.step:6d}  {row.loss:6.3f}  {row.noise:10.4g}  {row.signal:10.4g}  {row.scale:10.1f}  "
              f"{row.seconds:9.1f}", flush=True)  # fmt: skip


def picture(rows: Sequence[Measured], path: Path) -> None:
    """Loss and noise scale over the steps."""
    steps = [row.step for row in rows]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    above.plot(steps, [row.loss for row in rows], "o-", color="#22313f", markersize=4)
    above.set(ylabel="loss per character (nats)", title="A character GPT on docstrings")
    below.plot(steps, [row.scale for row in rows], "o-", color="#d1495b", markersize=4, label="noise scale")
    below.axhline(BATCH, color="#b8bfc6", linestyle="--", label=f"batch size of this run, {BATCH}")
    below.set(xlabel="step", ylabel="tr(Σ) / |G|² (sequences)", yscale="log")
    below.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--every", type=int, default=50, help="steps between measurements (default 50)")
    parser.add_argument("--batches", type=int, default=16, help=f"of {MEASURED} in a measurement (default 16)")
    parser.add_argument("--length", type=int, default=64, help="characters in a sequence (default 64)")
    parser.add_argument("--width", type=int, default=64, help="width of the model (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks (default 2)")
    parser.add_argument("--characters", type=int, default=500_000, help="of text, at most (default 500000)")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights and the batches")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    folder = Path("demo-output")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help=f"for the picture (default {folder})")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[Measured]:
    """Trains, measures, draws; returns the measurements."""
    args = arguments(argv)
    print(f"psg_fx {psg_fx.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {torch.get_num_threads()} threads, seed {args.seed}, ", end="")
    print(f"backend {args.backend}")
    data = Sequences(docstrings(args.characters), args.length)
    transformers.set_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(data.characters), n_positions=args.length, n_embd=args.width, n_layer=args.layers, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.loss_type = "ForCausalLM"  # what it takes anyway, but then transformers warns
    print(f"\n{len(data)} sequences of {args.length} of {len(data.characters)} characters; "
          f"GPT-2 with {sum(p.numel() for p in model.parameters()):,} parameters, batches of {BATCH}")  # fmt: skip
    print(f"each measurement: {args.batches} batches of {MEASURED}; the first compiles\n")
    print("  step    loss       tr(Σ)        |G|²  tr(Σ)/|G|²          s")
    measure = NoiseScale(model, data, every=args.every, batches=args.batches, backend=args.backend)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=BATCH, learning_rate=5e-3,
            seed=args.seed, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[measure])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    args.out.mkdir(parents=True, exist_ok=True)
    picture(measure.rows, args.out / "noise_scale.png")
    print(f"\nwrote {args.out / 'noise_scale.png'}")
    return measure.rows


if __name__ == "__main__":
    main()
