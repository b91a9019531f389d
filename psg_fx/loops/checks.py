"""What `psg_fx.over` refuses before a batch is run."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from psg_fx.distributed.sharded import ShardedModule
from psg_fx.errors import BadArgument, NotYetSupported, first_line
from psg_fx.loops.loaders import order_is_drawn
from psg_fx.step.with_loss import LossModule


def check_step(step: Any) -> None:
    """Refuse what is no step with a loss, and a sharded one."""
    if not isinstance(step, LossModule):
        raise BadArgument(
            f"{type(step).__name__} is not a step with a loss", where="over(loader, step)",
            why="only such a step has outputs that can be put together",
            fix="pass what transform(model, loss_fn) returns; in place of microbatch, choose the loader's batch size",
        )  # fmt: skip
    if isinstance(step, ShardedModule):
        raise NotYetSupported(
            "a step of a sharded model does not run over a loader", where="over(loader, step)",
            why="all processes must call it equally often, and loaders may differ in their numbers of batches",
            fix="write the loop, over as many batches in every process (DistributedSampler): sums of a call are those "
            "of all processes already, and rows those of its own samples",
        )  # fmt: skip


def check_loader(loader: Any) -> None:
    """Refuse what gives no batches, or each sample as one."""
    if isinstance(loader, torch.Tensor):
        raise BadArgument(
            f"the loader is a tensor of shape {tuple(loader.shape)}", where="over(loader, step)",
            why="each of its rows would be a batch", fix="pass a DataLoader, or a list of batches: x.split(64)",
        )  # fmt: skip
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadArgument(
            f"the loader is a {type(loader).__name__}", where="over(loader, step)", why="it gives no batches",
            fix="pass a DataLoader, or any iterable of batches",
        )  # fmt: skip


def check_prepare(prepare: Any) -> None:
    """Refuse what is no function."""
    if prepare is not None and not callable(prepare):
        raise BadArgument(
            f"prepare is a {type(prepare).__name__}", where="over(loader, step, prepare=...)",
            why="it is called with each batch", fix="pass a function of a batch that returns (inputs, targets)",
        )  # fmt: skip


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse keywords of a call that `over` has in another way."""
    grouped = "over(loader, step, groups=..., num_groups=G), where groups says where in a batch they are"
    fixes = {"groups": grouped, "num_groups": grouped, "out": "leave it out"}
    for name in (name for name in fixes if name in given):
        raise BadArgument(
            f"a batch's call has {name}", where="over(loader, step)",
            why="over() puts rows of all batches together, in tensors of its own", fix=fixes[name],
        )  # fmt: skip


def check_keywords(step: LossModule, given: Mapping[str, Any]) -> None:
    """Refuse keywords that no call of the step reads, such as a misspelt one of `over` itself."""
    read = step.settings.reads
    for name in sorted(set(given) - read):
        meant = get_close_matches(name, [*_OF_OVER, *read], 1)
        raise BadArgument(
            f"over() got {name}", where=f"over(loader, step, {name}=...)",
            why=f"did you mean {meant[0]}?" if meant else "no quantity of the step reads it",
            fix=f"over(loader, step, {meant[0]}=...)" if meant else "leave it out",
        )  # fmt: skip


_OF_OVER = ("prepare", "store", "indices", "groups", "num_groups", "device", "progress")


def check_each(step: LossModule, given: Mapping[str, Any]) -> None:
    """Refuse for all calls what is of the samples of one."""
    for name in step.settings.reads_each & set(given):
        raise BadArgument(
            f"{name} has an entry for every sample, and is given once", where=f"over(loader, step, {name}=...)",
            why="each batch has other samples",
            fix=f'let the loader or prepare= give (inputs, targets, {{"{name}": ...}}) for each batch',
        )  # fmt: skip


def check_order(loader: Any) -> None:
    """Refuse for a store an order that is drawn anew."""
    if sampler := order_is_drawn(loader):
        raise BadArgument(
            f"the order of samples is drawn at random ({sampler})", where="over(loader, step, store=...)",
            why="a run that goes on would not know which samples are done, nor would a reader of the store",
            fix="DataLoader(..., shuffle=False), or the samples' places in each batch: over(..., indices=...)",
        )  # fmt: skip


def device_of(step: LossModule) -> torch.device:
    """Where the parameters of the model are; without any, the CPU."""
    first = next(step.model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def checked_device(device: Any) -> torch.device:
    """A device that is there."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise BadArgument(
            f"the device {device!r} cannot be used", where="over(loader, step, device=...)",
            why=f"{type(error).__name__}: {first_line(error)}",
            fix="name a device that this process has, or leave it out: that of the model's parameters",
        ) from error  # fmt: skip
    return found


def folder_of(path: str | PathLike[str]) -> Path:
    """The folder of a store."""
    try:
        found = Path(path)
    except TypeError as error:
        raise BadArgument(
            f"the store is a {type(path).__name__}", where="over(loader, step, store=...)",
            why="results are written into a folder", fix="pass its path",
        ) from error  # fmt: skip
    inside = next((p for p in (found, *found.parents) if p.exists()), found)
    if inside.exists() and not inside.is_dir():
        raise BadArgument(
            f"{inside} is a file", where=f"over(loader, step, store={str(path)!r})",
            why="results are written into a folder", fix="pass the path of a folder, or of one that can be made",
        )  # fmt: skip
    return found
