"""Which programs of a long list the ordinary run takes; `make test-all` runs the whole list."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def selected(programs: Iterable[Any], chosen: Container[str]) -> list[Any]:
    """The programs as parameters of a test, those whose name is not `chosen` marked `rest`."""
    return [pytest.param(p, id=p.name, marks=[] if p.name in chosen else pytest.mark.rest) for p in programs]
