"""Private training with psg_fx's clipped sums and Opacus' batches, noise and accountants.

p.grad = (Σ_b min(1, C / ‖g_b‖) g_b  +  σ C N(0, 1)) / (q N)        (Abadi et al. 2016, arXiv:1607.00133)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from opacus.accountants import create_accountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from psg_fx.api import transform
from psg_fx.distributed.gradients import set_grad
from psg_fx.errors import BadArgument, NotYetSupported, first_line
from psg_fx.generators import generators_kept
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.step.compiled import StepOutput
from psg_fx.step.microbatch import microbatch
from psg_fx.tensors import short_name
from psg_fx.torch_private.sharded import is_sharded


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
            which is the loader's batch size where that divides N.
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
        _refuse_several_processes(model)
        _check_noise(noise_multiplier)
        _check_loader(loader)
        _check_batches(options)
        _check_parts(model, optimizer, options)
        _check_bound(max_grad_norm)
        self.model = model
        self.loader = loader if isinstance(loader, DPDataLoader) else DPDataLoader.from_data_loader(loader)
        _show_a_batch(self.loader)
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
        _check_bound(self.optimizer.max_grad_norm)
        self._bound.fill_(self.optimizer.max_grad_norm)
        out: StepOutput = self._call(inputs, *targets)
        self.optimizer.zero_grad()
        set_grad(self.model, self._of_the_optimizer(out.clipped_sum))
        self.optimizer.step()
        return out

    def _of_the_optimizer(self, sums: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Those that get noise; others would lie in `p.grad` without."""
        own, parameters = {*self.optimizer.params}, dict(self.model.named_parameters(remove_duplicate=False))
        return {name: value for name, value in sums.items() if parameters.get(name) in own}

    def epsilon(self, delta: float) -> float:
        """What has been spent, at this δ; 0 before the first step."""
        if not len(self.accountant):
            return 0.0  # Opacus' "prv" divides by the number of steps
        return float(self.accountant.get_epsilon(delta))


def _check_noise(noise_multiplier: Any) -> None:
    if not isinstance(noise_multiplier, Real) or not 0 <= float(noise_multiplier) < math.inf:
        raise BadArgument(
            f"noise_multiplier={noise_multiplier!r} is no standard deviation",
            where="PrivateTraining(noise_multiplier=...)",
            why="noise of noise_multiplier times max_grad_norm is added to the sum",
            fix="a float that is not negative, e.g. noise_multiplier=1.1",
        )  # fmt: skip


def _check_bound(bound: Any) -> None:
    ClippedSum(max_norm=bound)
    if isinstance(bound, Mapping) or math.isinf(float(bound)):
        raise BadArgument(
            f"max_grad_norm={bound!r} is not one finite number", where="PrivateTraining(max_grad_norm=...)",
            why="noise of noise_multiplier times max_grad_norm is added to the sum",
            fix="a float that is larger than all norms leaves gradients as they are, where noise_multiplier is 0",
        )  # fmt: skip


def _accountant(accountant: Any) -> Any:
    try:
        return create_accountant(accountant) if isinstance(accountant, str) else accountant
    except ValueError as error:
        raise BadArgument(
            f"accountant={accountant!r} is unknown", where="PrivateTraining(accountant=...)",
            why=f"Opacus says: {first_line(error)}", fix='"prv", "rdp", "gdp", or an accountant of Opacus',
        ) from error  # fmt: skip


def _show_a_batch(loader: DataLoader[Any]) -> None:
    """Empty batches have the form of the first one that Opacus collates, which may be empty itself."""
    collate = loader.collate_fn
    if getattr(collate, "first_batch", collate) is None:
        with contextlib.suppress(LookupError), generators_kept():  # a data set by keys has none of this number
            collate([loader.dataset[0]])


def _check_loader(loader: Any) -> None:
    """Refuse what does not give every sample of a data set once: batches are drawn from all of them."""
    if isinstance(loader, DPDataLoader):
        return
    why = "batches are drawn anew from its data set"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        found = loader.dataset if isinstance(loader, DataLoader) else loader
        raise BadArgument(
            f"the loader is a {type(loader).__name__}" if found is loader else "the loader's data set is a stream",
            where="PrivateTraining(loader)", why=why, fix="pass a torch.utils.data.DataLoader of a data set with "
            "a length",
        )  # fmt: skip
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    whole = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    sizes: list[Any] = [sampler, loader.dataset]  # samplers number the samples of whatever they are of
    whole = whole and len(sizes[0]) == len(sizes[1])
    if not whole or type(batches) is not BatchSampler:
        odd = batches if whole else sampler
        raise BadArgument(
            f"the loader has a {type(odd).__name__}", where="PrivateTraining(loader)",
            why=f"{why}, all of whose samples join with one probability; a sampler's choice would be lost",
            fix="pass DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=...) of the samples to train on",
        )  # fmt: skip
    if not len(loader):
        raise BadArgument(
            "the loader has no batches", where="PrivateTraining(loader)",
            why="a sample joins a batch with probability 1 / len(loader)", fix="choose a smaller batch size",
        )  # fmt: skip


def _check_batches(options: Mapping[str, Any]) -> None:
    """Refuse batches whose samples do not lie in the first dim: Opacus makes an empty batch of no entries there."""
    if any(isinstance(dim, int) and dim != 0 for dim in tree_leaves(options.get("batch_dim", 0))):
        raise BadArgument(
            f"batch_dim={options['batch_dim']!r} of private training", where="PrivateTraining(batch_dim=...)",
            why="a batch may be empty, and Opacus makes an empty one of no entries in the first dim",
            fix="collate batches whose samples lie first, and transpose in the model",
        )  # fmt: skip


def _check_parts(model: nn.Module, optimizer: Any, options: Mapping[str, Any]) -> None:
    """Refuse parameters of too few digits, an optimizer of other parameters, or that cannot be given noise, and options
    that are not free.
    """
    half = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4}
    if half:
        name, dtype = next(iter(half.items()))
        raise BadArgument(
            f"{name} is {short_name(dtype)}", where="PrivateTraining(model)",
            why="its sum would be rounded to that before the noise is added, by which one sample can change it by "
            "several times the bound",
            fix="keep the parameters in float32, and compute in half precision under torch.autocast",
        )  # fmt: skip
    if isinstance(optimizer, (DPOptimizer, torch.optim.LBFGS)):
        with_noise = isinstance(optimizer, DPOptimizer)
        raise BadArgument(
            f"the optimizer is {'already a' if with_noise else 'a'} {type(optimizer).__name__}",
            where="PrivateTraining(optimizer)",
            why="noise would be added twice" if with_noise else "it computes gradients several times in a step",
            fix="pass the optimizer of torch that it was made of" if with_noise else "torch.optim.SGD or Adam, say",
        )  # fmt: skip
    own = set(model.parameters())
    if not all(p in own for group in optimizer.param_groups for p in group["params"]):
        raise BadArgument(
            "the optimizer has parameters that the model does not have", where="PrivateTraining(optimizer)",
            why="they have no clipped sum", fix="make it over model.parameters(), or over some of them",
        )  # fmt: skip
    fixes = {
        "quantities": "leave it out; transform(model, loss_fn, quantities=[...]) measures others beside the training",
        "params": "freeze the others: parameter.requires_grad_(False)",
    }
    for name in (name for name in fixes if options.get(name) is not None):
        raise BadArgument(
            f"{name}= is not an option of private training", where=f"PrivateTraining({name}=...)",
            why="it trains by the clipped sum of all parameters that require gradients", fix=fixes[name],
        )  # fmt: skip


def _refuse_several_processes(model: nn.Module) -> None:
    if is_sharded(model) or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        raise NotYetSupported(
            "PrivateTraining in several processes", where="PrivateTraining(model, ...)",
            why="each would draw batches and noise of its own, and train a model of its own",
            fix="write the loop: a step in each process, psg_fx.distributed.reduce(out), noise once, set_grad "
            "(docs/distributed.md)",
        )  # fmt: skip
