"""The table of rules, and the words rules are written in.

A rule says what the gradient of one sample is, as a network for each parameter operand of a site.  It does not know
what is asked, emits no node and picks no order.  An operand that no rule covers gets the fallback: a dense network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from psg_fx.algebra.network import Network
from psg_fx.algebra.site import Site

Networks = Mapping[str, "Network | None"]
"""Operand name -> its network; None (or a missing name) where the rule does not cover this case."""

Rule = Callable[[Site], Networks]

_RULES: dict[Any, tuple[Rule, Mapping[str, str]]] = {}
_CLASS_RULES: list[tuple[Callable[[Any], bool], Callable[[Site, int], Network | None]]] = []


def rule(*targets: Any, params: Mapping[str, int | str]) -> Callable[[Rule], Rule]:
    """Register a rule for ops; `params` says at which arguments it has networks for parameters: 1 is the second one,
    "1.0" the first of a list there.
    """

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"two rules for {target}: {_RULES[target][0].__name__} and {function.__name__}")
            _RULES[target] = (function, {name: str(position) for name, position in params.items()})
        return function

    return register


def class_rule(covers: Callable[[Any], bool]) -> Callable[..., Any]:
    """Register a rule for every op that `covers` says yes to; it is asked for one operand position at a time."""

    def register(function: Callable[[Site, int], Network | None]) -> Callable[[Site, int], Network | None]:
        _CLASS_RULES.append((covers, function))
        return function

    return register


def registered() -> dict[Any, str]:
    """Every op that has a rule -> the rule's name."""
    return {target: function.__name__ for target, (function, _) in _RULES.items()}


def networks_of(site: Site) -> dict[int, tuple[Network | None, str]]:
    """For each parameter operand of the site, by position: its network (None: fallback) and the rule's name.

    Rules are written for real values; complex ones are left to autograd.
    """
    if site.is_complex:
        return {operand.position: (None, "fallback") for operand in site.operands}
    found: dict[int, tuple[Network | None, str]] = {}
    function, params = _RULES.get(site.target, (None, {}))
    made = function(site) if function is not None else {}
    names = {position: name for name, position in params.items()}
    for operand in site.operands:
        name = names.get(operand.argument)
        network = made.get(name) if name is not None else None
        by = function.__name__ if function is not None and network is not None else ""
        if network is None:
            network, by = _by_class(site, operand.position)
        found[operand.position] = (network, by)
    return found


def _by_class(site: Site, position: int) -> tuple[Network | None, str]:
    for covers, function in _CLASS_RULES:
        if covers(site.target) and (network := function(site, position)) is not None:
            return network, function.__name__
    return None, "fallback"


# --- the words of rules -------------------------------------------------------------------------------------------
