"""What steps would launch, move and take on a CUDA device, found out without one: `make cuda`.

    python bench/without_cuda.py [--models mlp,gpt] [--precisions float32,bfloat16] [--batches static,dynamic] [--again]

Every graph is captured on the CPU, planned and lowered by the table of a CUDA device, and compiled by inductor to
Triton, PTX and machine code for an H100 (sm_90); nothing is timed.  In small sizes and float32 the generated code is
also executed, its kernels by triton's interpreter, and held against the graph that it was made of.

Needs `.venv-cuda` (torch with CUDA, triton; no driver).  Writes `bench/results/cuda-without-a-device.json` and `.md`
after each part, and goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _results import RESULTS, bullets, keep, options, printed_by, written_by
from tabulate import tabulate

NAME = "cuda-without-a-device"
PRECISIONS = ("float32", "bfloat16")
BATCHES = ("static", "dynamic")
STEPS = ("ordinary", "grads", "norms", "clipped_sum", "mean_grad")
TOLERANCE = 1e-5

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 3},
    "simplecnn": {"batch": 3, "image": 10, "width": 4, "hidden": 8},
    "gpt": {"batch": 2, "layers": 1, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 20},
    "encoder": {"batch": 3, "layers": 1, "width": 16, "heads": 2, "hidden": 16, "tokens": 5},
    "vit": {"batch": 3, "layers": 1, "width": 16, "heads": 2, "image": 8, "patch": 4},
    "lstm": {"batch": 3, "layers": 1, "width": 8, "hidden": 8, "tokens": 4, "vocabulary": 20},
    "resnet18gn": {"batch": 2, "width": 8, "groups": 4, "blocks": (1, 1), "image": 8},
}
"""The models in sizes that the interpreter can bear."""

LARGE: dict[str, dict[str, Any]] = {
    "gpt-large": {"batch": 16, "width": 768, "heads": 12, "layers": 3, "tokens": 512},
    "vit-large": {"batch": 16, "width": 768, "heads": 12, "layers": 4, "image": 224, "patch": 16},
}
"""What `bench/kernels.py` measures in bfloat16."""

SHOWN = {"kernels": "kernels", "launches": "launches", "extern": "extern calls", "calls": "launches + extern",
         "MB": "MB moved", "registers": "registers", "spilling": "spilling", "shared": "shared bytes"}  # fmt: skip


def main() -> int:
    parser = options(__doc__, tag=False)
    parser.add_argument("--models", default=",".join(SMALL), help=f"also {', '.join(LARGE)}")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--batches", default="static", help="static, dynamic or both, separated by a comma")
    parser.add_argument("--again", action="store_true", help="also parts whose results are there")
    parser.add_argument("--part", nargs=2, metavar=("PART", "FILE"), help="one part into a file, in this process")
    args = parser.parse_args()
    if args.part:
        kind, *which = args.part[0].split()
        Path(args.part[1]).write_text(json.dumps({"compiled": compiled, "executed": executed}[kind](*which)))
        return 0
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not args.again else {}
    parts = [f"executed {model}" for model in args.models.split(",") if model in SMALL]
    for batch in args.batches.split(","):
        for precision in args.precisions.split(","):
            parts += [f"compiled {model} {precision} {batch}" for model in args.models.split(",")]
    for part in parts:
        if part not in found:
            print(f"== {part}", flush=True)
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                done = written_by([__file__, "--part", part, out.name], Path(out.name))
            found[part] = done
            keep(NAME, found, *page(found))
    print(f"wrote {path} and .md")
    return int(not all(map(fine, found.values())))


def fine(steps: dict[str, Any]) -> bool:
    """Whether nothing failed, and what was executed answered rightly."""
    return all("failure" not in s and s.get("error", 0.0) <= TOLERANCE for _, s in stepwise(steps))


def compiled(model: str, precision: str, batch: str) -> dict[str, Any]:
    """Step -> its numbers."""
    from no_device.count import counted
    from no_device.retarget import compiled_for_cuda

    return each(model, LARGE.get(model, {}), precision, batch, lambda step: counted(compiled_for_cuda(step)))


def executed(model: str) -> dict[str, Any]:
    """Step -> launches, outputs, and the worst relative error of an output."""
    from no_device import interpret
    from no_device.retarget import compiled_for_cuda

    def run(step: Callable[[], object]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            interpret.keep_for(Path(file.name), compiled_for_cuda(step, run=True, binaries=False))
            own = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
            return printed_by(interpret.__file__, file.name, **own)

    return each(model, SMALL[model], "float32", "static", run)


def each(
    model: str, sizes: dict[str, Any], precision: str, batch: str, what: Callable[[Callable[[], object]], Any]
) -> dict[str, Any]:
    """Something of every step of a model, or why it failed."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for name, make in steps_of(model, sizes, batch == "dynamic"):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            try:
                found[name] = what(make())
            except Exception as error:
                found[name] = {"failure": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
            print(f"   {name}: {found[name].get('failure', 'done')}", flush=True)
        torch._dynamo.reset()
    return found


def steps_of(
    model: str, sizes: dict[str, Any], dynamic: bool
) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """The ordinary step as one graph, where it can be made so, and those of psg_fx."""
    from psg_fx import MeanGrad, transform, zoo
    from psg_fx.benchmarking.contenders import ordinary_one_graph
    from psg_fx.benchmarking.problem import Problem
    from psg_fx.quantities.names import USUAL

    ex = zoo.example(model.removesuffix("-large"), **sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    if model != "lstm":  # the CPU's op for a recurrent layer is none of CUDA's, which has cuDNN's
        yield "ordinary", lambda: (ordinary_dynamic if dynamic else ordinary_one_graph)(problem)
    for name, quantity in (USUAL | {"mean_grad": MeanGrad()}).items():
        step = transform(ex.model, ex.loss_fn, quantities=quantity, batch_dim=ex.batch_dim, dynamic=dynamic)
        yield name, lambda step=step: lambda: step(*problem.arguments)


def ordinary_dynamic(problem: Any) -> Callable[[], object]:
    """The ordinary step as one graph, as `ordinary_one_graph` makes it, for every batch size."""
    import torch

    from psg_fx.torch_private.compiler import marked_dynamic
    from psg_fx.torch_private.fakes import symbolic_inputs
    from psg_fx.torch_private.tracer import trace_fakes

    count, (x_dim, y_dim) = len(problem.wanted), problem.batch_dim or (0, 0)

    def joint(*args: torch.Tensor) -> Any:
        params = [p.detach().requires_grad_() for p in args[:count]]
        named = {f"model.{name}": p for name, p in zip(problem.wanted, params, strict=True)}
        with torch.enable_grad():
            loss = torch.func.functional_call(problem.program, named, args[count:])
            return torch.autograd.grad(loss, params)

    given = [*(p.detach() for p in problem.wanted.values()), problem.inputs, problem.targets]
    dims = [*[None] * count, x_dim, y_dim]
    traced = trace_fakes(joint, symbolic_inputs(given, dims))
    compiled = torch.compile(traced)
    marked = [t if d is None else marked_dynamic(t, [d]) for t, d in zip(given, dims, strict=True)]

    def run() -> object:
        with torch.no_grad():
            return compiled(*marked)

    return run


def page(found: dict[str, Any]) -> list[str]:
    """The paragraphs of the result."""
    with contextlib.suppress(ImportError):
        import torch
        import triton

    about = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
             "compiled for": "sm_90 (H100), in the first configuration of each kernel",
             "sizes": "those of the zoo, large ones those of bench/kernels.py; executed in small ones"}  # fmt: skip
    paragraphs = ["# CUDA without a device", bullets(about), INTRODUCTION, "## Executed by the interpreter"]
    rows = [
        [part.split()[1], name, s.get("launches", ""), s.get("outputs", ""), s.get("failure") or f"{s['error']:.1e}"]
        for part, steps in found.items() if part.startswith("executed")
        for name, s in stepwise(steps)
    ]  # fmt: skip
    headers = ["model", "step", "launches", "outputs", "worst relative error"]
    paragraphs.append(tabulate(rows, headers, "github", disable_numparse=True))
    for part, steps in found.items():
        kind, *which = part.split()
        if kind == "compiled":
            rows = [[name, *cells(s, steps.get("ordinary", {}))] for name, s in stepwise(steps)]
            table = tabulate(rows, ["step", *SHOWN.values()], "github", disable_numparse=True)
            paragraphs += [f"## {', '.join(which)}", table]
    return paragraphs


INTRODUCTION = """Launches of Triton's kernels and calls of ops that torch has kernels for (each may launch several);
bytes read and written as inductor's scheduler counts them, every read as one from memory. Registers a thread and shared
bytes a block are the most that a kernel takes; spilling: kernels that spill registers. In parentheses: × the ordinary
step as one graph, compiled in the same way. Nothing was timed."""


def stepwise(steps: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("all", steps)] if "failure" in steps else list(steps.items())


def cells(step: dict[str, Any], ordinary: dict[str, Any]) -> list[str]:
    """The numbers of a step, each also as a ratio."""
    if "failure" in step:
        return [step["failure"]]
    mine, base = derived(step), derived(ordinary)
    return [
        (f"{mine[key]:.4g}" if key == "MB" else str(mine[key]))
        + (f" ({mine[key] / base[key]:.2f})" if base.get(key) and step is not ordinary else "")
        for key in SHOWN
    ]


def derived(step: dict[str, Any]) -> dict[str, Any]:
    if "launches" not in step:
        return {}
    return step | {"calls": step["launches"] + step["extern"], "MB": step["bytes"] / 1e6}


if __name__ == "__main__":
    sys.exit(main())
