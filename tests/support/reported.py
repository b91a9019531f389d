"""Steps for tests of the report: small ones of the zoo, and one whose names are markup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import psg_fx
from psg_fx import zoo

EVIL = "</script><img src=x onerror=hit=1>"
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 3},
    "simplecnn": {"batch": 2, "image": 10, "width": 4, "hidden": 8},
    "gpt": {"batch": 2, "layers": 2, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 11},
    "lstm": {"batch": 2, "tokens": 4, "vocabulary": 11, "width": 6, "hidden": 5},
}


class Evil(nn.Module):
    """Its parameters and its source lines are markup, for who takes them as such."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, EVIL)(x) * len("</script><script>hit=2</script>\u2028<!-- @DATA@ @SCRIPTS@")


def made(
    model: nn.Module, loss_fn: Callable[..., Tensor] | None, *batch: Any, **options: Any
) -> psg_fx.PerSampleModule:
    """A step that has been called."""
    step = psg_fx.transform(model, loss_fn, backend="eager", **options)
    step(*(batch if loss_fn else batch[:1]))
    return step


def example(name: str, **options: Any) -> psg_fx.PerSampleModule:
    ex = zoo.example(name, **SIZES[name])
    options.setdefault("quantities", psg_fx.ClippedSum(max_norm=1.0))
    return made(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim, **options)
