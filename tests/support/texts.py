"""Rows of calls that are refused, each with the whole text that its user gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from psg_fx.errors import PsgError

Row = tuple[Callable[[], Any], type[PsgError], str, str, str, str]
"""The call, the kind of its error, and of the text what, where, why and fix."""


def without_numbers(text: str) -> str:
    """A text without the numbers of lines."""
    return re.sub(r"(\.py):\d+:", r"\1:<line>:", text)


def check_refusal(row: Row) -> None:
    """The call is refused in these words."""
    call, kind, what, where, why, fix = row
    with pytest.raises(PsgError) as caught:
        call()
    text = re.sub(r"%normalised_\d+;", "%normalised;", without_numbers(str(caught.value)))
    assert text == f"{what}\n  where  {where}\n  why    {why}\n  fix    {fix}"
    assert type(caught.value) is kind
