"""A random program as data: instructions with the choices that each has made, and what is known of every value.

A function of the grammar writes the code of an instruction and asks for each choice by name.  While a program is
generated the answers are drawn; when it is replayed they are those of the instruction, or the simplest one where an
answer no longer fits.  So an instruction can be left out or a size changed, and the rest is written anew around it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")


class Misfit(Exception):
    """An instruction cannot be written here."""


@dataclass
class Instruction:
    """One step.  source: the id of its main operand (0: the input); choices by name, ids of others under `@name`."""

    id: int
    op: str
    source: int = 0
    choices: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """All that determines a program.

    sizes: of the input without its samples.  batches: the sizes of the calls, the first one captures.
    batch_dim: where the input has its samples.  quantities: what is asked (a name in `quantities.py`).
    tied: most parameters are used several times.  plan: 0 for the cheapest, else one drawn with that seed.
    """

    name: str
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    batch_dim: int
    quantities: str
    tied: bool
    plan: int
    body: tuple[Instruction, ...]
    loss: Instruction
    note: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        """The inverse of `to_json`."""
        found = json.loads(text)
        body = tuple(Instruction(**i) for i in found.pop("body"))
        loss = Instruction(**found.pop("loss"))
        sizes, batches = tuple(found.pop("sizes")), tuple(found.pop("batches"))
        return Program(**found, sizes=sizes, batches=batches, body=body, loss=loss)

    def changed(self, **changes: Any) -> Program:
        """A copy."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Val:
    """A value of the forward pass.  sizes: as for one sample; dim `dim` has outer · B · inner entries in that order."""

    name: str
    sizes: tuple[int, ...]
    dim: int | None = 0
    outer: int = 1
    inner: int = 1

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def plain(self) -> bool:
        """Whether the samples are dim 0 and nothing else is."""
        return (self.dim, self.outer, self.inner) == (0, 1, 1)

    @property
    def free(self) -> list[int]:
        """The dims without samples."""
        return [d for d in range(self.ndim) if d != self.dim]

    @property
    def count(self) -> int:
        """Elements of one sample."""
        return math.prod(self.sizes)

    def size(self, d: int) -> str:
        """The code of a size."""
        if d != self.dim:
            return str(self.sizes[d])
        return times(self.outer, "b", self.inner)

    def shape(self, **changed: Any) -> str:
        """The code of all sizes; `d3="5"` stands for another size of dim 3."""
        return ", ".join(changed.get(f"d{d}", self.size(d)) for d in range(self.ndim))


def times(*factors: Any) -> str:
    """The code of a product, without ones."""
    return " * ".join(str(f) for f in factors if f != 1) or "1"


@dataclass(frozen=True)
class Data:
    """A further input or the target: its sizes without samples, and the code that draws it, with `{shape}` in it."""

    name: str
    sizes: tuple[int, ...]
    draw: str = "torch.randn({shape}, dtype=torch.float64)"

    def code(self, batch: str, dim: int = 0) -> str:
        sizes = [str(s) for s in self.sizes]
        return self.draw.format(shape="(" + ", ".join([*sizes[:dim], batch, *sizes[dim:]]) + ",)")


class Writer:
    """Writes the code of a program, instruction by instruction.

    rng: answers what an instruction leaves open; None: the first (simplest) option does.
    """

    def __init__(self, program: Program, rng: random.Random | None) -> None:
        self.program, self.rng = program, rng
        self.lines: list[str] = []
        self.setup: list[str] = []
        self.loss_lines: list[str] = []
        self.parameters: dict[str, tuple[int, ...]] = {}
        self.uses: list[str] = []
        self.data: list[Data] = []
        self.target: Data | None = None
        self.values: dict[int, Val] = {}
        self.mixes = False
        self.counts = False
        self.rough = False
        self.now: Instruction = Instruction(0, "")
        self._names = 0

    def pick(self, name: str, options: Sequence[T]) -> T:
        """One of the options, the simplest first."""
        if not options:
            raise Misfit(f"{self.now.op}: nothing to choose for {name}")
        given = self.now.choices.get(name)
        known = [_plain(o) for o in options]
        if given not in known:
            chosen = 0 if self.rng is None else self.rng.randrange(len(options))
            if given is None or self.rng is not None:
                self.now.choices[name] = known[chosen]
            return options[chosen]
        return options[known.index(given)]

    def flag(self, name: str, odds: float = 0.5) -> bool:
        """Whether to do something special."""
        return self.pick(name, [False, True] if odds >= 0.5 else [False] * round(1 / odds - 1) + [True])

    def operand(self, name: str, fits: Callable[[Val], bool]) -> Val:
        """Another value computed before."""
        return self.values[self.pick("@" + name, [k for k, v in self.values.items() if fits(v)])]

    def fresh(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def line(self, code: str) -> None:
        """A line of forward."""
        self.lines.append(code)

    def emit(self, code: str, sizes: Sequence[int], dim: int | None = 0, outer: int = 1, inner: int = 1) -> Val:
        """A new value."""
        if math.prod(sizes) > 400 or len(sizes) > 6:
            raise Misfit("too large")
        name = self.fresh("h")
        self.line(f"{name} = {code}")
        return Val(name, tuple(sizes), dim, outer, inner)

    def like(self, x: Val, code: str) -> Val:
        """A new value of the shape of x."""
        return self.emit(code.replace("{x}", x.name), x.sizes, x.dim, x.outer, x.inner)

    def resized(self, x: Val, code: str, d: int, size: int) -> Val:
        """A new value with another size in a dim without samples."""
        sizes = [size if k == d else s for k, s in enumerate(x.sizes)]
        return self.emit(code.replace("{x}", x.name), sizes, x.dim, x.outer, x.inner)

    def without(self, x: Val, code: str, d: int) -> Val:
        """A new value without dim d."""
        sizes = [s for k, s in enumerate(x.sizes) if k != d]
        dim = None if x.dim is None else x.dim - (d < x.dim)
        return self.emit(code.replace("{x}", x.name), sizes, dim, x.outer, x.inner)

    def stored(self, shape: Sequence[int]) -> str:
        """A new parameter."""
        name = f"p{len(self.parameters)}"
        self.parameters[name] = tuple(shape)
        return f"self.{name}"

    def made(self, stem: str, code: str) -> str:
        """An attribute of the model, made in __init__."""
        name = self.fresh(stem)
        self.setup.append(f"self.{name} = {code}")
        return f"self.{name}"

    def stat(self, size: int, draw: str) -> str:
        """A buffer."""
        name = self.fresh("stat")
        self.setup.append(f"self.register_buffer('{name}', torch.{draw}({size}))")
        return f"self.{name}"

    def given(self, sizes: Sequence[int], draw: str = Data.draw) -> Val:
        """A further input of the model."""
        made = Data(f"x{len(self.data) + 2}", tuple(sizes), draw)
        self.data.append(made)
        return Val(made.name, (1, *sizes))


def _plain(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option


def elaborate(
    program: Program, ops: dict[str, Callable[[Writer, Val], Val]], rng: random.Random | None = None
) -> Writer:
    """The program as code.  Raises `Misfit`."""
    w = Writer(program, rng)
    dim, sizes = program.batch_dim, program.sizes
    w.values[0] = Val("x", (*sizes[:dim], 1, *sizes[dim:]), dim)
    w.line(f"b = x.shape[{dim}]")
    for w.now in (*program.body, *([program.loss] if program.loss.op else [])):
        x = w.values.get(w.now.source)
        if x is None or w.now.op not in ops:
            raise Misfit(f"{w.now.op}: no operand")
        w.values[w.now.id] = ops[w.now.op](w, x)
    return w
