"""Settings that must stand before torch is imported."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "psg_fx_tests_inductor"))
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the CPU says what it has; else ten trial programs are compiled

os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # a file's wrapper runs a few times

import pytest

from support.processes import Processes
from support.selection import SLOW, is_rest, leaves_out_the_rest

gc.disable()  # until all is imported


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is marked `rest` is more than half of all, and not made where it is left out."""
    if not leaves_out_the_rest(metafunc.config):
        return
    make, rest = metafunc.parametrize, metafunc.definition.get_closest_marker("rest")

    def fewer(names: Any, values: Iterable[Any], *more: Any, **named: Any) -> None:
        values = list(values)
        kept = [k for k, value in enumerate(values) if not rest and not is_rest(value)] or [0]
        if isinstance(named.get("ids"), (list, tuple)):
            named["ids"] = [named["ids"][k] for k in kept]
        make(names, [values[k] for k in kept] if values else [], *more, **named)

    metafunc.parametrize = fewer  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What must run in one process starts first: at the end it would run alone.  The tests of a row are short."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    if getattr(config.option, "loadgroup", False):
        for item in items:
            name_group(item)

    def is_short(item: pytest.Item) -> bool:
        group = item.get_closest_marker("xdist_group")
        return group is None or group.args[0].startswith("row ")

    items.sort(key=is_short)


def name_group(item: pytest.Item) -> None:
    """Ends the id of a test with its group, by which `--dist loadgroup` keeps tests in one process.

    pytest-xdist 3.8 writes it where pytest 9.2 reads no more, and every test was a group of its own.
    """
    group = item.get_closest_marker("xdist_group")
    if group is None or item.nodeid.endswith(f"@{group.args[0]}"):
        return
    item._id = type(item.id).parse(f"{item.nodeid}@{group.args[0]}")


def pytest_collection_finish() -> None:
    """What the imports have made stays; looking at it again at every garbage collection took a tenth of all time."""
    import hypothesis  # noqa: F401  # asks, when it is imported, who refers to what trio has made

    # pytest hears loggers that keep their records to themselves; torch writes its trace for tools where somebody does
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)  # what little is left over a test is in cycles
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def shipped_tables(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plans must not depend on what `psg-fx calibrate` has measured on this machine."""
    from psg_fx.planner import rates

    empty = tmp_path_factory.mktemp("tables")
    rates.folder = lambda: empty


@pytest.fixture(autouse=True, scope="session")
def passes_run() -> None:
    """Tests are of what passes do, not of what they did when the same program was captured before."""
    from psg_fx.passes.stored import store

    store.ENABLED = False


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Several processes for checks of `torch.distributed`."""
    found = Processes(str(tmp_path_factory.mktemp("processes")))
    yield found
    found.stop()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What torch.compile has compiled is forgotten before and after a test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Convolutions on CUDA compute in float32, not in TF32, which torch allows them by default."""
    import torch

    kept, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = kept
