"""Random programs, each determined by a seed and a number."""

from __future__ import annotations

import random

from fuzz.grammar import FAMILIES, OPS
from fuzz.grammar.mixing import INSIDE, LOSSES
from fuzz.program import Instruction, Misfit, Program, elaborate
from fuzz.quantities import SETS

FOLDED = ("fold.unfold_samples", "fold.block", "layer.linear", "layer.conv", "layer.norm")
WEIGHTS = {
    "fold": 4,
    "view": 3,
    "gather": 1,
    "along": 3,
    "point": 3,
    "layer": 6,
    "attention": 1,
    "recurrent": 1,
    "region": 1,
}
POOLS = ((1, 2, 3, 4), (2, 3), (3,), (2, 4), (2, 3, 5), (4, 6), (1, 3))
MIXING = 0.12
NONE = Instruction(-1, "")


def program(seed: int, number: int, length: int = 6, mixing: float = MIXING) -> Program:
    """Program `number` of a seed, of at most so many instructions."""
    rng = random.Random(f"{seed}/{number}")
    pool = rng.choice(POOLS)
    sizes = tuple(rng.choice(pool) for _ in range(rng.choice((1, 2, 2, 3, 3))))
    batches = (rng.choice((3, 2, 4, 5, *pool)) if rng.random() < 0.85 else 1, *rng.sample((0, 1, 2, 3, 4, 6), 2))
    batch_dim = rng.randrange(len(sizes) + 1) if rng.random() < 0.2 else 0
    empty = Program(
        f"{seed}-{number}",
        sizes,
        batches,
        batch_dim,
        rng.choice(list(SETS)),
        rng.random() < 0.25,
        rng.randrange(4),
        (),
        NONE,
    )
    found = empty
    for _ in range(rng.randint(1, length)):
        found = _longer(found, rng, _family(rng, WEIGHTS))
    if rng.random() >= mixing:
        return _finished(found, rng, "loss")
    if rng.random() < 0.7:
        return _finished(_longer(_longer(found, rng, "mixing"), rng, "layer"), rng, "loss")
    return _finished(found, rng, "mixing loss")


def mixing_programs(seed: int) -> list[Program]:
    """A short program for each way to mix."""
    found = []
    for k, how in enumerate((*INSIDE, *LOSSES)):
        rng = random.Random(f"{seed}/mixing/{k}")
        inside = how in INSIDE
        step = Instruction(2, "mixing.inside" if inside else "mixing loss.over_samples", 1, {"how": how})
        first = (Instruction(1, "layer.linear", 0, {"weight": "own", "how": "F.linear", "with bias": False}),)
        made = Program(f"{seed}-mixing-{k}", (rng.choice((2, 3)), 3), (3, 4), 0, "grads", False, 0, first, NONE)
        made = made.changed(body=(*first, step)) if inside else made.changed(loss=step)
        if inside:
            made = _finished(made, rng, "loss")
        elaborate(made, OPS, rng)
        found.append(made)
    return found


def _family(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _longer(found: Program, rng: random.Random, family: str) -> Program:
    """One more instruction, of another family where this one does not fit."""
    for attempt in range(30):
        name = rng.choice(FAMILIES[family if attempt < 10 or family == "mixing" else _family(rng, WEIGHTS)])
        if family != "mixing" and rng.random() < 0.25:
            name = rng.choice(FOLDED)
        ids = [0, *(i.id for i in found.body)]
        source = ids[-1] if rng.random() < 0.85 else rng.choice(ids)
        tried = found.changed(body=(*found.body, Instruction(len(ids), name, source)))
        try:
            elaborate(tried, OPS, rng)
        except Misfit:
            continue
        return tried
    return found


def _finished(found: Program, rng: random.Random, family: str) -> Program:
    """With a loss."""
    last = found.body[-1].id if found.body else 0
    for _ in range(30):
        tried = found.changed(loss=Instruction(last + 1, rng.choice(FAMILIES[family]), last))
        try:
            elaborate(tried, OPS, rng)
        except Misfit:
            continue
        return tried
    return _finished(found, rng, "loss") if family != "loss" else _finished(found.changed(body=()), rng, "loss")
