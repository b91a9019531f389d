"""Plans drawn at random: every legal order of contraction must give the same numbers.

The programs are small, so that the planner's cheapest plan is nearly always the same kind.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

from psg_fx.planner import search

SPREAD = 6.0


@contextlib.contextmanager
def drawn(seed: int) -> Iterator[None]:
    """The planner sees random prices while this is open; with 0 its own."""
    right = search._priced

    def priced(*given: Any, **named: Any) -> list[Any]:
        found = []
        for option in right(*given, **named):
            factor = 2.0 ** random.Random(f"{seed}/{option.tree}").uniform(-SPREAD, SPREAD)
            found.append(type(option)(option.tree, {key: s * factor for key, s in option.nodes.items()}))
        return sorted(found, key=lambda option: option.seconds)

    with mock.patch.object(search, "_priced", priced) if seed else contextlib.nullcontext():
        yield
