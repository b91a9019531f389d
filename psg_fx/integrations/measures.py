"""What callbacks log: numbers of the gradients of some batches, measured without a trace in the training.

noise scale  tr(Σ) / |G|²    (McCandlish et al. 2018, arXiv:1812.06162; both without bias from N samples)
tr(Σ) ≈ N/(N−1) Σ second_moment,    |G|² ≈ |mean_grad|² − tr(Σ)/N
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from psg_fx.api import transform
from psg_fx.errors import BadArgument
from psg_fx.generators import generators_kept
from psg_fx.loops.over import over
from psg_fx.program.changes.effects import nothing_left
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.products import SecondMoment
from psg_fx.quantities.sums import MeanGrad, Norms
from psg_fx.reference.state import unchanged
from psg_fx.step.compiled import StepOutput

NOISE_SCALE: tuple[Quantity, ...] = (SecondMoment(centered=True), MeanGrad())
"""What the gradient noise scale follows from."""

_QUANTILES = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}


class Measure:
    """Measures every n steps: quantities of batches of a model.

    every: steps.  loss_fn, options: as in `psg_fx.transform`.  quantities: norms and the noise scale by default.
    prepare: as in `psg_fx.over`.  Options and quantities that mean nothing are refused here, not at the first measure.
    """

    def __init__(
        self, every: int, loss_fn: Callable[..., Any], quantities: Quantity | Sequence[Quantity] | None = None,
        prepare: Callable[[Any], Any] | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if type(every) is not int or every < 1:
            raise BadArgument(
                f"every={every!r} is not a number of steps", where="GradientStatistics(every=...)",
                why="it says after how many steps gradients are measured again", fix="a positive int",
            )  # fmt: skip
        self.every, self._loss_fn, self._prepare, self._options = every, loss_fn, prepare, options or {}
        several = (quantities,) if isinstance(quantities, Quantity) else quantities
        self._quantities = (Norms(), *NOISE_SCALE) if several is None else tuple(several)
        self._step: Any = None
        transform(
            nn.Linear(1, 1, device="meta"), loss_fn, quantities=self._quantities, **{**self._options, "params": None}
        )

    def of(self, model: nn.Module, batches: Iterable[Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Numbers by name, and what has one for every sample."""
        if self._step is None or self._step.model is not model:
            self._step = transform(model, self._loss_fn, quantities=self._quantities, **self._options)
        roots = (model, self._loss_fn)
        with generators_kept(next(model.parameters()).device), nothing_left(roots), unchanged(*roots):
            out = over(batches, self._step, prepare=self._prepare, progress=False)
        return summary(out), {f: v for f, v in vars(out).items() if isinstance(v, torch.Tensor) and v.ndim == 1}


def summary(out: StepOutput) -> dict[str, float]:
    """The mean loss, quantiles of what has a number for every sample, and the noise scale where it is asked."""
    found = {"loss": out.losses.double().mean().item()}
    for field, value in vars(out).items():
        if field != "losses" and isinstance(value, torch.Tensor) and value.ndim == 1:
            for name, quantile in _QUANTILES.items():
                found[f"{field}_{name}"] = value.double().quantile(quantile).item()
    joins, count = out.joins or {}, len(out.losses)
    if joins.get("second_moment") == "variance" and "mean_grad" in joins and count > 1:
        variance = sum(v.double().sum().item() for v in out.second_moment.values()) * count / (count - 1)
        signal = sum(g.double().square().sum().item() for g in out.mean_grad.values()) - variance / count
        found |= {"noise": variance, "signal": signal}
        if signal > 0:  # hidden in the noise otherwise: more samples would show it
            found["noise_scale"] = variance / signal
    return found
