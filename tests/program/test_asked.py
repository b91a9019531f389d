"""Code that asks for what is another thing at every call: refused, and what only looks like it is not."""

from __future__ import annotations

import builtins
import logging
import logging.handlers
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sympy.core.cache import clear_cache
from test_effects import X, Y, step_of
from torch import nn

import psg_fx
from psg_fx import NotYetSupported

GENERATOR_OF_NUMPY, OLD_GENERATOR = np.random.default_rng(0), np.random.RandomState(0)
CHANGING: dict[str, tuple[Callable[[], Any], str]] = {
    "random": (lambda: random.random(), "a random number of Python's"),
    "gauss": (lambda: random.gauss(0.0, 1.0), "a random number of Python's"),
    "own-random": (lambda: random.Random(3).random(), "a random number of Python's"),
    "numpy": (lambda: float(np.random.rand()), "a random number of numpy's"),
    "numpy-generator": (lambda: GENERATOR_OF_NUMPY.random(), "a random number of numpy's"),
    "numpy-random-state": (lambda: OLD_GENERATOR.uniform(), "a random number of numpy's"),
    "time": (lambda: time.time() * 0 + 1, "the time"),
    "clock": (lambda: time.perf_counter_ns(), "the time"),
    "environment": (lambda: float(os.environ.get("NO_SUCH_THING", 1.0)), "the environment"),
    "getenv": (lambda: float(os.getenv("NO_SUCH_THING", "1.0")), "the environment"),
    "file": (lambda: len(open(__file__).read()), "a file"),  # noqa: SIM115
    "exists": (lambda: 2 if os.path.exists(__file__) else 1, "a file"),
    "isdir": (lambda: 2 if os.path.isdir(__file__) else 1, "a file"),
    "path-exists": (lambda: 2 if Path(__file__).exists() else 1, "a file"),
    "size": (lambda: Path(__file__).stat().st_size, "a file"),
    "stat": (lambda: os.stat(__file__).st_size, "a file"),
    "access": (lambda: 2 if os.access(__file__, os.R_OK) else 1, "a file"),
    "listdir": (lambda: len(os.listdir()), "a file"),
    "glob": (lambda: len(list(Path(__file__).parent.glob("*.py"))), "a file"),
}


@pytest.mark.filterwarnings("ignore:one graph for each batch size:UserWarning")
def test_sizes_are_computed_by_a_package_that_draws() -> None:
    """Sympy, which torch computes sizes with, shuffles what it asks; that is not the user's code."""
    clear_cache()
    step = psg_fx.transform(nn.Linear(3, 4), lambda o: o.reshape(len(o) * 6 // 3, -1).square().sum(), backend="eager")
    step(torch.randn(3, 3))


SCRIPT = """
import torch
import psg_fx

step = psg_fx.transform(torch.nn.Linear(3, 2), lambda o: o.square().sum() / max(len(o), 1), backend="eager")
found = len(step(torch.randn(4, 3)).losses)
"""


@pytest.mark.filterwarnings("ignore:one graph for each batch size:UserWarning")
def test_a_script(tmp_path: Path) -> None:
    """Where `__builtins__` is a module among the globals, as in a script, not a dict as elsewhere."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path), "__builtins__": builtins}
    exec(compile(SCRIPT, str(path), "exec"), names)
    assert names["found"] == 4


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", CHANGING)
def test_what_is_another_at_every_call(name: str) -> None:
    function, asked = CHANGING[name]
    step = step_of(lambda model, h: h * function())
    with pytest.raises(NotYetSupported, match=f"the code asks for {asked}"):
        step(X, Y)


def test_a_log_that_looks_for_its_own_file_and_a_warning(tmp_path: Path) -> None:
    log = logging.Logger("psg_fx_test")
    handler = logging.handlers.RotatingFileHandler(tmp_path / "log", maxBytes=10)
    log.addHandler(handler)

    def effect(model: Any, h: torch.Tensor) -> torch.Tensor:
        log.info("called")
        warnings.formatwarning("called", UserWarning, __file__, 1)  # which reads the line
        return h * len(os.path.join("a", "b"))

    assert torch.allclose(step_of(effect)(X, Y).losses, step_of(lambda model, h: h * 3.0)(X, Y).losses)
    handler.close()


def test_an_iterator() -> None:
    with pytest.raises(NotYetSupported, match=r"the code reads an iterator"):
        step_of(lambda model, h: h * next(model.numbers))(X, Y)


CHECKED = """
def checked(function, values):
    if not isinstance(values[random.getrandbits(32) % len(values)], float):
        raise TypeError("no number")
    return function(values)
"""


def test_what_a_check_of_types_draws() -> None:
    """beartype writes such code around a function: which item of a list it looks at decides no value."""
    names: dict[str, Any] = {"random": random}
    exec(compile(CHECKED, "<@beartype(model.Model.forward) at 0x7faa700cbb00>", "exec"), names)
    step = step_of(lambda model, h: h * names["checked"](sum, [1.0, 2.0]))
    assert torch.allclose(step(X, Y).losses, step_of(lambda model, h: h * 3.0)(X, Y).losses)


def test_the_gradient_of_a_buffer() -> None:
    """There is none, and that is asked at every call; libraries that keep running means ask before they write."""

    def effect(model: Any, h: torch.Tensor) -> torch.Tensor:
        return h if model.mean.grad is None else 2 * h

    step = step_of(effect)
    step.model.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
    for _ in range(2):
        assert torch.allclose(step(X, Y).losses, step_of(lambda model, h: h)(X, Y).losses)
    assert len(step.captures) == 1
    step.model.mean.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(NotYetSupported, match=r"the code reads \.grad of a tensor"):
        step(X, Y)
