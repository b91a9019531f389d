"""What one thread sees of torch is what it has replaced, whatever other threads replace meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from psg_fx.torch_private.patching import patched_here, seen_here, wrapped_here


class Owner:
    def name(self) -> str:
        return "own"


class Inherits(Owner): ...


def module() -> ModuleType:
    found = ModuleType("owner")
    found.name = lambda: "own"  # type: ignore[attr-defined]
    return found


OWNERS: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
    "class": (lambda: Owner, lambda owner: owner().name()),
    "inherited": (lambda: Inherits, lambda owner: owner().name()),
    "module": (module, lambda owner: owner.name()),
}


class Elsewhere:
    """A thread that does one thing after the other, as it is told."""

    def __init__(self) -> None:
        self._told, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._task: Callable[[], Any] | None = None
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._told.acquire() and self._task is not None:
            self._result = self._task()
            self._done.release()

    def does(self, task: Callable[[], Any]) -> Any:
        self._task = task
        self._told.release()
        assert self._done.acquire(timeout=60)
        return self._result

    def ends(self) -> None:
        self._task = None
        self._told.release()
        self._thread.join()


@pytest.mark.parametrize("kind", OWNERS)
@pytest.mark.parametrize("first_out", [True, False], ids=["first-in-first-out", "first-in-last-out"])
def test_threads_whose_replacements_overlap(kind: str, first_out: bool) -> None:
    made, call = OWNERS[kind]
    owner, other, here, there = made(), Elsewhere(), ExitStack(), ExitStack()
    before = dict(vars(owner))
    here.enter_context(patched_here(owner, "name", lambda *_: "here"))
    other.does(lambda: there.enter_context(patched_here(owner, "name", lambda *_: "there")))
    seen = lambda: (call(owner), other.does(lambda: call(owner)))  # noqa: E731
    assert seen() == ("here", "there")
    if first_out:
        here.close()
        assert seen() == ("own", "there")
        other.does(there.close)
    else:
        other.does(there.close)
        assert seen() == ("here", "own")
        here.close()
    assert seen() == ("own", "own")
    other.ends()
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("kind", OWNERS)
def test_a_replacement_within_another_may_call_it(kind: str) -> None:
    made, call = OWNERS[kind]
    owner = made()
    for _ in range(2):
        with patched_here(owner, "name", lambda *_: "outer"):
            outer = seen_here(owner, "name")
            with patched_here(owner, "name", lambda *args: f"inner of {outer(*args)}"):  # noqa: B023
                assert call(owner) == "inner of outer"
            assert call(owner) == "outer"
        assert call(owner) == "own"


@pytest.mark.parametrize("kind", OWNERS)
def test_what_wraps_calls_its_own_while_another_thread_has_replaced_it(kind: str) -> None:
    made, call = OWNERS[kind]
    owner, other, there = made(), Elsewhere(), ExitStack()
    other.does(lambda: there.enter_context(patched_here(owner, "name", lambda *_: "there")))
    with wrapped_here(owner, "name", lambda name: lambda *args: f"around {name(*args)}"):
        assert call(owner) == "around own"
        other.does(there.close)
        assert call(owner) == "around own"
    other.ends()
