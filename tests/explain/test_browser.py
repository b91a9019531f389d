"""The report in headless Chromium: it opens without an error, and everything on it can be seen, found and clicked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from selenium.webdriver.common.by import By

import psg_fx
from psg_fx.planner.plan import PLAN
from support.pages import WINDOWS, Open
from support.reported import Evil, made

pytestmark = pytest.mark.browser


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


def test_a_module_lists_its_parameters_and_sites(opened: Open, gpt: psg_fx.PerSampleModule) -> None:
    page = opened(gpt)
    page.search("blocks.0.qkv")
    for text in ("blocks.0.qkv", "Linear", "blocks.0.qkv.weight", "blocks.0.qkv.bias", "linear"):
        assert text in page.panel


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


@pytest.mark.parametrize("model", ["cnn", "deep"])
def test_nothing_is_cut_off(opened: Open, request: pytest.FixtureRequest, model: str) -> None:
    step = request.getfixturevalue(model)
    page = opened(step)
    for window in WINDOWS:
        with page.window(*window):
            assert page.cut_off() == []
            for name in ("plan", "time", "memory", "passes", "compare"):
                page.click(f"#page-{name}")
                page.run("void document.querySelectorAll('details').forEach((each) => { each.open = true; })")
                assert page.cut_off() == [], name
            page.show("tidied")
            for parameter, _ in [*step.named_parameters()][:8]:
                page.search(parameter)
                assert page.cut_off() == [], parameter


def test_search_says_that_nothing_is_found(opened: Open, cnn: psg_fx.PerSampleModule) -> None:
    page = opened(cnn)
    page.find("#search").send_keys("layer1.0.conv1")
    assert page.find("#hits").text == "Nothing in tidied is called so."
    page.find("#search").clear()
    page.find("#search").send_keys("conv1")
    assert "conv1.weight" in page.find("#hits").text


def test_numbers_of_nodes_are_the_same_everywhere(opened: Open, deep: psg_fx.PerSampleModule) -> None:
    page = opened(deep)
    for stage, gm in deep.graphs.items():
        page.show(stage)
        size = f"{len(gm.graph.nodes):,}"
        assert page.find(f"#stage-{stage}").text.split()[-1] == size
        assert page.find("#shown").text.endswith(f"for {size} nodes")
        passes = [p for p in deep.captures[-1].step.history.passes if p.after.value == stage]
        assert [f"PASS {p.name.upper()}" in page.panel.upper() for p in passes] == [True] * len(passes)
        assert page.panel.replace(",", "").count(str(len(gm.graph.nodes))) >= 1


def test_sites_that_are_alike_share_a_bar(opened: Open, deep: psg_fx.PerSampleModule) -> None:
    page = opened(deep)
    page.click("#page-time")
    names = page.run("[...document.querySelectorAll('#table-page text.name')].map((each) => each.textContent)")
    assert "blocks.0…5.up  ×6" in names
    assert not [name for name in names if name.startswith("blocks.") and "×" not in name]


def test_a_layer_shows_its_plan(opened: Open, deep: psg_fx.PerSampleModule) -> None:
    page = opened(deep)
    page.search("blocks.3.up")
    plan = PLAN.of(deep.graphs["planned"])
    parts = [part for p in plan.parameters if p.gradient.name == "blocks.3.up.weight" for part in p.parts]
    assert parts
    assert all(str(part.tree) in page.panel for part in parts)
