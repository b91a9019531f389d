"""A process that is forked while another thread captures."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
import torch
from torch import nn

import psg_fx
from psg_fx.program.ambient import isolated

X = torch.randn(4, 3)


def losses(queue: Any) -> None:
    torch.set_num_threads(1)
    step = psg_fx.transform(nn.Linear(3, 2), lambda o: o.sum(), backend="eager", progress=False)
    queue.put(list(step(X).losses.shape))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_child_captures() -> None:
    captures, done = threading.Event(), threading.Event()

    def capture() -> None:
        with isolated():
            captures.set()
            done.wait()

    thread = threading.Thread(target=capture)
    thread.start()
    captures.wait()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=losses, args=(queue,))
    try:
        child.start()
        assert queue.get(timeout=60) == [4]
    finally:
        done.set()
        thread.join()
        child.kill()
        child.join()
