"""The report in headless Chromium: it opens without an error, and everything on it can be seen, found and clicked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait
from test_html_report import Evil, example, made

import psg_fx
from psg_fx import zoo
from psg_fx.planner.plan import PLAN

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,900",
)  # fmt: skip
LARGE = {"batch": 2, "layers": 12, "width": 64, "heads": 4, "tokens": 16, "vocabulary": 100}


def program(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"these tests need {' or '.join(names)}; on Debian: apt-get install chromium chromium-driver")
    return found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(program("chromedriver")))
    yield driver
    driver.quit()


Open = Callable[[psg_fx.PerSampleModule], "Page"]


@pytest.fixture
def opened(chromium: Chrome, tmp_path: Path) -> Iterator[Open]:
    """Writes and opens a report.  At the end of the test: nothing was complained of, and nothing else was loaded."""
    chromium.get("about:blank")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    path = tmp_path / "report.html"

    def open_report(step: psg_fx.PerSampleModule) -> Page:
        chromium.get(step.report(path).as_uri())
        return Page(chromium).once("typeof view !== 'undefined' && view.cy !== null")

    yield open_report
    assert chromium.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url for url in asked if not url.startswith("data:")} == {path.as_uri()}


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


@pytest.fixture(scope="module")
def cnn() -> psg_fx.PerSampleModule:
    return example("simplecnn")


@pytest.fixture(scope="module")
def gpt() -> psg_fx.PerSampleModule:
    return example("gpt")


def test_it_says_what_it_reports_on(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    header = page.find("header").text
    assert page.driver.title == "SimpleCNN: per-sample gradients, psg_fx report"
    for text in (
        "SimpleCNN",
        "nll_loss",
        "B 2",
        "device cpu",
        f"torch {torch.__version__}",
        f"psg_fx {psg_fx.__version__}",
    ):
        assert text in header


@pytest.mark.parametrize("name", ["simplecnn", "gpt", "lstm", "mlp"])
def test_every_stage_is_drawn(opened: Open, name: str) -> None:
    step = example(name)
    page = opened(step)
    assert page.stages() == list(step.graphs)
    for stage in page.stages():
        page.show(stage)
        assert len(page.drawn()) > 5
        assert page.run("view.stage.name") == stage
        assert page.panel.startswith(stage)
        assert page.run(
            "view.cy.nodes('.leaf, .closed').every((n) => Number.isFinite(n.position('x') + n.position('y')))"
        )


def test_boxes_do_not_overlap(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    """Neither in the default view nor with everything open."""
    page = opened(gpt)
    assert page.overlaps() == 0
    page.click("#expand-all")
    assert page.overlaps() == 0


def test_search_finds_a_parameter_inside_closed_modules(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    page = opened(gpt)
    page.click("#collapse-all")
    assert not [label for label in page.drawn() if "blocks.1.up" in label]
    page.search("blocks.1.up.weight")
    assert page.selected == ["blocks.1.up.weight\n[64, 16]"]
    assert "parameter blocks.1.up.weight" in page.panel
    assert "float32 [64, 16]" in page.panel
    assert "PLAN OF BLOCKS.1.UP.WEIGHT" in page.panel.upper()


def test_search_finds_a_size_that_is_not_shown(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    page = opened(gpt)
    page.search("batch_size")
    assert page.panel.startswith("%batch_size")
    assert page.selected


def test_a_click_fills_the_panel(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    page.show("sited")
    page.search("conv2d_1")
    page.click("#default-view")
    page.mouse_on("conv2d")
    panel = page.panel
    assert page.selected == ["conv2d\n[B, 4, 8, 8]"]
    for text in (
        "%conv2d",
        "aten.conv2d.default",
        "float32 [B, 4, 8, 8]",
        "dim 0",
        "convolution",
        "vision.py:",
        "self.conv1(images)",
    ):
        assert text in panel
    plan = PLAN.of(cnn.graphs["planned"])
    parts = [part for p in plan.parameters if p.gradient.name == "conv1.weight" for part in p.parts]
    assert parts
    for part in parts:
        assert str(part.tree) in panel
        assert str(part.contraction.network) in panel


def test_the_panel_leads_from_node_to_node(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    page.show("captured")
    page.search("conv2d")
    reads = [b.text for b in page.driver.find_elements(By.CSS_SELECTOR, "#panel .links button")]
    assert reads
    page.driver.find_elements(By.CSS_SELECTOR, "#panel .links button")[0].click()
    assert page.panel.startswith(f"%{reads[0]}")


def test_a_double_click_opens_and_closes_a_module(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    page = opened(gpt)
    page.show("captured")
    page.click("#collapse-all")
    closed = len(page.drawn())
    page.mouse_on("blocks", double=True)
    assert any(label.startswith("blocks.0") for label in page.drawn())
    assert page.panel.startswith("blocks")
    page.click("#toggle")
    assert len(page.drawn()) == closed


def test_a_module_lists_its_parameters_and_sites(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    page = opened(gpt)
    page.search("blocks.0.qkv")
    for text in ("blocks.0.qkv", "Linear", "blocks.0.qkv.weight", "blocks.0.qkv.bias", "linear"):
        assert text in page.panel


def test_edges_of_closed_modules_stand_for_those_inside(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    page = opened(gpt)
    page.click("#collapse-all")
    ends = page.run("view.cy.edges().map((e) => [e.source().id(), e.target().id()])")
    assert len({tuple(pair) for pair in ends}) == len(ends)
    assert all(a != b for a, b in ends)
    page.click("#expand-all")
    edges = sum(len(n.all_input_nodes) for n in gpt.graphs["tidied"].graph.nodes if n.op != "output")
    assert (
        0.5 * edges
        < page.run("view.cy.edges().length")
        <= edges + len(gpt.graphs["tidied"].graph.output_node().all_input_nodes)
    )


def test_the_other_pages(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    page.click("#page-plan")
    assert "conv{1,2}.bias" in page.find("#table-page").text or "conv1.bias" in page.find("#table-page").text
    page.click("#whole-plan summary")
    assert all(name in page.find("#table-page").text for name, _ in cnn.named_parameters())
    page.click("#page-time")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#table-page rect.predicted")) == 4
    page.click("#page-memory")
    assert "An estimate" in page.find("#table-page").text
    assert page.find("#table-page path.area").size["width"] > 300
    page.driver.find_element(By.CSS_SELECTOR, "#table-page td button").click()
    assert page.panel.startswith("%")
    page.click("#page-passes")
    text = page.find("#table-page").text
    assert all(name in text for name in ("capture", "differentiate", "lower", "tidy"))
    page.click("#licences-open")
    assert "Cytoscape Consortium" in page.find("#licences").text
    assert "Chris Pettitt" in page.find("#licences").text


@pytest.mark.parametrize("window", [(1280, 800), (1920, 1080)])
def test_it_opens_on_the_per_sample_part(opened: Open, window: tuple[int, int]) -> None:
    page = opened(made_gpt())
    before = page.driver.get_window_size()
    page.driver.set_window_size(*window)
    page.driver.refresh()
    page.once("typeof view !== 'undefined' && view.cy !== null")
    box = page.run("view.cy.nodes('[phase=\"per sample\"].open').renderedBoundingBox({includeLabels: false})")
    width = page.find("#canvas").size["width"]
    page.driver.set_window_size(before["width"], before["height"])
    assert box["x1"] >= -1
    assert box["x2"] <= width + 1


def made_gpt() -> psg_fx.PerSampleModule:
    ex = zoo.example("gpt", batch=2, layers=6, width=16, heads=2, tokens=6, vocabulary=11)
    return made(ex.model, ex.loss_fn, ex.inputs, ex.targets)


def test_layers_that_are_alike_are_one_box(opened: Open) -> None:
    page = opened(made_gpt())
    (stack,) = [label for label in page.drawn() if label.startswith("blocks.0…5  ×6") and "CausalBlock" in label]
    page.run("void select(view.cy.nodes().filter((n) => n.data('label') === arguments[0])[0].id())", stack)
    assert "6, all alike" in page.panel
    page.click("#take-apart")
    blocks = [label for label in page.drawn() if label.split("\n")[0] in {f"blocks.{k}" for k in range(6)}]
    assert len([label for label in blocks if "CausalBlock" in label]) == 6
    page.click("#default-view")
    assert stack in page.drawn()
    page.search("blocks.3.up.weight")
    assert page.selected == ["blocks.3.up.weight\n[64, 16]"]
    page.click("#default-view")
    page.search("blocks.4")
    assert page.selected[0].startswith("blocks.4\n")


def test_the_minimap_shows_what_is_seen(opened: Open) -> None:
    page = opened(made_gpt())
    assert page.find("#minimap").is_displayed()
    before = page.run("({...view.cy.pan()})")
    there = ActionChains(page.driver).move_to_element_with_offset(page.find("#minimap"), -80, 0)
    there.click_and_hold().release().perform()
    assert page.run("({...view.cy.pan()})") != before
    page.run("void view.cy.fit(undefined, 24)")
    page.once("document.getElementById('minimap').hidden")


def test_two_stages_are_compared(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    page.click("#page-compare")
    table = "document.querySelector('#table-page table')"
    rows = page.run(f"[...{table}.querySelectorAll('tbody tr')].map((row) => row.innerText)")
    nodes = {s: [str(n.target) for n in cnn.graphs[s].graph.nodes] for s in ("planned", "tidied")}
    cells = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    for op in ("bmm", "sum"):
        before, after = (sum(t.split(".")[1:2] == [op] for t in nodes[s]) for s in ("planned", "tidied"))
        if before != after:
            assert cells[op][:2] == [str(before), str(after)]
    assert cells
    page.run("void (document.querySelector('#compare-from').value = 'tidied')")
    page.run("void document.querySelector('#compare-from').dispatchEvent(new Event('change'))")
    assert "tidied" in page.find("#table-page").text


def test_links_into_it(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    page.run("void (location.hash = 'page=plan')")
    page.once("!document.getElementById('table-page').hidden")
    page.run("void (location.hash = 'site=linear')")
    page.once("view.selected !== null")
    assert page.panel.startswith("%linear")
    page.run("void (location.hash = 'stage=planned')")
    page.once("view.stage.name === 'planned'")
    page.run("void (location.hash = 'nothing=here')")
    page.driver.refresh()
    page.once("typeof view !== 'undefined' && view.cy !== null && view.stage.name === 'tidied'")


def test_without_a_loss(opened: Open) -> None:
    ex = zoo.example("mlp", batch=3)
    page = opened(made(ex.model, None, ex.inputs))
    for stage in ("forward", "backward"):
        page.show(stage)
        assert len(page.drawn()) > 5


def test_nothing_of_the_users_is_executed(opened: Open) -> None:
    page = opened(made(Evil(), F.cross_entropy, torch.randn(2, 4), torch.tensor([0, 1])))
    name = "</script><img src=x onerror=hit=1>"
    for stage in page.stages():
        page.show(stage)
        page.search(f"{name}.weight")
        assert f"{name}.weight" in page.panel
    for other in ("plan", "time", "memory", "passes"):
        page.click(f"#page-{other}")
    assert page.run("[typeof hit, document.images.length]") == ["undefined", 0]


def test_a_large_graph(opened: Open) -> None:
    """2,000 nodes and more: a view that can be read at first, and all of them in rows when that is asked for."""
    ex = zoo.example("gpt", **LARGE)
    page = opened(made(ex.model, ex.loss_fn, ex.inputs, ex.targets, quantities=psg_fx.ClippedSum(max_norm=1.0)))
    assert 10 < len(page.drawn()) < 100
    page.click("#expand-all")
    assert len(page.drawn()) > 2000
    assert page.overlaps() == 0
    assert "in rows by depth" in page.find("#shown").text
    page.search("blocks.7.down.bias")
    assert page.panel.startswith("%p_model_blocks_7_down_bias")


def test_dark(opened: Open, chromium: Chrome, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    colors = "[getComputedStyle(document.body).backgroundColor, view.cy.nodes('.leaf').style('background-color')]"
    light = page.run(colors)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    page.once(f"{colors}.every((color, k) => color !== {light}[k])")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.once(f"{colors}.every((color, k) => color === {light}[k])")
