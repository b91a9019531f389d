"""A program as a script that runs by itself, and as objects."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.grammar import OPS
from fuzz.program import Data, Program, Writer, elaborate

_TRUTH = """
rows, losses = [], []
for i in range(B):
    o = model(*(v.narrow(d, i, 1) for v, d in zip(inputs, dims)))
    loss = loss_fn(o, *(t[i : i + 1] for t in targets)).reshape(())
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters())])
    losses.append(loss.detach())
print("losses", (out.losses - torch.stack(losses)).abs().max())
for k, name in enumerate(out.grads):
    print(name, (out.grads[name] - torch.stack([row[k] for row in rows])).abs().max())
"""


@dataclass(frozen=True)
class Built:
    """A program that can be run.  mixes: whether its samples are meant to mix.  counts: it computes with their number.
    rough: float32 is on the way.
    """

    program: Program
    code: str
    model: nn.Module
    loss: Callable[..., Tensor]
    batch_dim: Any
    mixes: bool
    counts: bool
    rough: bool
    draw: Callable[[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def build(program: Program) -> Built:
    """The objects of a program.  Raises `Misfit`."""
    w = elaborate(program, OPS)
    code, names = module_code(w), {"torch": torch, "nn": nn, "F": F}
    file = f"fuzz-{program.name}.py"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = names["Model"]().double()  # type: ignore[operator]
    draws = names["draw"]

    def draw(batch: int, seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs, targets = draws(batch)  # type: ignore[operator]
        return inputs, targets

    dims = (batch_dims(w), 0 if w.target else None)
    return Built(program, code, model, names["loss_fn"], dims, w.mixes, w.counts, w.rough, draw)  # type: ignore[arg-type]


def batch_dims(w: Writer) -> tuple[int, ...]:
    """Where each input has its samples."""
    return (w.program.batch_dim, *[0] * len(w.data))


def module_code(w: Writer) -> str:
    """The class `Model`, the function `loss_fn` and the function `draw`."""
    setup = [f"self.{n} = nn.Parameter(0.5 * torch.randn({list(s)}) + 0.1)" for n, s in w.parameters.items()] + w.setup
    arguments = ", ".join(["x", *(d.name for d in w.data)])
    output = w.values[w.program.loss.id]
    x = Data("x", w.program.sizes)
    inputs = [x.code("b", w.program.batch_dim), *(d.code("b") for d in w.data)]
    target = f"({w.target.code('b')},)" if w.target else "()"
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in setup),
        "",
        f"    def forward(self, {arguments}):",
        *(f"        {line}" for line in w.lines),
        f"        return {output.name}",
        "",
        "",
        f"def loss_fn(o{', t' if w.target else ''}):",
        *(f"    {line}" for line in w.loss_lines),
        "",
        "",
        "def draw(b):",
        f"    return ({', '.join(inputs)},), {target}",
    ]
    return "\n".join(lines) + "\n"


def script(program: Program, quantities: str = "psg_fx.Grads()") -> str:
    """A file that shows the difference (or the error) when it is run."""
    w = elaborate(program, OPS)
    dims = batch_dims(w)
    head = ["import torch", "import torch.nn.functional as F", "from torch import nn", "", "import psg_fx", "", ""]
    calls = [
        f"B, dims = {program.batches[0]}, {dims}",
        "torch.manual_seed(0)",
        "model = Model().double()",
        f"step = psg_fx.transform(model, loss_fn, quantities=[{quantities}], backend='eager', "
        f"batch_dim=(dims, {0 if w.target else None}))",
        "for B in " + repr(program.batches) + ":",
        "    torch.manual_seed(1)",
        "    inputs, targets = draw(B)",
        "    out = step(inputs, targets) if targets else step(inputs)",
    ]
    if program.plan:  # the plan is a part of what fails
        head[4:4] = ["from fuzz.plans import drawn  # with tests/ on the path"]
        calls[calls.index("    out = step(inputs, targets) if targets else step(inputs)")] = (
            f"    with drawn({program.plan}):\n        out = step(inputs, targets) if targets else step(inputs)"
        )
    note = [f"# {line}" for line in program.note.splitlines()]
    return (
        "\n".join([*note, *head, module_code(w), "", *calls, *indent(_TRUTH.strip("\n"), "    ").splitlines()]) + "\n"
    )
