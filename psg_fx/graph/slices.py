"""A model of which every process of a group has slices: said of a whole graph."""

from __future__ import annotations

from dataclasses import dataclass

from psg_fx.graph.facts import Entry


@dataclass(frozen=True)
class Slices:
    """group: the name of the processes that have the model together.  parameters: the names of those that are sliced,
    of all names of tied ones.  Every other parameter, every buffer and every input is equal in all of them.
    """

    group: str
    parameters: frozenset[str]


SLICES = Entry[Slices]("slices")
"""Of graphs that compute together with those of other processes alone; none where this process has all."""
