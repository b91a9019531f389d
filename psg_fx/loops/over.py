"""`psg_fx.over`: a step over all batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.loops.batches import Batch, Indices, Prepare, batch_of
from psg_fx.loops.checks import (
    check_each,
    check_given,
    check_keywords,
    check_loader,
    check_order,
    check_prepare,
    check_step,
    checked_device,
    device_of,
    folder_of,
)
from psg_fx.loops.groups import joins_of
from psg_fx.loops.loaders import batches_of, from_batch, samples_of, shown
from psg_fx.loops.made_of import made_of
from psg_fx.loops.results import Results
from psg_fx.loops.rows import InMemory
from psg_fx.loops.store import Store, Writer, filling
from psg_fx.loops.totals import Totals, check_joins
from psg_fx.quantities.base import Joins
from psg_fx.step.compiled import StepOutput
from psg_fx.step.leaves import Key, leaves
from psg_fx.step.parts import require_joins
from psg_fx.step.with_loss import LossModule


def over(
    loader: Iterable[Any], step: Any, *, store: str | PathLike[str] | None = None, prepare: Prepare | None = None,
    indices: Indices | None = None, groups: Indices | None = None, num_groups: int | None = None,
    device: torch.device | str | None = None, progress: bool = True, **given: Any,
) -> Results:  # fmt: skip
    """Run a step over all batches of a loader, and put its outputs together.

    A batch is a tensor or a mapping of inputs (a tokenizer's, with the labels in it), `(inputs, targets)`, or
    `(inputs, targets, keywords)` with keywords of the step for this batch, such as `{"weights": w}`; inputs and targets
    are what the step takes.  Rows of samples are brought to the CPU and put side by side.  Sums and means over samples
    follow as their quantities say, whatever the sizes of batches are: they are kept in float64 until the end.  The
    train or evaluation mode is the model's, as in every call: `model.eval()` before leaves dropout out.

    Args:
        loader: a `DataLoader`, or any iterable of batches.  A last batch that is smaller is one more size to compile
            for, unless the step was made with `dynamic=True`.
        step: what `transform(model, loss_fn)` returns.
        store: a folder for the results, made where it is not there.  An interrupted run goes on there where it
            stopped: the same call again skips what is done, and a longer loader adds to what a shorter one that did
            not say its length has left there.  Needs a loader that gives the same order each time, or `indices`.
        prepare: a function from the loader's batch to one as above.  A store notes its code and what it holds, as
            those of the loss, and goes on with the same alone.
        indices: where a batch has the places of its samples in the data set: a key or a position of the batch, which
            is then taken out of it, or a function of the batch that returns `[B]` ints.  They become the field
            `indices`, are what `top` returns, and let a store go on under a shuffled loader, or with further samples.
        groups: where a batch has the group of each sample (a user, a document), likewise.  Then fields that are linear
            in gradients (grads, dots, projections, a weighted sum with a weight for each group) are those of groups,
            added up over all batches: a group's samples may lie in several of them.  Losses remain those of samples.
        num_groups: how many groups there are.
        device: where tensors are moved before the step; None: to the parameters of the model.
        progress: show a bar (tqdm, where it is installed), if stderr is a terminal.
        given: keywords of every call, such as `directions=`.

    Returns:
        The fields of the step's output for all samples, with `top(query, k)`.

    Raises:
        BadArgument: a step without a loss, a batch that is not as above, a quantity that does not follow from
            batches, such as norms of groups, parameters that are frozen or unfrozen between batches, or a store of
            other parameters, another step, or another data set, or one whose files are damaged.
        NotYetSupported: a sharded model.
    """
    check_step(step)
    check_loader(loader)
    check_prepare(prepare)
    check_given(given)
    check_keywords(step, given)
    joins = step.settings.joins_of_processes
    if groups is None and num_groups is None:
        check_each(step, given)
    else:
        joins = joins_of(step, num_groups, groups, {"indices": indices, "store": store})
    check_joins(joins)
    place = device_of(step) if device is None else checked_device(device)

    def call(found: Any) -> Batch:
        named = "indices" if groups is None else "groups"
        batch = batch_of(found, prepare, indices if groups is None else groups, place, given, named)
        check_given(batch.given)
        return batch if num_groups is None else batch.grouped(num_groups)

    if store is None:
        return _in_memory(loader, step, call, progress, joins)
    if indices is None:
        check_order(loader)
    return _in_folder(loader, step, call, progress, folder_of(store), given, indices is not None, prepare)


def _in_memory(loader: Any, step: LossModule, call: Callable[[Any], Batch], progress: bool, joins: Joins) -> Results:
    rows, totals, first = InMemory(samples_of(loader)), Totals(joins), None
    for found in shown(loader, batches_of(loader), 0, progress):
        batch, first = call(found), first or step._tracked().names
        out, own = _run(step, batch, joins, first)
        if len(out.losses):
            rows.add(own, len(out.losses))
            totals.add(out)
    if not rows.count:
        raise _empty()
    return Results({**rows.fields(), **totals.fields()}, joins)


def _in_folder(
    loader: Any, step: LossModule, call: Callable[[Any], Batch], progress: bool, path: Path, given: Mapping[str, Any],
    places: bool, prepare: Prepare | None,
) -> Store:  # fmt: skip
    """The store of a folder, filled.  places: samples have places, so that the folder may have others already."""
    joins, device = step.settings.joins_of_processes, device_of(step)
    made = made_of(step, given, None if places else samples_of(loader), places, device.type, prepare)
    with filling(path, made, joins, device) as writer:
        if not writer.has_all():
            _fill(writer, loader, step, call, progress, tuple(made["asked"]))
    return Store(path)


def _fill(
    writer: Writer, loader: Any, step: LossModule, call: Callable[[Any], Batch], progress: bool, asked: Sequence[str]
) -> None:
    """Run what is not in the store: batches after those that are, or samples whose places are not.  A store that is
    complete may lack some, too: nobody knows how many samples an iterable has.
    """
    before, now = writer.places(), set[int]()
    done = 0 if before else writer.batches
    batches, skipped = from_batch(loader, done, lambda found: call(found).size(step))
    if done and skipped != writer.count:
        raise BadArgument(
            f"the first {done} batches have {skipped} samples", where=f"over(loader, step, store={str(writer.path)!r})",
            why=f"{writer.count} are in the store after as many batches",
            fix="give the same batches, or choose another folder",
        )  # fmt: skip
    for found in shown(batches, batches_of(loader), done, progress):
        whole = call(found)
        batch = whole if whole.indices is None else _new(whole, step, before, now)
        if batch is not None:
            out, own = _run(step, batch, step.settings.joins_of_processes, asked)
            writer.add(own, out, len(out.losses))
    if not writer.count:
        raise _empty()
    writer.check_end()


def _new(batch: Batch, step: LossModule, before: set[int], now: set[int]) -> Batch | None:
    """The samples of a batch that are not in the store.  before: places of earlier runs; now: of this run."""
    assert batch.indices is not None
    places = batch.indices.tolist()
    for place in places:
        if place in now:
            raise BadArgument(
                f"sample {place} comes twice", where="over(loader, step, store=..., indices=...)",
                why="a store has a row for each place in the data set; sampling with replacement cannot go on",
                fix="draw the samples beforehand: DataLoader(Subset(data, drawn), shuffle=False)",
            )  # fmt: skip
        now.add(place)
    if len(places) != batch.size(step):
        raise _bad_rows("indices", len(places), batch.size(step))
    rows = [row for row, place in enumerate(places) if place not in before]
    if not rows:
        return None
    return batch if len(rows) == len(places) else batch.of_rows(step, torch.tensor(rows, device="cpu"))


def _run(
    step: LossModule, batch: Batch, joins: Joins, asked: Sequence[str]
) -> tuple[StepOutput, dict[Key, torch.Tensor]]:
    """The output for a batch, and what of it has a row for every sample.  asked: the parameters of all batches."""
    _check_asked(asked, step._tracked().names)
    out = batch.run(step)
    count = len(out.losses)
    require_joins(vars(out), joins, "psg_fx.over(batches, step)")
    rows = dict(leaves({field: value for field, value in vars(out).items() if joins[field] == "cat"}))
    if batch.indices is not None:
        rows["indices", None] = batch.indices
    for (field, _), value in rows.items():
        if value.shape[:1] != (count,):
            raise _bad_rows(field, len(value) if value.ndim else None, count)
    return out, rows


def _check_asked(before: Sequence[str], now: Sequence[str]) -> None:
    """Refuse a batch for other parameters than those of the batches before."""
    if set(before) != set(now):
        odd = sorted(set(before) ^ set(now))
        raise BadArgument(
            f"{', '.join(odd[:3])}{', ...' * (len(odd) > 3)} {'is' if len(odd) == 1 else 'are'} asked for in some "
            "batches only", where="over(loader, step)",
            why="rows and sums of all batches are of the same parameters; requires_grad or what params= says has "
            "changed in between", fix="freeze parameters before over() or after it, and call it once for each set",
        )  # fmt: skip


def _bad_rows(field: str, rows: int | None, count: int) -> BadArgument:
    """rows: None for a scalar."""
    return BadArgument(
        f"{field} has no rows, and there are {count} samples" if rows is None else
        f"{field} has {rows} rows for {count} samples", where="over(loader, step)",
        why="it is to have a row for every sample",
        fix="return [B] indices" if field == "indices" else 'say otherwise in joins() of its quantity, such as "sum"',
    )  # fmt: skip


def _empty() -> BadArgument:
    return BadArgument(
        "the loader gives no samples", where="over(loader, step)", why="nothing says what shapes the results have",
        fix="give at least one batch; an iterator that has been read is empty, a DataLoader is not",
    )  # fmt: skip
