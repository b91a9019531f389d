"""A model with a batch, and what a library for per-sample gradients makes of it: exact, refused, wrong, or crashed.

Every suite in this folder lists `Program`s. The tests hold psg_fx against them, and a benchmark asks the same of other
libraries.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import psg_fx
from psg_fx.errors import PsgError
from support import oracle
from support.cases import wavy

TOLERANCE = 1e-8
"""Relative, in float64: what reassociated sums and a few thousand terms of either sign may cost."""

Grads = dict[str, Tensor]
Contender = Callable[["Problem"], Grads]


@dataclass(frozen=True)
class Problem:
    """One program made: inputs as `transform` takes them (tensor, tuple or dict), targets or None."""

    model: nn.Module
    inputs: Any
    targets: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    batch_dim: Any = 0
    out_dim: Any = 0

    @property
    def loss(self) -> Callable[..., Tensor]:
        """The problem's own loss, or the sum of a fixed nonlinear loss of every output."""
        return self.loss_fn or self.of_outputs

    def of_outputs(self, output: Any) -> Tensor:
        """Σ over all floating-point outputs of a loss in which every element of a sample has a part of its own."""
        leaves = pytree.tree_leaves(output)
        dims = spread(self.out_dim, output)
        parts = [wavy(v, d, "sum") for v, d in zip(leaves, dims, strict=True) if is_float(v) and d is not None]
        return torch.stack(parts).sum()


@dataclass(frozen=True)
class Program:
    """A named maker of a problem.

    mixes: words of the refusal, where the samples really mix.  refused: words of the refusal, where they do not and
    psg_fx does not support it yet.  family: the suite that it counts for.
    """

    name: str
    make: Callable[[], Problem]
    mixes: str = ""
    refused: str = ""
    family: str = ""

    def __str__(self) -> str:
        return self.name

    def problem(self) -> Problem:
        """The problem, the same at every call, in float64."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            return self.make()


@dataclass(frozen=True)
class Verdict:
    """kind: "exact", "mixes" (refused because samples mix), "refused" (for another reason), "wrong" or "crashed"."""

    kind: str
    error: float = 0.0
    reason: str = ""


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def spread(dims: Any, tree: Any) -> list[Any]:
    """The dim of every leaf, from an int, None, or a tuple that goes with the children of the top level."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(pytree.tree_leaves(tree))
    children = list(tree.values()) if isinstance(tree, Mapping) else list(tree)
    return [d for part, sub in zip(dims, children, strict=True) for d in spread(part, sub)]


def truth(problem: Problem) -> Grads:
    """The judge: a float64 loop over single samples."""
    dims = problem.batch_dim
    return oracle.loop_grads(problem.model, problem.loss, problem.inputs, problem.targets, batch_dim=dims)[1]


def check_learns(program: Program) -> None:
    """A zero gradient agrees with anything: nearly all parameters of a program have another."""
    grads = truth(program.problem()).values()
    assert sum(bool(g.any()) for g in grads) > 0.9 * len(grads)


def with_loss(problem: Problem, backend: str = "eager") -> Grads:
    """psg_fx, the loss inside the step."""
    step = psg_fx.transform(problem.model, problem.loss, batch_dim=problem.batch_dim, backend=backend)
    return dict(step(*batch(problem)).grads)


def drop_in(problem: Problem, backend: str = "eager") -> Grads:
    """psg_fx, the loss outside: only where the loss of the batch is the sum of those of the samples."""
    assert problem.loss_fn is None, "drop_in is for the sum over all outputs"
    dims = problem.batch_dim[0] if isinstance(problem.batch_dim, tuple) else problem.batch_dim
    step = psg_fx.transform(problem.model, batch_dim=dims, backend=backend)
    try:
        problem.loss(call(step, problem.inputs)).backward()
        parameters = oracle.tracked(problem.model, None)
        size = batch_size(problem)
        return {n: getattr(p, "grad_sample", p.data.new_zeros(size, *p.shape)) for n, p in parameters.items()}
    finally:
        for p in problem.model.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]


def batch(problem: Problem) -> Sequence[Any]:
    """The arguments of a step."""
    return (problem.inputs,) if problem.targets is None else (problem.inputs, problem.targets)


def batch_size(problem: Problem) -> int:
    """B."""
    return oracle.flatten_samples(problem.inputs, problem.targets, problem.batch_dim)[3]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model on inputs as `transform` takes them."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def judge(program: Program, contender: Contender = with_loss, want: Grads | None = None) -> Verdict:
    """What `contender` makes of a program; `want`: the truth, if it is known already."""
    try:
        got = contender(program.problem())
    except psg_fx.SamplesMixed as error:
        return Verdict("mixes", reason=str(error))
    except PsgError as error:
        return Verdict("refused", reason=str(error))
    except Exception as error:
        return Verdict("crashed", reason=f"{type(error).__name__}: {error}")
    error = oracle.worst_error(got, truth(program.problem()) if want is None else want)
    return Verdict("exact" if error < TOLERANCE else "wrong", error)


def check(program: Program, contender: Contender = with_loss) -> None:
    """Asserts that psg_fx is exact, or refuses as the program says."""
    verdict = judge(program, contender)
    expected = "mixes" if program.mixes else "refused" if program.refused else "exact"
    assert verdict.kind == expected, verdict
    assert (program.mixes or program.refused) in verdict.reason, verdict.reason


def check_together(
    functions: Mapping[str, Callable[[Any, Tensor], Tensor]], names: Sequence[str],
    make: Callable[[Callable[[Any, Tensor], Tensor]], Problem],
) -> None:  # fmt: skip
    """Several functions of a model and its input, captured in one program: their results beside one another."""

    def together(m: Any, x: Tensor) -> Tensor:
        return torch.cat([functions[name](m, x).flatten(1) for name in names], 1)

    check(Program("-".join(names), lambda: make(together)))


def require_refused(problem: Problem, kind: type[Exception], text: str) -> None:
    """text: a pattern, in which a dot is a line's end, too."""
    with pytest.raises(kind, match=f"(?s){text}"):
        with_loss(problem)
