"""The drawing of a report in headless Chromium: what is drawn of every stage, and what is seen of it at first."""

from __future__ import annotations

import pytest
from selenium.webdriver import ActionChains, Chrome

import psg_fx
from psg_fx import zoo
from support.pages import WINDOWS, Open
from support.reported import example, made

pytestmark = pytest.mark.browser

LARGE = {"batch": 2, "layers": 12, "width": 64, "heads": 4, "tokens": 16, "vocabulary": 100}


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


@pytest.mark.parametrize("model", ["cnn", "deep"])
def test_it_opens_on_the_per_sample_part(opened: Open, request: pytest.FixtureRequest, model: str) -> None:
    """As large as can be read; of the phases before it each is seen in its whole width or not at all."""
    page = opened(request.getfixturevalue(model))
    for window in WINDOWS:
        with page.window(*window):
            boxes = page.run("""view.cy.nodes('.open').orphans()
              .map((n) => [n.data('phase'), n.renderedBoundingBox({includeLabels: false})])""")
            width, zoom = page.run("[view.cy.width(), view.cy.zoom()]")
            assert zoom > 0.69
            seen = {phase: (box["x1"] >= -1 and box["x2"] <= width + 1) for phase, box in boxes}
            assert seen["per sample"]
            assert all(whole or box["x2"] < 0 for whole, (_, box) in zip(seen.values(), boxes, strict=True))


def test_nothing_lies_on_the_drawing_but_its_map(opened: Open, deep: psg_fx.PerSampleModule) -> None:
    page = opened(deep)
    on_it = page.run("""[...document.querySelectorAll('#graph-page *')].filter((e) => {
      const a = e.getBoundingClientRect(), b = byId('canvas').getBoundingClientRect();
      return !e.closest('#drawing') && a.width && a.top < b.bottom - 1 && a.bottom > b.top + 1;
    }).map((e) => e.id)""")
    assert on_it == []


@pytest.mark.parametrize("stage", ["captured", "sited", "tidied"])
def test_layers_that_are_alike_are_one_box_in_all_phases(
    opened: Open, deep: psg_fx.PerSampleModule, stage: str
) -> None:
    """Also where the first of them measures a size, or gradients meet between two of them."""
    page = opened(deep)
    page.show(stage)
    stacks = [label for label in page.drawn() if label.startswith("blocks.0…5  ×6")]
    assert len(stacks) == (3 if stage == "tidied" else 1)
    assert not [label for label in page.drawn() if label.startswith("blocks.") and label not in stacks]


def test_layers_that_are_alike_are_one_box(opened: Open, deep: psg_fx.PerSampleModule) -> None:
    page = opened(deep)
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


def test_the_minimap_shows_what_is_seen(opened: Open, deep: psg_fx.PerSampleModule) -> None:
    page = opened(deep)
    assert page.find("#minimap").is_displayed()
    before = page.run("({...view.cy.pan()})")
    there = ActionChains(page.driver).move_to_element_with_offset(page.find("#minimap"), -80, 0)
    there.click_and_hold().release().perform()
    assert page.run("({...view.cy.pan()})") != before
    page.run("void view.cy.fit(undefined, 24)")
    page.once("document.getElementById('minimap').hidden")


def test_without_a_loss(opened: Open) -> None:
    ex = zoo.example("mlp", batch=3)
    page = opened(made(ex.model, None, ex.inputs))
    for stage in ("forward", "backward"):
        page.show(stage)
        assert len(page.drawn()) > 5


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
