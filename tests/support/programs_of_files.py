"""Files of steps: without what is compiled, the program of torch.export in them is called; and what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psg_fx.saved import write
from psg_fx.step import loaded


def call_the_program(patch: pytest.MonkeyPatch) -> None:
    """From here on nothing is compiled for a file, and a file that is read calls the program in it."""
    patch.setattr(write, "compiled_files", lambda program, options: [])
    for reader in (write, loaded):
        patch.setattr(reader, "load_compiled", lambda path: torch.export.load(path).module())


def same(found: Any, expected: Any) -> None:
    """The same fields, with the same values."""
    theirs = {k: v for k, v in vars(found).items() if k != "buffers"}
    assert theirs.keys() == vars(expected).keys()
    torch.testing.assert_close(theirs, dict(vars(expected)), rtol=1e-4, atol=1e-6, equal_nan=True)
