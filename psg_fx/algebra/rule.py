"""Rules of gradients; the words that they are written in are in `arrange.py`.

A rule says what the gradient of one sample is, as a network for each parameter operand of a site.  It does not know
what is asked, emits no node and picks no order.  An operand that no rule covers gets the fallback: a dense network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from psg_fx import op_table
from psg_fx.algebra.network import Network
from psg_fx.algebra.site import Site
from psg_fx.op_table import GradientRule

Networks = Mapping[str, "Network | None"]
"""Operand name -> its network; None (or a missing name) where the rule does not cover this case."""

Rule = Callable[[Site], Networks]
OperandRule = Callable[[Site, int], Network | None]
"""(site, position of the operand) -> its network, or None where the rule does not cover this case."""


def rule(*targets: Any, params: Mapping[str, int | str]) -> Callable[[Rule], Rule]:
    """Register a rule for ops; `params` says at which arguments it has networks for parameters: 1 is the second one,
    "1.0" the first of a list there.
    """
    places = {name: str(position) for name, position in params.items()}

    def register(function: Rule) -> Rule:
        op_table.enter(*targets, gradient=GradientRule(function, places))
        return function

    return register


def class_rule(name: str) -> Callable[[OperandRule], OperandRule]:
    """Register a rule for a class of ops, where they have none; it is asked for one operand position at a time."""

    def register(function: OperandRule) -> OperandRule:
        op_table.enter(name, gradient=GradientRule(function, None))
        return function

    return register


def registered() -> dict[str, str]:
    """Every op that has a rule of its own -> the rule's name."""
    rules = {op_table.printed(key): said.gradient for key, said in op_table.rows().items()}
    return {name: found.function.__name__ for name, found in rules.items() if found and found.params is not None}


def networks_of(site: Site) -> dict[int, tuple[Network | None, str]]:
    """For each parameter operand of the site, by position: its network (None: fallback) and the rule's name.

    Rules are written for real values; complex ones are left to autograd.
    """
    if site.is_complex:
        return {operand.position: (None, "fallback") for operand in site.operands}
    found: dict[int, tuple[Network | None, str]] = {}
    own = op_table.known(site.target).gradient
    made = own.function(site) if own is not None else {}
    names = {position: name for name, position in own.params.items()} if own is not None and own.params else {}
    for operand in site.operands:
        name = names.get(operand.argument)
        network = made.get(name) if name is not None else None
        by = own.function.__name__ if own is not None and network is not None else ""
        if network is None:
            network, by = _by_class(site, operand.position)
        found[operand.position] = (network, by)
    return found


def _by_class(site: Site, position: int) -> tuple[Network | None, str]:
    of_class = op_table.row(op_table.POINTWISE).gradient
    if of_class is not None and torch.Tag.pointwise in getattr(site.target, "tags", ()):
        network = of_class.function(site, position)
        if network is not None:
            return network, of_class.function.__name__
    return None, "fallback"
