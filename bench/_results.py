"""What the scripts share: their options, processes of their own, contenders in turns, and how results are kept.

Imports of torch are inside functions: `first_answer.py` measures what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RESULTS = Path(__file__).parent / "results"


def options(description: str | None, *, device: bool = False, tag: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that scripts have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        import torch

        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    if tag:
        parser.add_argument("--tag", help="names the result files (default: the device)")
    return parser


def timing_options(description: str | None, models: Iterable[str], default: str) -> argparse.ArgumentParser:
    """The options of a script that runs a quantity of some models beside other ways."""
    from psg_fx.quantities.names import USUAL

    parser = options(description, device=True)
    parser.add_argument("--models", default=default, help=f"of {', '.join(models)}")
    parser.add_argument("--quantity", default="clipped_sum", choices=list(USUAL))
    parser.add_argument("--seconds", type=float, default=6.0, help="timing per contender (default 6)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smoke test: a tenth of a second per contender")
    return parser


def settled(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The run, waited for; compiled by a first call."""
    import torch

    from psg_fx.measure.clock import synchronize

    def waited() -> None:
        run()
        synchronize(torch.device(device))

    waited()
    return waited


def beside(runs: Mapping[str, Callable[[], object]], base: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row of a table: milliseconds of `base`, how many times as long the others take, and "ms" of all."""
    from psg_fx.measure.clock import time_rounds

    rounds, seconds = (1, 0.1) if args.quick else (args.rounds, args.seconds)
    times = time_rounds(runs, rounds=rounds, min_run_time=seconds, note=lambda text: None)
    ms = {label: 1e3 * median(found) for label, found in times.items()}
    ratios = {f"{label} ×": value / ms[base] for label, value in ms.items() if label != base}
    return {f"{base} ms": ms[base]} | ratios | {"ms": ms}


def told(name: str, title: str, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, **more: Any) -> None:
    """Print such rows and keep them, unless they are those of a smoke test."""
    from tabulate import tabulate

    shown = [{k: v for k, v in row.items() if k != "ms"} for row in rows]
    text = tabulate(shown, headers="keys", tablefmt="github", floatfmt=".2f")
    print(text)
    if args.quick:
        return
    facts = about(args.device)
    data = more | {"quantity": args.quantity, "rows": rows, "environment": facts}
    path = keep(f"{name}-{args.tag or device_tag(args.device)}", data, title, text, bullets(facts))
    print(f"wrote {path}.json and .md")


def clipped_one_by_one(losses: Iterable[Callable[[], Tensor]], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Σ min(1, 1 / ‖g‖) g over the gradients g of some losses, by a backward for each."""
    import torch

    total = [torch.zeros_like(p) for p in parameters]
    for loss in losses:
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(), parameters)
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        torch._foreach_add_(total, torch._foreach_mul(gradients, (1.0 / norm).clamp(max=1.0)))
    return total


def require_same(found: Mapping[str, Tensor], wanted: Sequence[Tensor], what: str) -> None:
    """A clipped sum is that of a loop, in the order of its parameters, before anything is timed."""
    scale = max(float(w.abs().max()) for w in wanted)
    error = max(float((f - w).abs().max()) for f, w in zip(found.values(), wanted, strict=True)) / scale
    if error > 1e-3:
        raise SystemExit(f"{what}: the clipped sum differs from the loop's by {error:.1e} of its largest entry")


def device_tag(device: str) -> str:
    """`cpu-amd-epyc-avx2-2-threads` or `cuda-nvidia-...`."""
    import torch

    from psg_fx.machine import cpu_model

    vectors = torch.backends.cpu.get_cpu_capability()  # a virtual machine may not have those of its processor
    cpu = f"{cpu_model()} {vectors} {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return f"{device}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def about(device: str = "cpu") -> dict[str, Any]:
    """Versions and hardware."""
    import torch

    from psg_fx.machine import environment

    return environment(torch.device(device))


def bullets(facts: Mapping[str, Any]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {key}: {value}" for key, value in facts.items())


def require_cuda() -> None:
    """End a script that has nothing to do without a device."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"bench/{Path(sys.argv[0]).name}: there is no CUDA device")


def keep_of_device(name: str, tag: str | None, title: str, data: Mapping[str, Any], *paragraphs: str) -> Path:
    """Write what a CUDA device did, under its name, and what it is."""
    facts = about("cuda")
    data = {"environment": facts, **data}
    return keep(f"{name}-{tag or device_tag('cuda')}", data, f"# {title}", bullets(facts), *paragraphs)


def keep(name: str, data: Any, *paragraphs: str) -> Path:
    """Write `results/<name>.json` and, of the paragraphs, `.md`; their path without an ending."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if paragraphs:
        path.with_suffix(".md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    return path.with_suffix("")


def kept(name: str) -> dict[str, Any]:
    """The data of `results/<name>.json`; none where there is no such file."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def written_by(command: Sequence[str], out: Path) -> dict[str, Any]:
    """The JSON that a process of its own leaves in a file, or why it did not."""
    done = subprocess.run([sys.executable, *command], check=False)
    if done.returncode or not out.exists():
        return {"failure": f"the process ended with exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def printed_by(script: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """The JSON that a process of its own prints last."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=os.environ | environ, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
