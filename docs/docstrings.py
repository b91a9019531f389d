"""How `make docs` reads docstrings: `name: what it is.` at the start of a line or sentence becomes a list's item."""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"(?:^|(?<=\.)  ?)`?([a-z_]+(?:, [a-z_]+)*)`?: (?=\S)", re.M)


class Items(griffe.Extension):
    """Docstrings with sections (`Args:`) are left as they are."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring and "Args:" not in obj.docstring.value:
            obj.docstring.value = ITEM.sub(r"\n\n- **`\1`**: ", obj.docstring.value)
