"""Private training with psg_fx's clipped sums and Opacus' batches, noise and accountants.

p.grad = (Σ_b min(1, C / ‖g_b‖) g_b  +  σ C N(0, 1)) / (q N)        (Abadi et al. 2016, arXiv:1607.00133)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from opacus.accountants import create_accountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizerFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader

from psg_fx.api import transform
from psg_fx.distributed.gradients import set_grad
from psg_fx.errors import BadArgument, first_line
from psg_fx.integrations import opacus_checks as checks
from psg_fx.integrations.empty_batches import show_empty
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.step.compiled import StepOutput
from psg_fx.step.microbatch import microbatch


class PrivateTraining:
    """DP-SGD in a loop of five lines:

        private = PrivateTraining(model, F.cross_entropy, optimizer, loader, noise_multiplier=1.1, max_grad_norm=1.0)
        for x, y in private.loader:
            out = private.step(x, y)
        print(private.epsilon(delta=1e-5))

    Gradients of samples are not formed, unless that is cheaper.  Every sample joins a batch by itself, with probability
    q = 1 / len(loader), as accountants assume; a batch may be empty.  Sums are divided by q N, for N samples, where
    Opacus' own engine divides by the whole number below.

    Args:
        model, loss_fn: as in `psg_fx.transform`; the bound is on the gradient of each sample's own loss.
        optimizer: torch's, over the model's parameters; a scheduler may be built on it.
        loader: a `DataLoader` of a whole data set, or Opacus' `DPDataLoader`.  q N samples are expected in a batch,
            which is the loader's batch size where that divides N.  Empty batches are collated as others are: of no
            samples in the dim where these lie, and zeros where all samples share something.
        noise_multiplier: σ.  max_grad_norm: C, which is finite; `private.optimizer.max_grad_norm` may change.
        accountant: "prv", "rdp" or "gdp", or an accountant of Opacus, which may have a history.
        part: run batches in parts of at most so many samples.
        generator, secure_mode: of the noise, as in Opacus.
        options: of `psg_fx.transform`, but `quantities` and `params`.

    Raises BadArgument for noise or a bound that is no number, negative or infinite, and for an optimizer, a loader, an
    accountant or options that do not fit; NotYetSupported where several processes train the model together.

    loader: gives the batches.  optimizer: Opacus', which adds the noise.  accountant: has counted every step.
    transformed: the psg_fx step, for `explain()` and `validate(x, y)`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer, loader: DataLoader[Any],
        *, noise_multiplier: float, max_grad_norm: float, accountant: Any = "prv", part: int | None = None,
        generator: torch.Generator | None = None, secure_mode: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        checks.refuse_several_processes(model)
        checks.check_noise(noise_multiplier)
        checks.check_loader(loader)
        checks.check_optimizer(optimizer)
        checks.check_generator(generator)
        checks.check_trained(dict(model.named_parameters(remove_duplicate=False)), optimizer)
        checks.check_options(options)
        options.pop("quantities", None)
        checks.check_bound(max_grad_norm)
        self.model = model
        self.loader = _loader(loader)
        if not show_empty(self.loader):
            checks.check_batches(options)
        self.accountant = _accountant(accountant)
        rate = self.loader.sample_rate
        self.optimizer = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, generator=generator,
            expected_batch_size=len(self.loader.dataset) * rate, secure_mode=secure_mode,
        )  # fmt: skip
        self.optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(rate))
        self._bound = torch.tensor(float(max_grad_norm), dtype=torch.float64)
        clipped = ClippedSum(max_norm=self._bound, in_float32=True)
        self.transformed = transform(model, loss_fn, quantities=clipped, **{"dynamic": True} | options)
        self._call = self.transformed if part is None else microbatch(self.transformed, part)

    def step(self, inputs: Any, *targets: Any) -> StepOutput:
        """One step of the optimizer on a batch; the losses, norms and clip factors of its samples are not private.

        Sums are clipped to the optimizer's `max_grad_norm` of now, as its noise is, which a scheduler may change.
        """
        optimizer, parameters = self.optimizer, dict(self.model.named_parameters(remove_duplicate=False))
        checks.check_noise(optimizer.noise_multiplier)
        checks.check_bound(optimizer.max_grad_norm)
        checks.check_trained(parameters, optimizer)
        self._bound.fill_(optimizer.max_grad_norm)
        out: StepOutput = self._call(inputs, *targets)
        own = {*optimizer.params}  # these get noise; the sums of others would lie in `p.grad` without
        with torch.inference_mode(False):  # later steps write into what this one leaves
            optimizer.zero_grad(set_to_none=True)  # an optimizer moves what has zeros, too
            set_grad(self.model, {name: value for name, value in out.clipped_sum.items() if parameters[name] in own})
            optimizer.step()
        return out

    def epsilon(self, delta: float) -> float:
        """What has been spent, at this δ, which lies between 0 and 1; 0 before the first step, inf after one without
        noise.
        """
        checks.check_delta(delta)
        if not len(self.accountant):
            return 0.0  # Opacus' "prv" divides by the number of steps
        if any(not noise for noise, *_ in getattr(self.accountant, "history", ())):
            return math.inf
        return float(self.accountant.get_epsilon(delta))

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise checks.no_copies()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise checks.no_copies()


def _accountant(accountant: Any) -> Any:
    why = "it counts the steps of an optimizer of Opacus, and says what was spent"
    try:
        if isinstance(accountant, str):
            return create_accountant(accountant)
        if not isinstance(accountant, type) and all(hasattr(accountant, name) for name in _OF_ACCOUNTANTS):
            return accountant
    except ValueError as error:
        why = f"Opacus says: {first_line(error)}"
    raise BadArgument(
        f"accountant={accountant!r} is {'unknown' if isinstance(accountant, str) else 'none'}",
        where="PrivateTraining(accountant=...)", why=why, fix='"prv", "rdp", "gdp", or an accountant of Opacus',
    )  # fmt: skip


_OF_ACCOUNTANTS = ("get_optimizer_hook_fn", "get_epsilon", "__len__")


def _loader(loader: DataLoader[Any]) -> Any:
    """Opacus' loader of these samples, which asks a sample for its parts."""
    if isinstance(loader, DPDataLoader):
        return loader
    try:
        return DPDataLoader.from_data_loader(loader)
    except TypeError as error:
        sample = loader.dataset[0]
        if isinstance(sample, Iterable):
            raise
        raise BadArgument(
            f"a sample is of type {type(sample).__name__}", where="PrivateTraining(loader)",
            why="Opacus loops over the parts of a sample, an input and a target, say", fix="let the data set give "
            "tuples, (sample,) where there is one part, which collate_fn takes apart",
        ) from error  # fmt: skip
