"""The page of what was counted and executed without a device."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from _results import bullets
from tabulate import tabulate

SHOWN = {"kernels": "kernels", "launches": "launches", "extern": "extern calls", "calls": "launches + extern",
         "MB": "MB moved", "registers": "registers", "spilling": "spilling", "shared": "shared bytes",
         "inside": "inside loops", "gradients": "further gradients"}  # fmt: skip
ASKED = {"norms": "norms", "clipped_sum": "clipped sum", "grads": "gradients"}

Steps = dict[str, Any]


def page(found: dict[str, Steps]) -> list[str]:
    """The paragraphs of the result: one table of ratios, then what each part came to."""
    compiled = {part.removeprefix("compiled "): s for part, s in found.items() if part.startswith("compiled")}
    executed = {part.removeprefix("executed "): s for part, s in found.items() if part.startswith("executed")}
    return [
        "# CUDA without a device", bullets(about()), INTRODUCTION,
        "## Ratios", table(["model, precision, batch", *headers()], list(ratios(compiled))), ODDITIES,
        "## Executed by the interpreter", table(EXECUTED, list(answers(executed))), *spilling(compiled),
        *(paragraph for part, steps in compiled.items() for paragraph in numbers(part, steps)),
    ]  # fmt: skip


def about() -> dict[str, str]:
    return {
        **{name: version(name) for name in ("torch", "triton")}, "python": platform.python_version(),
        "compiled for": "sm_90 (H100), in the first configuration of each kernel",
        "sizes": "those of the zoo, large ones those of bench/kernels.py; executed in small ones",
    }  # fmt: skip


INTRODUCTION = """Launches of Triton's kernels and calls of ops that torch has kernels for (each may launch several;
the backward of a convolution counts once for each gradient that it is asked for, of its input and of its weight,
since cuDNN has a call for each); bytes read and written as inductor's scheduler counts them, every read as one from
memory (what a kernel of psg_fx writes is not counted as read by it, too). Plans have the kernels of psg_fx that are
offered on an H100 by default. Registers a thread and shared bytes a block are the most that a kernel takes; spilling:
kernels that spill registers. In parentheses: × the ordinary step as one graph, compiled in the same way. Nothing was
timed."""

ODDITIES = """× ordinary / × compiled `vmap(grad)`, which forms all gradients and takes norms and the sum from them;
both are one graph, compiled in the same way. vmap of attention is one call for all samples, as on CUDA. Two models
stand apart. The MLP's ordinary step moves 0.1 MB: it is all launches, each norm or scaling is one more of them, and
per-sample gradients of 32 samples are 32 times what an ordinary step writes. The LSTM's loops over time are ops of
psg_fx's own, which launch 8 kernels forward and 5 backward for each step of time and layer, 2 and 2 with all kernels
of psg_fx ("-fused": `options={"psg_fx.fused_kernels": True}`); they are counted as launches, and what they move is
not in the bytes. Its ordinary step is written out over time here, so that inductor
fuses what lies between two products; on a device it is cuDNN's op, a few launches for all of time. So the LSTM's ratios
hold two graphs against each other and not against the step that users run. A dash: not compiled yet."""

EXECUTED = ["model", "step", "launches", "outputs", "worst relative error"]


def table(names: list[str], rows: list[list[str]]) -> str:
    return tabulate(rows, names, "github", disable_numparse=True)


def headers() -> list[str]:
    return [f"{name}: {what}" for name in ASKED.values() for what in ("calls", "MB")]


def ratios(compiled: dict[str, Steps]) -> Iterator[list[str]]:
    """A row for each part: what each quantity calls and moves, × the ordinary step and × vmap."""
    for part, steps in compiled.items():
        cells = []
        for asked in ASKED:
            mine = derived(steps.get(asked, {}))
            for key in ("calls", "MB"):
                others = (derived(steps.get(base, {})) for base in ("ordinary", f"vmap_{asked}"))
                cells.append(" / ".join(ratio(mine, other, key) for other in others))
        yield [part.replace(" ", ", "), *cells]


def ratio(mine: Steps, other: Steps, key: str) -> str:
    return f"{mine[key] / other[key]:.2f}" if mine.get(key) and other.get(key) else "–"


def answers(executed: dict[str, Steps]) -> Iterator[list[str]]:
    for model, steps in executed.items():
        for name, s in steps.items():
            error = s.get("failure") or f"{s['error']:.1e}"
            yield [model, name, str(s.get("launches", "")), str(s.get("outputs", "")), error]


def spilling(compiled: dict[str, Steps]) -> Iterator[str]:
    """Which kernels spill registers, and bytes of stack a thread."""
    rows = [
        [part.replace(" ", ", "), step, f"`{kernel}`", str(stack)]
        for part, steps in compiled.items() for step, s in steps.items()
        for kernel, stack in s.get("spilled", {}).items()
    ]  # fmt: skip
    if rows:
        yield "## Kernels that spill registers"
        yield table(["part", "step", "kernel", "bytes of stack a thread"], rows)


def numbers(part: str, steps: Steps) -> Iterator[str]:
    """The table of one part."""
    yield f"## {part.replace(' ', ', ')}"
    yield table(["step", *SHOWN.values()], [[name, *cells(s, steps.get("ordinary", {}))] for name, s in steps.items()])


def cells(step: Steps, ordinary: Steps) -> list[str]:
    """The numbers of a step, each also as a ratio."""
    if "failure" in step:
        return [step["failure"]]
    mine, base = derived(step), derived(ordinary)
    return [
        (f"{mine[key]:.4g}" if key == "MB" else str(mine.get(key, "")))
        + (f" ({mine[key] / base[key]:.2f})" if key in mine and base.get(key) and step is not ordinary else "")
        for key in SHOWN
    ]


def derived(step: Steps) -> Steps:
    if "launches" not in step:
        return {}
    calls = step["launches"] + step["extern"] + step.get("inside", 0) + step.get("gradients", 0)
    return step | {"calls": calls, "MB": step["bytes"] / 1e6}
