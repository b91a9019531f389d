"""Per-sample gradients for TRAK (`traker`, Park et al. 2023, arXiv:2303.14186) from a psg_fx step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from trak.gradient_computers import AbstractGradientComputer

from psg_fx.api import transform
from psg_fx.quantities.sums import Grads


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """log(p / (1 − p)) of the label's probability p, summed over samples: the output that TRAK attributes for images.

    logits: [B, classes].  labels: [B].
    """
    others = logits.scatter(1, labels[:, None], float("-inf"))
    return (logits.gather(1, labels[:, None])[:, 0] - others.logsumexp(1)).sum()


def gradient_computer(output_fn: Callable[..., Tensor] = margin, **options: Any) -> type[AbstractGradientComputer]:
    """A class for `TRAKer(..., gradient_computer=)`.

        traker = TRAKer(model, "image_classification", train_set_size=n, gradient_computer=gradient_computer())

    Batches are `[inputs, targets]`, of any size.  TRAK's task gives the derivative of the loss by the output, as ever.

    Args:
        output_fn: `output_fn(model(inputs), *targets)`, what the task attributes: a sum over samples, or `[B]`.
        options: of `psg_fx.transform`, such as `backend`.
    """

    class GradientComputer(AbstractGradientComputer):  # type: ignore[misc]
        """The gradients of the outputs of a batch."""

        def __init__(
            self, model: nn.Module, task: Any, grad_dim: int | None = None, dtype: torch.dtype = torch.float16,
            device: Any = "cuda", grad_wrt: Iterable[str] | None = None,
        ) -> None:  # fmt: skip
            super().__init__(model, task, grad_dim, dtype, device)
            params = None if grad_wrt is None else list(grad_wrt)
            self._step = transform(
                model, output_fn, quantities=Grads(), **{"dynamic": True, "params": params} | options
            )
            self.load_model_params(model)

        def load_model_params(self, model: nn.Module) -> None:
            """The weights of a checkpoint; a step reads them at every call."""
            if model is not self.model:
                self.model.load_state_dict(model.state_dict())
            self.func_weights = dict(self.model.named_parameters())
            self.func_buffers = dict(self.model.named_buffers())

        def compute_per_sample_grad(self, batch: Iterable[Tensor]) -> dict[str, Tensor]:
            """Name -> [B, *shape]."""
            inputs, *targets = batch
            grads: dict[str, Tensor] = self._step(inputs, tuple(targets)).grads
            return grads

        def compute_loss_grad(self, batch: Iterable[Tensor]) -> Tensor:
            """The derivative of the loss by the output, [B, 1], by the task."""
            found: Tensor = self.modelout_fn.get_out_to_loss_grad(
                self.model, self.func_weights, self.func_buffers, batch
            )
            return found

    return GradientComputer
