"""Numbers of per-sample gradients in the logs of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from psg_fx.errors import BadArgument
from psg_fx.integrations.measures import Measure
from psg_fx.quantities.base import Quantity


class GradientStatistics(Callback):  # type: ignore[misc]
    """Measures the gradients of every n-th training batch, and logs to all loggers of the Trainer.

        Trainer(callbacks=[GradientStatistics(F.cross_entropy, every=50)])

    logs `gradients/norms_median` and other quantiles, `gradients/noise_scale` and what it follows from (left out where
    the noise hides the signal, which needs more samples than the noise scale).  Loggers with histograms (TensorBoard)
    have them too.  Training is what it would be without: draws of dropout are undone, `p.grad` is not touched.

    Args:
        loss_fn: `loss_fn(output, *targets)`, as in `psg_fx.transform`.
        every: batches.
        model: the name of the submodule that is the model; "": the LightningModule, by its forward.
        prepare: of a batch, as in `psg_fx.over`; None: batches are `(inputs, targets)`, or dicts.
        quantities: of psg_fx; `Norms()` and `measures.NOISE_SCALE` by default.
        options: of `psg_fx.transform`, such as `backend` and `params`.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], every: int = 100, *, model: str = "",
        prepare: Callable[[Any], Any] | None = None, quantities: Quantity | Sequence[Quantity] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.measure = Measure(every, loss_fn, quantities, prepare, options)
        self._model, self._seen = model, 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before anything is trained: whether there is such a model."""
        self._of(pl_module)

    def _of(self, pl_module: LightningModule) -> nn.Module:
        try:
            found: nn.Module = pl_module.get_submodule(self._model)
        except AttributeError as error:
            names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise BadArgument(
                f"the LightningModule has no submodule {self._model!r}", where="GradientStatistics(model=...)",
                why=f"its submodules are {names}", fix="name one of those, or leave model out",
            ) from error  # fmt: skip
        return found

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After every batch."""
        self._seen += 1
        if self._seen % self.measure.every or not trainer.is_global_zero:
            return
        with trainer.precision_plugin.train_step_context():
            numbers, rows = self.measure.of(self._of(pl_module), [batch])
        logs = {f"gradients/{name}": value for name, value in numbers.items()}
        pl_module.log_dict(logs, logger=False)  # for callbacks that monitor them
        for logger in trainer.loggers:  # now, whatever log_every_n_steps is
            logger.log_metrics(logs, step=trainer.global_step)
            if (histogram := getattr(logger.experiment, "add_histogram", None)) is not None:
                for field, value in rows.items():
                    histogram(f"gradients/{field}", value.float(), trainer.global_step)
