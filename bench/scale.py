"""What a clipped step of an 8B transformer computes, holds and sends on each of 8, 64, 512 H100s, by the cost model.

    python bench/scale.py [--tokens 1024] [--samples 4]

Nothing is run: the networks of a Llama-3-8B's layers in bfloat16 are planned with the rates of an H100
(`psg_fx/planner/rates.py`), and bytes are counted. Prints the tables of docs/design/scale.md and writes
`bench/results/scale.json` and `.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from _results import bullets, keep, options
from tabulate import tabulate

from planner import ASKS, B, Problem, leaf, methods
from psg_fx.algebra.network import Network, OneHot
from psg_fx.planner import rates
from psg_fx.planner.plan import ParameterPlan, kept_until_norms
from psg_fx.planner.search import plan_step

LAYERS, WIDTH, INNER, KEYS, WORDS = 32, 4096, 14336, 1024, 128256
PROCESSES = (8, 64, 512)
NVLINK, NETWORK = 4.5e11, 5.0e10
"""Bytes/s that a GPU sends, nominal: within a node of 8 (NVLink 4, one direction), and beyond (400 Gb/s for each)."""


@dataclass(frozen=True)
class Layer:
    """A matrix of the model: how often it is there, and its sizes; an embedding is read by numbers."""

    name: str
    count: int
    inputs: int
    outputs: int
    embedding: bool = False

    @property
    def size(self) -> int:
        """Parameters in all."""
        return self.count * self.inputs * self.outputs


LAYERS_OF_8B = (
    Layer("q, o", 2 * LAYERS, WIDTH, WIDTH), Layer("k, v", 2 * LAYERS, WIDTH, KEYS),
    Layer("gate, up", 2 * LAYERS, WIDTH, INNER), Layer("down", LAYERS, INNER, WIDTH),
    Layer("head", 1, WIDTH, WORDS), Layer("embedding", 1, WORDS, WIDTH, embedding=True),
)  # fmt: skip


def planned(layer: Layer, samples: int, tokens: int) -> ParameterPlan:
    """The plan of its clipped sum on an H100."""
    ybar = replace(leaf("ȳ", "bto", (tokens, layer.outputs)), dtype=torch.bfloat16)
    if layer.embedding:
        x = leaf("onehot(ids)", "bti", (tokens, layer.inputs), OneHot(layer.inputs))
    else:
        x = replace(leaf("x", "bti", (tokens, layer.inputs)), dtype=torch.bfloat16)
    problem = Problem("linear", layer.name, Network((x, ybar), tuple("boi")), samples)
    gradient = replace(problem.gradient(), dtype=torch.bfloat16)
    return plan_step([gradient], ASKS["clipped_sum"], rates.H100, B, samples).parameters[0]


def rows(samples: int, tokens: int) -> Iterator[dict[str, Any]]:
    """What each kind of layer costs on one GPU, all of its copies together."""
    for layer in LAYERS_OF_8B:
        plan = planned(layer, samples, tokens)
        flops, kept = 0.0, 0.0
        nodes = {key: node for part in plan.parts for key, node in part.tree.nodes.items()}
        for node in nodes.values():
            flops += float(sympy.sympify(node.work().flops).subs(B, samples))
        for part in plan.parts:
            kept += sum(kept_until_norms(part.tree).values()) if part.ask.phase.name == "AFTER_NORMS" else 0
        yield {
            "layer": f"{layer.count} x {layer.name}",
            "trees": "; ".join(dict.fromkeys(methods(part.tree) for part in plan.parts)),
            "flops": flops * layer.count,
            "ordinary": 0.0 if layer.embedding else 2.0 * samples * tokens * layer.size,
            "kept": kept * layer.count,
            "seconds": sum({k: float(n.seconds(rates.H100)) for k, n in nodes.items()}.values()) * layer.count,
        }


def memory(processes: int, kept: float) -> dict[str, float]:
    """GB on each process: whole parameters and sums in bfloat16, its shard of float32 weights and of AdamW's state."""
    size = sum(layer.size for layer in LAYERS_OF_8B)
    return {
        "parameters, whole": 2 * size / 1e9, "sums, whole": 2 * size / 1e9,
        "shard, with AdamW's": 12 * size / processes / 1e9, "kept for the sum": kept / 1e9,
    }  # fmt: skip


def sent(processes: int) -> dict[str, float]:
    """GB that each process receives, and the seconds at nominal rates."""
    size = sum(layer.size for layer in LAYERS_OF_8B)
    part, rate = (processes - 1) / processes, NVLINK if processes <= 8 else NETWORK
    gather, scatter = 2 * size * part, 4 * size * part
    return {
        "gather": gather / 1e9, "scatter": scatter / 1e9, "seconds": (gather + scatter) / rate,
        "fully_shard, ordinary": (2 * gather + scatter) / 1e9,
    }  # fmt: skip


def main() -> None:
    args = arguments()
    found = list(rows(args.samples, args.tokens))
    size = sum(layer.size for layer in LAYERS_OF_8B)
    kept = sum(row["kept"] for row in found)
    base = sum(2 * row["ordinary"] for row in found)  # forward, and gradients of activations
    extra, usual = sum(row["flops"] for row in found), sum(row["ordinary"] for row in found)
    computed = tabulate(
        [(r["layer"], r["trees"], r["flops"] / 1e12, r["ordinary"] / 1e12, r["kept"] / 1e9, 1e3 * r["seconds"])
         for r in found],
        ("layers", "trees", "Tflop", "ordinary Tflop", "kept GB", "ms"), tablefmt="github", floatfmt=".3g",
    )  # fmt: skip
    weights = sum(row["seconds"] for row in found)
    rate = rates.H100.rate("gemm", torch.bfloat16)
    rest = base / rate
    ratio = (rest + weights) / (rest + usual / rate)
    summary = (
        f"{size / 1e9:.2f}e9 parameters, {args.samples} x {args.tokens} tokens on each GPU. Norms and sums: "
        f"{extra / 1e12:.3g} Tflop where ordinary weight gradients are {usual / 1e12:.3g}; {1e3 * weights:.0f} ms "
        f"beside {1e3 * rest:.0f} ms for forward and the gradients of activations: {ratio:.2f} times an ordinary step, "
        f"both at the rates of large products, without attention."
    )
    tables = [
        tabulate([(p, *values(p).values()) for p in PROCESSES], ("GPUs", *values(8)), tablefmt="github", floatfmt=".3g")
        for values in (lambda p: memory(p, kept), sent)
    ]
    print("\n\n".join([summary, computed, *tables]))
    keep("scale", {"rows": found, "summary": summary}, "# An 8B transformer", bullets(
        {"tokens": args.tokens, "samples": args.samples}), summary, computed, *tables)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = options(__doc__, tag=False)
    parser.add_argument("--tokens", type=int, default=1024, help="of each sample")
    parser.add_argument("--samples", type=int, default=4, help="on each GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
