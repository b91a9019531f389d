"""A race on a machine of many cores: first calls in processes of their own, models prepared side by side, and timed
alone.  What inductor chose while others computed is forgotten, and chosen again by one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from psg_fx.torch_private.autotuning import forget_choices

Command = Callable[..., list[str]]
"""What a process is told to do for a model, with its result in a file: `command(model, path, *more)`."""

LAST = 60.0
"""Seconds, of those that preparing may take, in which nothing is begun any more."""

_PREPARING = LAST + 150.0
"""Seconds that are left for preparing when first calls end.  In 60 beside `LAST`, half of the contenders of a
transformer of twelve layers were begun on an H200, all of whose kernels were compiled already.
"""


def together(
    contenders: Mapping[str, Sequence[str]], command: Command, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The report of each model, a key of `contenders`; their values are the labels of what is worth compiling before.

    What is compiled is found again in inductor's cache, so first calls are those of the processes that had one
    contender each.
    """
    until = time.time() + seconds
    with tempfile.TemporaryDirectory() as folder, shared_cache() as cache:
        place = Path(folder)
        first = first_calls(contenders, command, place, until - _PREPARING)
        forget_choices(cache)
        print(f"{len(first)} first calls done, {until - time.time():.0f} s left", flush=True)
        for name, result in in_turns(list(contenders), command, place, until):
            for row in result.get("rows", ()):
                row["first_call_s"] = first.get((name, row["contender"], row["quantity"]))
            yield name, result


@contextlib.contextmanager
def shared_cache(threads: int = 1) -> Iterator[Path]:
    """One folder for what is compiled, and so many threads to compile in each process."""
    with tempfile.TemporaryDirectory() as folder:
        kept = dict(os.environ)
        cache = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        try:
            yield Path(cache)
        finally:
            os.environ.clear()
            os.environ.update(kept)


def first_calls(
    contenders: Mapping[str, Sequence[str]], command: Command, place: Path, until: float
) -> dict[tuple[str, str, str], float]:
    """(model, contender, quantity) -> seconds; models in turns, since large ones take memory."""
    columns = [[(name, label) for label in labels] for name, labels in contenders.items()]
    tasks = [task for task in chain.from_iterable(zip_longest(*columns)) if task is not None]
    found = {}

    def one(index: int) -> None:
        name, label = tasks[index]
        out = place / f"first-{index}.json"
        if (left := until - time.time()) > 0:
            told = [sys.executable, *command(name, out, "--first", label)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(told, check=False, timeout=left)
        if out.exists():
            told_of = json.loads(out.read_text("utf-8"))
            found[(name, told_of["contender"], told_of["quantity"])] = told_of["first_call_s"]

    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 1)) as pool:
        list(pool.map(one, range(len(tasks))))
    return found


def in_turns(names: Sequence[str], command: Command, place: Path, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The reports of all models: their processes prepare side by side and are then timed one after the other."""
    told = ["--turns", str(place), "--until", str(until - LAST)]
    outs = {name: place / f"{name}.json" for name in names}
    processes = {n: subprocess.Popen([sys.executable, *command(n, outs[n], *told)]) for n in names}
    waiting = dict(processes)
    while waiting and time.time() < until:
        time.sleep(0.5)
        for name in [n for n, p in waiting.items() if (place / f"{n}.ready").exists() or p.poll() is not None]:
            del waiting[name]
    for process in waiting.values():
        process.kill()
    for name, process in processes.items():
        if name in waiting:
            yield name, {"failure": "not prepared in time"}
            continue
        (place / f"{name}.go").touch()
        process.wait()
        if outs[name].exists():
            yield name, json.loads(outs[name].read_text("utf-8"))
        else:
            yield name, {"failure": f"the process ended with exit code {process.returncode}"}


@contextlib.contextmanager
def turn(name: str, folder: Path) -> Iterator[None]:
    """Says that this process is ready, and waits until it may go on."""
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.1)
    yield


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """No other process is inside."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
