"""How often the planner's choice is the fastest tree, over grids of linear layers, convolutions and embeddings.

    python bench/planner.py [--device cpu|cuda] [--tag NAME] [--only linear,conv,embedding] [--eager]
                            [--drawn N [--seed S]]

For each layer and each of norms, clipped sum and gradients: every way whose prediction is within ten times the best is
timed eagerly; the fastest four of these, if within 2.5 times the first, and the planner's choice are then compiled as
in a step and timed in interleaved rounds. A choice counts as fastest within 5 % of the best. Constants of the cost
model were fitted on layers of these grids, and on those that seed 0 draws; `--drawn N --seed S` takes N other layers of
each kind. Writes `bench/results/planner-<tag>.json` and `.md`. Minutes; keep the machine otherwise idle.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import sympy
import torch
from _results import about, bullets, device_tag, keep, options
from tabulate import tabulate

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.asks import Materialized, SquaredNorm, Weighted
from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import BATCH, Dense, Form, Kind, Leaf, Network, OneHot, Patches, Source
from psg_fx.algebra.site import Prefix
from psg_fx.measure.tree_times import Values, compiled, evaluate_tree, random_operands, seconds
from psg_fx.planner import cost, rates
from psg_fx.planner.expr import ContractExpr, Expr, LeafExpr, dense
from psg_fx.planner.plan import reads_weights
from psg_fx.planner.search import plan_step
from psg_fx.planner.trees import trees

B = sympy.Symbol("B", positive=True, integer=True)
LINEAR = [  # B, T, I, O
    (64, 1, 512, 512), (64, 1, 64, 2048), (32, 8, 256, 256), (32, 32, 256, 256), (32, 128, 64, 64),
    (8, 128, 256, 256), (8, 128, 256, 1024), (8, 256, 256, 256), (8, 512, 64, 256), (4, 64, 768, 768),
]  # fmt: skip
CONV = [  # B, C, O, H, kernel, stride, padding, groups
    (16, 3, 32, 32, 3, 1, 1, 1), (16, 32, 64, 16, 3, 1, 1, 1), (16, 64, 64, 8, 3, 1, 1, 1),
    (16, 64, 128, 8, 3, 2, 1, 1), (16, 128, 128, 4, 3, 1, 1, 1), (16, 256, 256, 2, 3, 1, 1, 1),
    (16, 64, 256, 8, 1, 1, 0, 1), (8, 3, 96, 32, 4, 4, 0, 1), (16, 64, 64, 16, 3, 1, 1, 64),
    (16, 128, 128, 8, 7, 1, 3, 128), (16, 64, 64, 8, 3, 1, 1, 4),
]  # fmt: skip
EMBEDDING = [  # B, V, T, D
    (32, 1000, 32, 64), (16, 100, 128, 64), (8, 1000, 128, 256), (8, 30000, 64, 128), (64, 16, 16, 32),
    (4, 5000, 512, 64),
]  # fmt: skip
GRIDS = {"linear": LINEAR, "conv": CONV, "embedding": EMBEDDING}
WIDTHS = [24, 48, 96, 160, 320, 640]
ASKS: dict[str, tuple[Ask, ...]] = {
    "norms": (SquaredNorm(),),
    "clipped_sum": (SquaredNorm(), Weighted("clip", after_norms=True)),
    "grads": (Materialized(),),
}
WITHIN, PREDICTED, SCREENED, COMPILED = 1.05, 10.0, 2.5, 4


@dataclass(frozen=True)
class Problem:
    """A layer: the network of its weight's gradient, and a batch size."""

    kind: str
    title: str
    network: Network
    batch: int

    def gradient(self) -> ParameterGradient:
        """The gradient of a parameter with this one use."""
        sizes = tuple(self.network.sizes[a] for a in self.network.out if a != BATCH)
        prefix = Prefix("w", (), ("w",), {}, trivial=True, selects=True)
        term = Term(self.network, ("site",), self.kind, self.kind, sizes, prefix)
        return ParameterGradient("w", tuple(int(s) for s in sizes), torch.float32, (term,))

    def concrete(self, expression: Any) -> int:
        """A size at this batch size."""
        return int(sympy.sympify(expression).subs(B, self.batch))


@dataclass(frozen=True)
class Way:
    """A tree for each part of what is asked."""

    trees: tuple[Expr, ...]
    predicted: float

    @property
    def title(self) -> str:
        """The trees and their methods."""
        return "; ".join(f"{tree} {methods(tree)}" for tree in self.trees)


def methods(tree: Expr) -> str:
    """The methods of its contractions."""
    return "+".join(node.method.name for node in tree.nodes.values() if isinstance(node, ContractExpr))


def leaf(label: str, axes: str, sizes: Sequence[int], form: Form | None = None) -> Leaf:
    """An operand of a problem."""
    source = Source(Kind.COTANGENT if "ȳ" in label else Kind.ACTIVATION, label)
    return Leaf(label, (source,), label, tuple(axes), (B, *map(sympy.Integer, sizes)), form or Dense())


def drawn(count: int, seed: int) -> dict[str, list[tuple[int, ...]]]:
    """Random layers of every kind, of sizes that take part of a second at most."""
    source = random.Random(seed)

    def sizes(*choices: Sequence[int]) -> tuple[int, ...]:
        return tuple(source.choice(c) for c in choices)

    def layer(kind: str) -> tuple[int, ...]:
        if kind == "linear":
            n, t, i, o = sizes([4, 8, 24, 48], [1, 4, 12, 48, 100, 200, 400], WIDTHS, WIDTHS)
            return (n, t, i, o) if n * t * i * o < 2e9 and n * i * o < 5e7 else layer(kind)
        if kind == "embedding":
            n, v, t, d = sizes([4, 8, 24, 48], [50, 300, 3000, 20000], [8, 20, 100, 300], WIDTHS)
            return (n, v, t, d) if n * v * d < 5e7 else layer(kind)
        n, c, o, h, k, stride = sizes(
            [4, 8, 24], [4, 12, 24, 48, 96], [12, 24, 48, 96], [5, 10, 12, 20, 28], [1, 3, 5], [1, 1, 2]
        )
        return (n, c, c if source.random() < 0.2 else o, h, k, stride, k // 2, c if c == o else 1)

    return {kind: [layer(kind) for _ in range(count)] for kind in GRIDS}


def problems(kinds: Sequence[str], grids: Mapping[str, Sequence[tuple[int, ...]]]) -> Iterator[Problem]:
    """A layer for each row of the grids."""
    if "linear" in kinds:
        for n, t, i, o in grids["linear"]:
            network = Network((leaf("x", "bti", (t, i)), leaf("ȳ", "bto", (t, o))), tuple("boi"))
            yield Problem("linear", f"B={n} T={t} I={i} O={o}", network, n)
    if "conv" in kinds:
        yield from (convolution(*sizes) for sizes in grids["conv"])
    if "embedding" in kinds:
        for n, v, t, d in grids["embedding"]:
            ids = leaf("onehot(ids)", "btv", (t, v), OneHot(v))
            yield Problem("embedding", f"B={n} V={v} T={t} D={d}",
                          Network((ids, leaf("ȳ", "btd", (t, d))), tuple("bvd")), n)  # fmt: skip


def convolution(n: int, c: int, o: int, h: int, k: int, stride: int, padding: int, groups: int) -> Problem:
    """A square two-dimensional convolution."""
    out = (h + 2 * padding - k) // stride + 1
    form = Patches((k, k), (stride, stride), (padding, padding), (1, 1), groups, (h, h), (out, out))
    patches = leaf("patches(x)", "btgi", (out * out, groups, c // groups * k * k), form)
    network = Network((patches, leaf("ȳ", "bgot", (groups, o // groups, out * out))), tuple("bgoi"))
    title = f"B={n} {c}→{o} {h}² k{k} s{stride}" + (f" groups={groups}" if groups > 1 else "")
    return Problem("conv", title, network, n)


def candidates(problem: Problem, asks: tuple[Ask, ...], device: cost.Device) -> tuple[Way, list[Way], Values]:
    """The planner's choice, all ways that are worth a race, and operands for them."""
    parts = plan_step([problem.gradient()], asks, device, B, problem.batch).parameters[0].parts
    options = [distinct(trees(part.contraction.network, problem.concrete), part.tree, device) for part in parts]
    operands = random_operands([tree for found in options for tree in found], device.name)
    worth = [
        [w.trees[0] for _, w in fastest([way((t,), device) for t in found], operands) if w.trees[0] is not own] + [own]
        for found, own in ((found, part.tree) for found, part in zip(options, parts, strict=True))
    ]
    found = [way(combination, device) for combination in itertools.product(*worth)]
    chosen = way(tuple(part.tree for part in parts), device)
    return chosen, [chosen, *(w for w in found if w.trees != chosen.trees)], operands


def distinct(found: Sequence[Expr], chosen: Expr, device: cost.Device) -> list[Expr]:
    """The chosen tree, and all others that are predicted to take up to ten times the best; mirror images once."""
    costs = {tree: way((tree,), device) for tree in [chosen, *map(dense, found)]}
    best = min(w.predicted for w in costs.values())
    unique: dict[str, Expr] = {}
    for tree, w in costs.items():
        if w.predicted <= PREDICTED * best or tree is chosen:
            unique.setdefault(f"{w.title} {w.predicted:.6e}", tree)
    return list(unique.values())


def way(combination: tuple[Expr, ...], device: cost.Device) -> Way:
    """Trees with their predicted time, equal nodes counted once."""
    nodes = {key: node for tree in combination for key, node in tree.nodes.items()}
    return Way(combination, sum(node.seconds(device) for node in nodes.values()))


def runner(found: Way, operands: Values, backend: str) -> Callable[[], object]:
    """The way as a step runs it: weights are the clip factors that follow from the norms."""
    nodes = {key: node for tree in found.trees for key, node in tree.nodes.items()}
    late = [key for key, node in nodes.items() if isinstance(node, LeafExpr) and reads_weights(node)]

    def evaluate(values: Values) -> list[torch.Tensor]:
        first = evaluate_tree(found.trees[0], values)
        if len(found.trees) > 1:
            values.update(dict.fromkeys(late, first.rsqrt().clamp(max=1.0)))
        return [first, *(evaluate_tree(tree, values) for tree in found.trees[1:])]

    given = [key for key in nodes if key in operands and (len(found.trees) == 1 or key not in late)]
    return compiled(evaluate, {key: operands[key] for key in given}, backend)


def fastest(found: Sequence[Way], operands: Values) -> list[tuple[float, Way]]:
    """What runs eagerly within three times the fastest, fastest first; the slow ones run twice only."""
    times: list[tuple[float, Way]] = []
    best = float("inf")
    for w in sorted(found, key=lambda w: w.predicted):
        run = runner(w, operands, "eager")
        run()
        taken = clocked(run)
        if taken < SCREENED * best:
            taken = median([taken, *(clocked(run) for _ in range(4))])
        best = min(best, taken)
        times.append((taken, w))
    return sorted(((s, w) for s, w in times if s <= SCREENED * best), key=lambda pair: pair[0])


def clocked(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def judged(problem: Problem, asked: str, device: cost.Device, eager: bool) -> dict[str, Any]:
    """One row: the choice against the best."""
    chosen, found, operands = candidates(problem, ASKS[asked], device)
    kept = [w for _, w in fastest(found, operands)[:COMPILED] if w is not chosen] + [chosen]
    runs = {str(k): runner(w, operands, "eager" if eager or len(kept) == 1 else "inductor") for k, w in enumerate(kept)}
    times = seconds(runs, 7, 0.1)
    by_time = sorted(((times[str(k)], w) for k, w in enumerate(kept)), key=lambda pair: pair[0])
    best, own = by_time[0][0], next(s for s, w in by_time if w is chosen)
    return {
        "kind": problem.kind, "layer": problem.title, "asked": asked, "choice": chosen.title,
        "predicted_s": chosen.predicted, "measured_s": own, "ratio": own / best, "ways": len(found),
        "raced": [{"way": w.title, "predicted_s": w.predicted, "measured_s": s} for s, w in by_time],
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]], style: str) -> str:
    """Share of fastest choices and the worst slowdown, for each kind and ask."""
    body = []
    for kind, asked in [*dict.fromkeys((r["kind"], r["asked"]) for r in rows), ("all", "all")]:
        ratios = [r["ratio"] for r in rows if kind == "all" or (r["kind"], r["asked"]) == (kind, asked)]
        share = sum(r <= WITHIN for r in ratios) / len(ratios)
        body.append([kind, asked, len(ratios), f"{100 * share:.0f} %", f"{max(ratios):.2f}×"])
    return tabulate(body, ["layer", "asked", "cases", "fastest", "worst"], tablefmt=style, disable_numparse=True)


def table(rows: Sequence[dict[str, Any]], style: str) -> str:
    """Every case."""
    body = [
        [r["kind"], r["layer"], r["asked"], r["choice"], f"{1e3 * r['predicted_s']:.2f}",
         f"{1e3 * r['measured_s']:.2f}", f"{r['ratio']:.2f}", "" if r["ratio"] <= WITHIN else r["raced"][0]["way"]]
        for r in rows
    ]  # fmt: skip
    headers = ["kind", "layer", "asked", "choice", "predicted ms", "measured ms", "× best", "best"]
    return tabulate(body, headers, tablefmt=style, disable_numparse=True)


def main() -> None:
    parser = options(__doc__, device=True)
    parser.add_argument("--only", default="linear,conv,embedding", help="kinds of layers, separated by commas")
    parser.add_argument("--drawn", type=int, help="so many random layers of each kind instead of the grids")
    parser.add_argument("--seed", type=int, default=0, help="which random layers (default 0)")
    parser.add_argument("--eager", action="store_true", help="compile nothing: quick, but chains are not fused")
    args = parser.parse_args()
    device, rows = rates.device(args.device), []
    grids = drawn(args.drawn, args.seed) if args.drawn else GRIDS
    for problem, asked in itertools.product(problems(args.only.split(","), grids), ASKS):
        rows.append(judged(problem, asked, device, args.eager))
        print(f"{problem.kind} {problem.title} {asked}: {rows[-1]['ways']} ways")
        for raced in rows[-1]["raced"]:
            mark = "*" if raced["way"] == rows[-1]["choice"] else " "
            print(
                f"  {mark} {1e6 * raced['predicted_s']:8.0f} {1e6 * raced['measured_s']:8.0f} µs  {raced['way']}",
                flush=True,
            )
    machine = about(args.device)
    notes: dict[str, Any] = {"table": device.origin, "timed": "eager" if args.eager else "compiled"}
    if args.drawn:
        notes["drawn"] = f"{args.drawn} layers of each kind, seed {args.seed}"
    path = keep(
        f"planner-{args.tag or 'drawn-' * bool(args.drawn) + device_tag(args.device)}",
        {"environment": machine, "notes": notes, "rows": rows},
        "# The planner's choices against the fastest tree", "Made by `bench/planner.py`.", bullets(machine | notes),
        summary(rows, "github"), table(rows, "github"),
    )  # fmt: skip
    print(f"\n{table(rows, 'simple')}\n\n{summary(rows, 'simple')}\n\nwrote {path}.json and .md")


if __name__ == "__main__":
    main()
