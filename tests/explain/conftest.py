"""What the tests of the report share: the browser, a report opened in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import psg_fx
from psg_fx import zoo
from support.reported import example, made

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

    from support.pages import Open, Page


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from support.pages import chrome

    driver = chrome(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(chromium: Chrome, tmp_path: Path) -> Iterator[Open]:
    """Writes and opens a report.  At the end of the test: nothing was complained of, and nothing else was loaded."""
    from support.pages import READY, Page

    chromium.get("about:blank")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    path = tmp_path / "report.html"

    def open_report(step: psg_fx.PerSampleModule) -> Page:
        chromium.get(step.report(path).as_uri())
        return Page(chromium).once(READY)

    yield open_report
    assert chromium.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url for url in asked if not url.startswith("data:")} == {path.as_uri()}


@pytest.fixture(scope="session")
def cnn() -> psg_fx.PerSampleModule:
    return example("simplecnn")


@pytest.fixture(scope="session")
def gpt() -> psg_fx.PerSampleModule:
    return example("gpt")


@pytest.fixture(scope="session")
def deep() -> psg_fx.PerSampleModule:
    """Six layers that are alike."""
    ex = zoo.example("gpt", batch=2, layers=6, width=16, heads=2, tokens=6, vocabulary=11)
    return made(ex.model, ex.loss_fn, ex.inputs, ex.targets, quantities=psg_fx.ClippedSum(max_norm=1.0))
