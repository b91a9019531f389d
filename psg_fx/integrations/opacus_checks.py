"""What private training refuses: noise, bounds, loaders, models and optimizers that do not fit one another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.tensors import short_name
from psg_fx.torch_private.sharded import is_sharded


def check_noise(noise_multiplier: Any) -> None:
    """Refuse noise that is no standard deviation."""
    if not isinstance(noise_multiplier, Real) or not 0 <= float(noise_multiplier) < math.inf:
        raise BadArgument(
            f"noise_multiplier={noise_multiplier!r} is no standard deviation",
            where="PrivateTraining(noise_multiplier=...)",
            why="noise of noise_multiplier times max_grad_norm is added to the sum",
            fix="a float that is not negative, e.g. noise_multiplier=1.1",
        )  # fmt: skip


def check_delta(delta: Any) -> None:
    """Refuse a δ at which there is no ε."""
    if not isinstance(delta, Real) or not 0 < float(delta) < 1:
        raise BadArgument(
            f"delta={delta!r} is no probability between 0 and 1", where="PrivateTraining.epsilon(delta)",
            why="it is the probability with which the bound ε may not hold", fix="a float below 1 / (number of "
            "samples), e.g. delta=1e-5",
        )  # fmt: skip


def check_generator(generator: Any) -> None:
    """Refuse what does not draw the noise."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise BadArgument(
            f"generator={generator!r} is of type {type(generator).__name__}", where="PrivateTraining(generator=...)",
            why="noise is drawn from it", fix="torch.Generator().manual_seed(...), or None for torch's own",
        )  # fmt: skip


def check_bound(bound: Any) -> None:
    """Refuse a bound that is not one finite number."""
    ClippedSum(max_norm=bound)
    if isinstance(bound, Mapping) or math.isinf(float(bound)):
        raise BadArgument(
            f"max_grad_norm={bound!r} is not one finite number", where="PrivateTraining(max_grad_norm=...)",
            why="noise of noise_multiplier times max_grad_norm is added to the sum",
            fix="a float that is larger than all norms leaves gradients as they are, where noise_multiplier is 0",
        )  # fmt: skip


def check_loader(loader: Any) -> None:
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


def check_batches(options: Mapping[str, Any]) -> None:
    """Refuse batches whose samples do not lie in the first dim, where the loader does not show what an empty one is."""
    if any(isinstance(dim, int) and dim != 0 for dim in tree_leaves(options.get("batch_dim", 0))):
        raise BadArgument(
            f"batch_dim={options['batch_dim']!r} of private training", where="PrivateTraining(batch_dim=...)",
            why="a batch may be empty; batches that the loader collates do not show where their samples lie, and then "
            "Opacus makes an empty one of no entries in the first dim",
            fix="collate tensors, in lists, tuples or dicts, with a place for each sample; or let samples lie first, "
            "and transpose in the model",
        )  # fmt: skip


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that cannot be given noise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadArgument(
            f"the optimizer is of type {type(optimizer).__name__}", where="PrivateTraining(optimizer)",
            why="Opacus adds noise for an optimizer of torch", fix="pass torch.optim.SGD(model.parameters(), ...), say",
        )  # fmt: skip
    if isinstance(optimizer, (DPOptimizer, torch.optim.LBFGS)):
        with_noise = isinstance(optimizer, DPOptimizer)
        raise BadArgument(
            f"the optimizer is {'already a' if with_noise else 'a'} {type(optimizer).__name__}",
            where="PrivateTraining(optimizer)",
            why="noise would be added twice" if with_noise else "it computes gradients several times in a step",
            fix="pass the optimizer of torch that it was made of" if with_noise else "torch.optim.SGD or Adam, say",
        )  # fmt: skip


def check_trained(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters of too few digits, and an optimizer of other parameters than the model's, which may be those
    that it had before.
    """
    for name, p in parameters.items():
        if p.dtype.itemsize < 4 and p.requires_grad:
            raise BadArgument(
                f"{name} is {short_name(p.dtype)}", where="PrivateTraining(model)",
                why="its sum would be rounded to that before the noise is added, by which one sample can change it by "
                "several times the bound",
                fix="keep the parameters that require gradients in float32, and compute in half precision under "
                "torch.autocast",
            )  # fmt: skip
    own = {*parameters.values()}
    if not all(p in own for group in optimizer.param_groups for p in group["params"]):
        raise BadArgument(
            "the optimizer has parameters that the model does not have", where="PrivateTraining(optimizer)",
            why="they have no clipped sum", fix="make it over model.parameters(), or over some of them; where layers "
            "are replaced, or load_state_dict(assign=True) puts other tensors in their place, make optimizer and "
            "PrivateTraining afterwards, with the accountant as it is: accountant=private.accountant",
        )  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are not free."""
    fixes = {
        "quantities": "leave it out; transform(model, loss_fn, quantities=[...]) measures others beside the training",
        "params": "freeze the others: parameter.requires_grad_(False)",
    }
    for name in (name for name in fixes if options.get(name) is not None):
        raise BadArgument(
            f"{name}= is not an option of private training", where=f"PrivateTraining({name}=...)",
            why="it trains by the clipped sum of all parameters that require gradients", fix=fixes[name],
        )  # fmt: skip


def refuse_several_processes(model: nn.Module) -> None:
    """Refuse processes that train a model together."""
    if is_sharded(model) or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        raise NotYetSupported(
            "PrivateTraining in several processes", where="PrivateTraining(model, ...)",
            why="each would draw batches and noise of its own, and train a model of its own",
            fix="write the loop: a step in each process, psg_fx.distributed.reduce(out), noise once, set_grad "
            "(docs/distributed.md)",
        )  # fmt: skip


def no_copies() -> BadArgument:
    """What copy and pickle are told: a copy would count its steps, and draw its noise, in the original."""
    return BadArgument(
        "PrivateTraining is not copied or pickled", where="copy.deepcopy, pickle or torch.save of a PrivateTraining",
        why="its optimizer counts steps in one accountant and trains one model; a copy would go on in these",
        fix="save model.state_dict(), private.optimizer.state_dict(), private.accountant.state_dict() and the states "
        "of the generators, and load them into what a new PrivateTraining is made of; an average of weights copies "
        "the model",
    )  # fmt: skip
