"""Tests that share what takes long to make run in one process, in whatever way pytest-xdist learns of it."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.xdist_group("together")
RAN: list[str] = []


@pytest.mark.parametrize("number", range(4))
def test_one_process_runs_a_group_in_its_order(request: pytest.FixtureRequest, number: int) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and request.config.getoption("loadgroup"):
        assert request.node.nodeid.endswith("@together")
        before = [item.name for item in request.session.items if item.path == request.path]
        assert before[: before.index(request.node.name)] == RAN
    RAN.append(request.node.name)
