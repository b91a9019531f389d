"""Which rules must answer for the parameters of a row, and which did."""

from __future__ import annotations

from typing import Any

import torch

import psg_fx.passes.pipeline  # noqa: F401  (registers every rule)
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.algebra.rule import registered
from support.cases import Case

FALLBACK = "fallback"
GENERAL = ("prefix", "uses", "layers", "traps", FALLBACK)
"""First words of rows that are not named for an op."""


def row_of(target: object) -> set[str]:
    """The first words of row names that an op may have: `conv2d.padding` is met by the rows `conv2d/...`."""
    name = str(target).removeprefix("aten.").removeprefix("psg_fx.").partition(".")[0]
    return {name, {"_native_batch_norm_legit_no_training": "batch_norm", "dot": "mv"}.get(name, name)}


def named(case: Case) -> set[str]:
    """The rules that the first word of the row stands for."""
    word = case.name.partition("/")[0]
    found = {rule for target, rule in registered().items() if word in row_of(target)}
    if found or not hasattr(torch.ops.aten, word):
        return found
    packet = getattr(torch.ops.aten, word)
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return {"pointwise"} if any(torch.Tag.pointwise in op.tags for op in overloads) else set()


def answers(step: Any) -> dict[str, set[str]]:
    """Parameter -> the rules that answered for its uses."""
    gradients = GRADIENTS.of(step.graphs["networked"])
    return {name: {term.rule for term in gradient.terms} for name, gradient in gradients.items()}


def check_answers(case: Case, step: Any) -> None:
    """The rules that the row is for answered, and the fallback for no parameter but those that the row names."""
    found = answers(step)
    assert {name for name, rules in found.items() if FALLBACK in rules} == set(case.fallback)
    assert case.fallback or case.name.partition("/")[0] != FALLBACK
    used = set().union(*found.values())
    if used <= {FALLBACK}:
        return
    wanted = named(case)
    assert not wanted or wanted & used, f"{case} is for {sorted(wanted)}, and {sorted(used)} answered"
    assert set(case.covers) <= used, f"{case} covers {case.covers}, and {sorted(used)} answered"
    assert wanted or case.covers or case.name.partition("/")[0] in GENERAL, f"{case} names no rule: say covers="
