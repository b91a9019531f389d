"""Files of steps without what is compiled: the program of torch.export in them is called."""

from __future__ import annotations

import pytest
import torch

from psg_fx.saved import write
from psg_fx.step import loaded


def call_the_program(patch: pytest.MonkeyPatch) -> None:
    """From here on nothing is compiled for a file, and a file that is read calls the program in it."""
    patch.setattr(write, "compiled_files", lambda program, options: [])
    for reader in (write, loaded):
        patch.setattr(reader, "load_compiled", lambda path: torch.export.load(path).module())
