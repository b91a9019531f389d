"""What of torch is private is used in one folder, but for what torch itself hands to those who extend it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [p for folder in ("psg_fx", "passes") for p in sorted((ROOT / folder).rglob("*.py"))]
PRIVATE = re.compile(r"torch(\.\w+)*\._(C\b|[a-z]\w*)")
ALLOWED = re.compile(
    r"torch\.(_ops|utils\._pytree|_assert|_foreach_\w+|_grouped_mm|_nested_tensor_from_mask|_safe_softmax"
    r"|ops\._c10d_functional)\b"
)
"""Types of ops and trees, for which there are no other names, and functions that have no name without an underscore."""
CONTENDER = "expanded_weights.py"
"""The library that a benchmark asks is a private one of torch's."""


def names(path: Path) -> Iterator[str]:
    """Every name of torch in a file, as far as dots lead."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_what_is_private_has_one_home() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES if "torch_private" not in path.parts and path.name != CONTENDER
        for name in names(path) if PRIVATE.match(name) and not ALLOWED.match(name)
    }  # fmt: skip
    assert not found


@pytest.mark.parametrize(
    "name",
    ["torch._C._nn", "torch._C.TensorBase", "torch._inductor.config", "torch.fx.experimental._config", "torch._dynamo"],
)
def test_private_names_are_told_apart(name: str) -> None:
    assert PRIVATE.match(name)
    assert not ALLOWED.match(name)
