"""One program, held against the float64 loop over single samples: exact, refused, or a failure."""

from __future__ import annotations

import math
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import psg_fx
from fuzz.plans import drawn
from fuzz.program import Misfit, Program
from fuzz.quantities import SETS, given, groups, has_groups
from fuzz.source import Built, build
from psg_fx.errors import BadArgument, InternalError, PsgError
from psg_fx.reference.definitions import Definition, definitions_for, of_groups
from support import oracle

TOLERANCE, ROUGH, VANISHING = 1e-8, 1e-4, 1e-12
OF_VANISHING = 1e-6
"""Found by Gram matrices a norm is off by √ε·S where terms of size S cancel (docs/private.md)."""
FAILURES = ("wrong", "mixed", "crash", "warning")
SAID_ONCE = re.compile("one graph for each batch size")
Truth = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """kind: ok, refused, discarded, or one of `FAILURES`.  reason: what happened, without names and numbers."""

    kind: str
    reason: str = ""
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


def check(program: Program, backend: str = "eager") -> Outcome:
    """Run the program and compare every quantity at every batch size."""
    try:
        built = build(program)
    except Misfit as misfit:
        return Outcome("discarded", f"misfit: {misfit}")
    with warnings.catch_warnings(record=True) as ordinary:
        warnings.simplefilter("always")
        try:
            truths = {b: truth(built, b) for b in program.batches if b}
            apart = not built.mixes or all(stays_apart(built, b) for b in program.batches if b)
        except Exception as error:
            return Outcome("discarded", f"does not run: {brief(error)}", traceback.format_exc())
    if not all(v.isfinite().all() for losses, grads in truths.values() for v in (losses, *grads.values())):
        return Outcome("discarded", "not finite")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = answered(built, truths, backend)
    if found.kind != "ok":
        return found
    if not apart:
        return Outcome("mixed", "a program whose samples mix was answered")
    known = {str(w.message) for w in ordinary}
    said = [str(w.message) for w in seen if str(w.message) not in known and not expected_warning(w)]
    return Outcome("warning", said[0].splitlines()[0], said[0]) if said else found


def expected_warning(found: warnings.WarningMessage) -> bool:
    """psg_fx's own word to the user, and what torch says of its own code."""
    return bool(SAID_ONCE.search(str(found.message))) or issubclass(found.category, (DeprecationWarning, FutureWarning))


def truth(built: Built, batch: int, nudge: float = 0.0) -> Truth:
    """Losses and gradients of single samples, the data moved by a relative `nudge`."""
    inputs, targets = built.draw(batch, batch)
    if nudge:
        generator = torch.Generator().manual_seed(7)
        inputs = tuple(
            x * (1 + nudge * torch.randn(x.shape, generator=generator, dtype=x.dtype)) if x.is_floating_point() else x
            for x in inputs
        )
    return oracle.loop_grads(built.model, built.loss, inputs, targets or None, batch_dim=built.batch_dim)


def stays_apart(built: Built, batch: int) -> bool:
    """Whether the ordinary model gives every sample the same output beside other samples."""
    if built.program.loss.op == "loss.penalised":
        return True  # one number for the batch: its gradients say
    inputs, _ = built.draw(batch, batch)
    others, _ = built.draw(batch, batch + 1)
    with torch.no_grad():
        whole = built.model(*inputs)
        for i in range(batch):
            mine = torch.arange(batch) == i
            beside = (
                torch.where(mine.view(-1, *[1] * (x.ndim - d - 1)), x, y)
                for x, y, d in zip(inputs, others, built.batch_dim[0], strict=True)
            )
            if not torch.allclose(whole[i], built.model(*beside)[i], rtol=1e-6, atol=1e-9, equal_nan=True):
                return False
    return True


def answered(built: Built, truths: Mapping[int, Truth], backend: str) -> Outcome:
    """What the step says."""
    typical = oracle.norms(next(iter(truths.values()))[1]).median().item()
    quantities = SETS[built.program.quantities](0.7 * typical if typical >= VANISHING else 1.0)
    parameters = dict(built.model.named_parameters())

    reached = any(g.any() for _, grads in truths.values() for g in grads.values())
    named = None if reached else list(parameters)  # a loss that no parameter reaches is refused, unless they are named

    def run() -> Outcome:
        step = psg_fx.transform(
            built.model, built.loss, quantities=quantities, backend=backend, batch_dim=built.batch_dim, params=named
        )
        for batch in built.program.batches:
            inputs, targets = built.draw(batch, batch)
            extra = given(quantities, parameters, batch)
            with drawn(built.program.plan):
                out = step(inputs, targets, **extra) if targets else step(inputs, **extra)
            checks, notes = definitions_for(quantities, extra)
            assert not notes
            for one in checks if batch else ():
                if wrong := compare(built, one, getattr(out, one.field), truths[batch], partial(truth, built, batch)):
                    return Outcome("wrong", one.field, f"{one.field} at B = {batch}: {wrong}")
        return in_groups(built, step, quantities, truths) if has_groups(built.program.name) else Outcome("ok")

    return judged(run)


def in_groups(built: Built, step: Any, quantities: list[Any], truths: Mapping[int, Truth]) -> Outcome:
    """What the step says of groups of samples: whose gradients are the sums of theirs."""
    for batch, known in truths.items():
        ids, count = groups(built.program.name, batch)
        inputs, targets = built.draw(batch, batch)
        extra = given(quantities, dict(built.model.named_parameters()), count)
        with drawn(built.program.plan):
            out = step(inputs, *([targets] if targets else []), groups=ids, num_groups=count, **extra)
        expected, nudged = grouped(known, ids, count), partial(truth_of_groups, built, batch, ids, count)
        for one in definitions_for(quantities, extra)[0]:
            if not one.of_samples and (wrong := compare(built, one, getattr(out, one.field), expected, nudged)):
                return Outcome("wrong", one.field, f"{one.field} of groups {ids.tolist()} of {count}: {wrong}")
    return Outcome("ok")


def grouped(found: Truth, ids: Tensor, count: int) -> Truth:
    return found[0], of_groups(found[1], ids, count)


def truth_of_groups(built: Built, batch: int, ids: Tensor, count: int, nudge: float) -> Truth:
    return grouped(truth(built, batch, nudge), ids, count)


def judged(run: Callable[[], Outcome]) -> Outcome:
    """What a run gives; an error is a refusal, or a failure of psg_fx."""
    try:
        return run()
    except (BadArgument, InternalError) as error:
        return Outcome("crash", brief(error), traceback.format_exc())
    except PsgError as error:
        return Outcome("refused", brief(error), str(error))
    except Exception as error:
        return Outcome("crash", brief(error), traceback.format_exc())


def compare(built: Built, one: Definition, found: Any, expected: Truth, nudged: Callable[[float], Truth]) -> str:
    """What is wrong, or nothing; what the program itself does to a tiny change of its data is not an error.

    nudged: what is expected where the data are moved by so much.
    """
    limit = ROUGH if built.rough else TOLERANCE
    if one.field == "clip_factors" and built.program.quantities == "automatic" and _vanishes(expected[1]):
        limit = max(limit, OF_VANISHING / 0.01)  # which is added to a norm
    wanted = one.expected(*expected)
    largest = max((g.abs().max().item() for g in expected[1].values() if g.numel()), default=0.0)
    if largest < VANISHING:  # all terms cancel, of a size of about 1
        limit = max(limit, OF_VANISHING) if one.field == "norms" else limit
        return "" if distance(found, wanted, 1.0) <= limit else f"{one.field} where the gradient vanishes"
    squared = one.field in ("gram", "second_moment")
    floor = 1e-6 * largest ** (2 if squared else 1)  # what cancels is zero up to rounding
    error = distance(found, wanted, floor)
    if error <= limit:
        return ""
    noise = distance(one.expected(*nudged(1e-11)), wanted, floor)
    if error <= 100 * noise:
        return ""
    return f"relative error {error:.1e} (a change of 1e-11 makes {noise:.1e})"


def _vanishes(grads: Mapping[str, Tensor]) -> bool:
    """Whether all terms cancel in the gradient of a sample."""
    return bool((oracle.norms(dict(grads)) < VANISHING).any())


def distance(found: Any, wanted: Any, floor: float) -> float:
    """The largest difference of all entries, relative to the largest entry; infinite for other names or shapes.

    floor: what a difference is relative to at least.
    """
    if isinstance(wanted, Mapping):
        if set(found) != set(wanted):
            return math.inf
        floor = max([floor, *(1e-3 * w.abs().max().item() for w in wanted.values() if w.numel())])
        return max((_distance(found[n], w, floor) for n, w in wanted.items()), default=0.0)
    return _distance(found, wanted, floor)


def _distance(found: Tensor, wanted: Tensor, floor: float) -> float:
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    difference = (found.detach().double() - wanted.double()).abs().max().item()
    scale = max(wanted.abs().max().item(), floor, 1e-12)
    return difference / scale if difference == difference else math.inf


def brief(error: BaseException) -> str:
    """An error in one line, without names and numbers of a program."""
    text = f"{error.what}; {error.why}" if isinstance(error, PsgError) else str(error).strip().split("\n")[0]
    text = re.sub(r"%\w+|'[^']*'|\bh\d+\b|\bs\d+\b", "_", text)
    return f"{type(error).__name__}: " + re.sub(r"\d+", "N", text)[:160]
