"""What is known of a loader: how many samples it gives, whether in the same order each time, and how it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from psg_fx.progress import Progress, is_watched


def batches_of(loader: Any) -> int | None:
    """How many batches it gives, where it says so."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def samples_of(loader: Any) -> int | None:
    """How many samples it gives, where it says so."""
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or size is None or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        count = len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return count // size * size if loader.drop_last else count


def order_is_drawn(loader: Any) -> str | None:
    """The sampler that draws an order at random, by its name, or what lets workers decide it; None where nothing is
    known to.
    """
    if getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        return "in_order=False"
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        name = type(sampler).__name__
        if "Random" in name or getattr(sampler, "shuffle", False) is True:
            return name
    return None


def from_batch(loader: Any, done: int, size: Callable[[Any], int]) -> tuple[Iterator[Any], int]:
    """The batches from number `done` on, and how many samples those before it have.

    Those of a plain loader are not loaded.  size: of a batch that is.
    """
    plain = type(loader) is DataLoader and loader.batch_sampler is not None
    if not done or not plain or isinstance(loader.dataset, IterableDataset):
        batches = iter(loader)
        return batches, sum(size(batch) for batch in itertools.islice(batches, done))
    lists = iter(loader.batch_sampler)
    skipped = sum(len(places) for places in itertools.islice(lists, done))
    rest = DataLoader(
        loader.dataset, batch_sampler=lists, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context, generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )  # fmt: skip
    return iter(rest), skipped


def shown(batches: Iterable[Any], total: int | None, done: int, progress: bool) -> Iterator[Any]:
    """The batches, counted on a terminal: by tqdm where it is installed."""
    if not progress or not is_watched():
        return iter(batches)
    try:
        from tqdm import tqdm
    except ImportError:
        return _counted(batches, total, done)
    return iter(tqdm(batches, total=total, initial=done, unit="batch", disable=None))


def _counted(batches: Iterable[Any], total: int | None, done: int) -> Iterator[Any]:
    line = Progress(True)
    try:
        for number, batch in enumerate(batches, done + 1):
            line.say(f"batch {number}{f' of {total}' if total else ''}")
            yield batch
    finally:
        line.say("")
