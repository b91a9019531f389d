"""Per-sample gradients for dattri's algorithms (Deng et al. 2024, arXiv:2410.04555) from a psg_fx step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from dattri.task import AttributionTask
from torch import Tensor, nn

from psg_fx.api import transform
from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.quantities.sums import Grads
from psg_fx.reference.state import called_with


class Task(AttributionTask):  # type: ignore[misc]
    """An `AttributionTask` whose gradients of samples are psg_fx's.

        task = Task(F.cross_entropy, model, checkpoints=[model.state_dict()])
        attributor = TracInAttributor(task=task, weight_list=torch.ones(1), normalized_grad=False)

    It takes the place of dattri's task where algorithms ask for gradients of samples (`get_grad_loss_func`,
    `get_grad_target_func`): TracIn, TRAK, Grad-Dot, Grad-Cos.  All else is dattri's.  Batches are `[inputs, targets]`.

    Args:
        loss_fn: `loss_fn(output, *targets)`, as in `psg_fx.transform`; target_fn: the same of what is attributed.
        model: every parameter requires gradients.  checkpoints: state dicts, as in dattri.
        options: of `psg_fx.transform`, such as `backend`.
    """

    def __init__(
        self, loss_fn: Callable[..., Tensor], model: nn.Module, checkpoints: Any,
        target_fn: Callable[..., Tensor] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        target = loss_fn if target_fn is None else target_fn
        super().__init__(_functional(loss_fn, model), model, checkpoints, _functional(target, model))
        settings: dict[str, Any] = {"dynamic": True} | options
        self._steps = {
            name: transform(model, fn, quantities=Grads(), **settings)
            for name, fn in (("loss", loss_fn), ("target", target))
        }

    def get_grad_loss_func(self, in_dims: Any = (None, 0), layer_name: Any = None, ckpt_idx: Any = None) -> Any:
        """A function of flat parameters `[P]` and a batch: the gradients of its samples' losses, `[B, P]`."""
        return self._rows("loss", in_dims, layer_name)

    def get_grad_target_func(self, in_dims: Any = (None, 0), layer_name: Any = None, ckpt_idx: Any = None) -> Any:
        """The same of what is attributed."""
        return self._rows("target", in_dims, layer_name)

    def _rows(self, which: str, in_dims: Any, layer_name: Any) -> Callable[[Any, Any], Tensor]:
        if layer_name is not None or tuple(in_dims) != (None, 0):
            raise NotYetSupported(
                f"gradients of layer_name={layer_name!r} with in_dims={in_dims}", where="psg_fx.integrations.dattri",
                why="a step has all parameters of the model as it is, and samples in dim 0",
                fix="leave layer_name out, or use dattri's own AttributionTask",
            )  # fmt: skip

        def rows(parameters: Any, batch: Any) -> Tensor:
            inputs, *targets = batch
            own = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
            if not isinstance(parameters, Tensor) or not torch.equal(parameters, own):
                raise BadArgument(
                    "the parameters are not those of the task's model", where="gradients of samples for dattri",
                    why="a step reads the model's own", fix="load the checkpoint before: task.get_param(ckpt_idx)",
                )  # fmt: skip
            grads: Mapping[str, Tensor] = self._steps[which](inputs, tuple(targets)).grads
            return torch.cat([g.flatten(1) for g in grads.values()], 1)

        return rows


def _functional(fn: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """The function as dattri has it, of parameters and a single sample."""

    def of_one(params: Any, data: Any) -> Tensor:
        inputs, *targets = data
        output = called_with(model, params, (inputs.unsqueeze(0),))
        return fn(output, *(t.unsqueeze(0) for t in targets))

    return of_one
