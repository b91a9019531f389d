"""A report as a reader sees it, in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

import psg_fx

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,900",
)  # fmt: skip
READY = "typeof view !== 'undefined' && view.cy !== null"


WINDOWS = [(1280, 800), (1400, 900), (1920, 1080)]
"""Sizes in which a report must be readable."""

Open = Callable[[psg_fx.PerSampleModule], "Page"]
"""Writes a report and opens it."""


def chrome(profile: Path) -> Chrome:
    """A browser that notes what it loads and what it complains of."""
    options = ChromeOptions()
    options.binary_location = _program("chromium", "chromium-browser", "google-chrome")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options=options, service=Service(_program("chromedriver")))


def _program(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"these tests need {' or '.join(names)}; on Debian: apt-get install chromium chromium-driver")
    return found


class Page:
    """What a reader sees of a report, and does to it."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def once(self, condition: str) -> Page:
        """This page, as soon as that is so."""
        WebDriverWait(self.driver, 60).until(lambda _: self.run(condition))
        return self

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    @contextmanager
    def window(self, width: int, height: int) -> Iterator[None]:
        """The page, opened anew in a window of that size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.refresh()
        self.once(READY)
        yield
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def cut_off(self) -> list[str]:
        """What is wider than the place it has: it would be cut off, scroll sideways, or lie on its neighbour."""
        return self.run("""[...document.querySelectorAll('html, header, nav, main, aside, td, th, dd, .wide, .mono')]
          .filter((e) => e.getClientRects().length && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
          .map((e) => `${e.tagName} ${e.id} ${e.className} ${e.innerText.slice(0, 60)}`)""")

    @property
    def panel(self) -> str:
        return self.find("#panel").text

    @property
    def selected(self) -> list[str]:
        """The labels of what is marked on the drawing."""
        return self.run("view.cy.nodes(':selected').map((node) => node.data('label'))")

    def drawn(self) -> list[str]:
        return self.run("view.cy.nodes().map((node) => node.data('label'))")

    def overlaps(self) -> int:
        """How many boxes lie on another."""
        return self.run("""(() => {
          const boxes = view.cy.nodes('.leaf, .closed').map((n) => ({...n.position(), w: n.width(), h: n.height()}));
          const meet = (a, b) => 2 * Math.abs(a.x - b.x) < a.w + b.w - 2 && 2 * Math.abs(a.y - b.y) < a.h + b.h - 2;
          return boxes.filter((a, i) => boxes.slice(i + 1).some((b) => meet(a, b))).length;
        })()""")

    def stages(self) -> list[str]:
        return [
            b.get_attribute("id").removeprefix("stage-")
            for b in self.driver.find_elements(By.CSS_SELECTOR, "#stages button")
        ]

    def show(self, stage: str) -> None:
        self.click(f"#stage-{stage}")

    def search(self, text: str) -> None:
        box = self.find("#search")
        box.clear()
        box.send_keys(text, Keys.ENTER)

    def mouse_on(self, label: str, double: bool = False) -> None:
        """Clicks the node on the canvas whose label begins so."""
        found = "view.cy.nodes().filter((node) => node.data('label').startsWith(arguments[0]))[0]"
        self.run(f"void view.cy.center({found})", label)
        x, y = self.run(f"Object.values({found}.renderedPosition())", label)
        canvas = self.find("#canvas")
        dx, dy = x - canvas.size["width"] / 2, y - canvas.size["height"] / 2
        chain = ActionChains(self.driver).move_to_element_with_offset(canvas, round(dx), round(dy))
        (chain.double_click() if double else chain.click()).perform()
