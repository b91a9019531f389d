"""The list of slow cases names tests that there are."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from support.selection import SLOW

ROOT = Path(__file__).resolve().parents[2]


def test_slow_cases_are_of_functions_that_there_are() -> None:
    named = defaultdict(set)
    for case in SLOW:
        path, _, function = case.partition("[")[0].partition("::")
        named[path].add(function.rpartition("::")[2])
    for path, functions in named.items():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert functions <= there, path
