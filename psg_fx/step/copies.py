"""Copies of a step, by `copy.deepcopy`, `pickle` and `torch.save`: its settings, its model and its loss.

What a step has captured and compiled belongs to one model in one process, so a copy captures anew at its first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

CARRIED = ("model", "loss_fn", "settings")
"""What a step is made of, for good."""
SHARED = ("_parameters", "_buffers", "_modules")
"""What it has of its model."""


def carried(step: nn.Module) -> dict[str, Any]:
    """What a copy is made of: what `transform` was given, and the step's own hooks and flags.

    The parts are copied with whatever holds the step, so a loss that refers to the model refers to the copied model.
    """
    own = vars(nn.Module()).keys() - set(SHARED)
    return {name: value for name, value in vars(step).items() if name in own or name in CARRIED}


def restore(step: nn.Module, state: Mapping[str, Any]) -> None:
    """Make a step of what `carried` returned."""
    type(step).__init__(step, *(state[name] for name in CARRIED))
    vars(step).update({name: value for name, value in state.items() if name not in CARRIED})
