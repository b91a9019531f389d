"""Numbers of per-sample gradients in the logs of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from psg_fx.errors import BadArgument
from psg_fx.integrations.measures import Measure
from psg_fx.quantities.base import Quantity


def own_loss(output: Any) -> Any:
    """The loss that the model computes itself."""
    return output.loss


class GradientStatistics(TrainerCallback):  # type: ignore[misc]
    """Measures gradients of random training samples every n steps, and logs what the Trainer logs with.

        GradientStatistics(every=50).attach(trainer)

    logs `gradients/norms_median` and other quantiles, `gradients/noise_scale` and what it follows from (left out where
    the noise hides the signal), to `trainer.state.log_history` and wherever else the Trainer reports to; TensorBoard
    has histograms too.  As `callbacks=[GradientStatistics(...)]` it reaches `log_history` alone.  Training is what it
    would be without: samples have a generator of their own, and draws of dropout are undone.

    Args:
        every: steps of the optimizer.
        samples: how many; batch: how many of them at a time.  The noise scale needs more than its own value of them.
        data: a data set of samples to draw from; None: the Trainer's.
        seed: of the samples.
        loss_fn: of the model's output; prepare: of a collated batch, as in `psg_fx.over`.
        quantities: of psg_fx; `Norms()` and `measures.NOISE_SCALE` by default.
        options: of `psg_fx.transform`, such as `backend` and `params`.
    """

    def __init__(
        self, every: int = 100, *, samples: int = 64, batch: int = 16, data: Any = None, seed: int = 0,
        loss_fn: Callable[..., Any] = own_loss, prepare: Callable[[Any], Any] | None = None,
        quantities: Quantity | Sequence[Quantity] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        given: dict[str, Any] = {"samples": samples, "batch": batch}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadArgument(
                    f"{name}={value!r} is not a number of samples", where=f"GradientStatistics({name}=...)",
                    why="so many are drawn of the data", fix="pass an int, 1 or more",
                )  # fmt: skip
        self.measure = Measure(every, loss_fn, quantities, prepare, options)
        self._samples, self._batch, self._data = samples, batch, data
        self._draw = torch.Generator().manual_seed(seed)
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> GradientStatistics:
        """Add it to a Trainer, through which it logs."""
        self._trainer = trainer
        trainer.add_callback(self)
        return self

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every step of the optimizer."""
        if state.global_step % self.measure.every or not state.is_world_process_zero:
            return
        numbers, rows = self.measure.of(kwargs["model"], self._batches(kwargs["train_dataloader"]))
        logs = {f"gradients/{name}": value for name, value in numbers.items()}
        if self._trainer is None:
            state.log_history.append({**logs, "step": state.global_step})
            return
        self._trainer.log(logs)
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                for field, value in rows.items():
                    writer.add_histogram(f"gradients/{field}", value.float(), state.global_step)

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Random samples, collated as the Trainer does."""
        data = loader.dataset if self._data is None else self._data
        if not hasattr(data, "__len__"):
            raise BadArgument(
                "the Trainer's data set is a stream", where="GradientStatistics(data=...)",
                why="samples are drawn from it by their places", fix="pass some samples as data=, a list of them",
            )  # fmt: skip
        if not len(data):
            raise BadArgument(
                "the data set has no samples", where="GradientStatistics(data=...)",
                why="samples are drawn from it", fix="pass some samples as data=, a list of them",
            )  # fmt: skip
        rows = torch.randint(len(data), (self._samples,), generator=self._draw).tolist()
        for start in range(0, len(rows), self._batch):
            yield loader.collate_fn([data[row] for row in rows[start : start + self._batch]])
