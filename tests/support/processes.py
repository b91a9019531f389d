"""Checks that run in several processes at once: four of them, which all tests of a session share.

A server has imported torch and psg_fx and forks them, so that they start at once.  A check is a function
`(rank, world, *arguments)` at the top of a test module; each has a process group (gloo) of its own, of so many
processes as it asks for.  What it asserts fails the test, with the process's own trace.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest

MOST, PATIENCE, GRACE = 4, 600.0, 3.0
Check = Callable[..., Any]


def serve(rank: int, folder: str, jobs: Any, results: Any) -> None:
    """One process: runs what it is given until that is None."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for pattern in (r"`torch\.jit", "TypedStorage", "`isinstance"):
        warnings.filterwarnings("ignore", pattern)
    while (job := jobs.get()) is not None:
        number, (path, module, name), world, arguments = job
        try:
            sys.path[:] = path
            check = getattr(importlib.import_module(module), name)
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world,
                timeout=datetime.timedelta(seconds=PATIENCE),
            )  # fmt: skip
            torch.manual_seed(0)
            results.put((number, rank, check(rank, world, *arguments), ""))
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Processes:
    """The processes, started when they are first needed and again after a failure: they may wait for one another."""

    def __init__(self, folder: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "psg_fx"])
        self._folder = folder
        self._workers: list[Any] = []
        self._count = 0

    def run(self, check: Check, world: int, *arguments: Any) -> list[Any]:
        """What the check returns in each of `world` processes."""
        if not self._workers:
            self._start()
        self._count += 1
        where = sys.path, check.__module__, check.__qualname__
        for jobs in self._jobs[:world]:
            jobs.put((self._count, where, world, arguments))
        found: dict[int, Any] = {}
        failures = []
        for _ in range(world):
            result = self._next(GRACE if failures else PATIENCE)  # after a failure the others may wait for its process
            if result is None:
                failures.append(f"only {sorted(found)} of {world} processes came to an end")
                break
            _, rank, value, failure = result
            found[rank] = value
            failures += [f"process {rank} of {world}:\n{failure}"] if failure else []
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)
        return [found[rank] for rank in range(world)]

    def _next(self, patience: float) -> Any:
        """The next result; None if there is none in time, or a process has died."""
        end = time.monotonic() + patience
        while time.monotonic() < end and all(worker.is_alive() for worker in self._workers):
            with contextlib.suppress(Empty):
                return self._results.get(timeout=GRACE)
        return None

    def _start(self) -> None:
        self._jobs = [self._context.Queue() for _ in range(MOST)]
        self._results = self._context.Queue()
        self._workers = [
            self._context.Process(target=serve, args=(rank, self._folder, jobs, self._results), daemon=True)
            for rank, jobs in enumerate(self._jobs)
        ]
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """End them."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        for queue in (*self._jobs, self._results) if self._workers else ():
            queue.close()
        self._workers = []
