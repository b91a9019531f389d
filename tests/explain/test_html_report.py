"""`step.report()`: what the page is told of a step, and that the file is whole, safe and needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections import Counter
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx import zoo
from psg_fx.explain import html
from psg_fx.explain.html.content import content
from psg_fx.explain.html.memory import memory
from psg_fx.explain.html.modules import LOSS, TOGETHER, common
from psg_fx.measure import tree_times
from support.reported import EVIL, SIZES, Evil, example, made
from support.selection import one_in

pytestmark = pytest.mark.xdist_group("report")  # they read one step of a transformer
PAGE = Path(html.__file__).parent


class Tags(HTMLParser):
    """The tags of a page with their attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def told(step: psg_fx.PerSampleModule, measure: bool = False) -> dict[str, Any]:
    """What the page reads."""
    return json.loads(html.as_json(content(step.model, step.loss_fn, step.captures[-1].step.history, measure)))


def rows(data: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    """The nodes of a stage with their texts."""
    found = next(s for s in data["stages"] if s["name"] == stage)
    named = [dict(zip(data["columns"], row, strict=True)) for row in found["nodes"]]
    return [{k: v if k in ("group", "inputs") else data["texts"][v] for k, v in row.items()} for row in named]


@pytest.fixture(scope="module")
def evil() -> psg_fx.PerSampleModule:
    return made(Evil(), F.cross_entropy, torch.randn(2, 4), torch.tensor([0, 1]))


@pytest.mark.slow
def test_every_stage_has_every_node_and_edge(gpt: psg_fx.PerSampleModule) -> None:
    data = told(gpt)
    assert [stage["name"] for stage in data["stages"]] == list(gpt.graphs)
    for stage, gm in gpt.graphs.items():
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        found = rows(data, stage)
        assert [row["name"] for row in found[: len(nodes)]] == [node.name for node in nodes]
        for node, row in zip(nodes, found, strict=False):
            assert {found[k]["name"] for k in row["inputs"]} == {n.name for n in node.all_input_nodes}
        assert {row["role"] for row in found[len(nodes) :]} == {"output"}


def test_what_is_said_of_a_node(gpt: psg_fx.PerSampleModule) -> None:
    node = next(row for row in rows(told(gpt), "sited") if row["name"] == "linear")
    assert node["op"] == "aten.linear.default"
    assert node["value"] == "float32 [B, 6, 48]"
    assert (node["samples"], node["role"], node["site"]) == ("dim 0", "site", "linear")
    assert re.match(r"block\.py:\d+: attended = self\.attend\(self\.qkv", node["source"])


def test_late_nodes_know_their_site_and_cotangent(gpt: psg_fx.PerSampleModule) -> None:
    data = told(gpt)
    sites = {site["name"] for site in data["sites"]["rows"]}
    late = rows(data, "tidied")
    assert {row["site"] for row in late if row["role"] == "site"} == sites
    assert {row["cotangent"] for row in late} - {""} <= sites
    assert all(row["role"] != "site" for row in late if row["op"] in ("aten.view.default", "aten.t.default", "getitem"))


@pytest.mark.parametrize("name", one_in(4, ["gpt", "mlp", "lstm", "simplecnn"]))
def test_modules_are_those_of_the_model(name: str) -> None:
    step = example(name)
    known = {path for path, _ in step.model.named_modules()} | {LOSS, TOGETHER}
    data = told(step)
    for stage in data["stages"]:
        assert {module for _, module in stage["groups"]} <= known
    phases = [{phase for phase, _ in stage["groups"]} for stage in data["stages"]]
    assert phases[0] == {"forward"}
    assert phases[-1] == {"forward", "backward", "per sample"}
    assert {path: type(step.model.get_submodule(path)).__name__ for path in data["classes"]} == data["classes"]


def test_ops_of_a_parameter_lie_in_its_module(gpt: psg_fx.PerSampleModule) -> None:
    """Also in the backward and in the per-sample part, whose ops carry no module."""
    data = told(gpt)
    groups = data["stages"][-1]["groups"]
    places = {row["name"]: groups[row["group"]] for row in rows(data, "tidied") if row["group"] >= 0}
    assert places["blocks_1_up_weight_clipped_sum"] == ["per sample", "blocks.1.up"]
    assert places["clip_factors"] == ["per sample", TOGETHER]
    assert list(places.values()).count(["per sample", TOGETHER]) < len(list(gpt.parameters()))
    backward = {module for phase, module in places.values() if phase == "backward"}
    assert {"blocks.0.qkv", "blocks.1.down", "norm", "head", LOSS} <= backward


def test_layers_that_are_alike_have_the_same_ops_in_the_backward() -> None:
    """Where the gradients of a residual add meet is the layer that reads the sum."""
    ex = zoo.example("gpt", **SIZES["gpt"] | {"layers": 3})
    data = told(made(ex.model, ex.loss_fn, ex.inputs, ex.targets))
    groups = data["stages"][-1]["groups"]
    ops: list[list[tuple[str, str]]] = [[], [], []]
    for row in rows(data, "tidied"):
        phase, module = groups[row["group"]] if row["group"] >= 0 else ("", "")
        found = re.fullmatch(r"blocks\.(\d)(.*)", module)
        if phase == "backward" and found:
            ops[int(found[1])].append((found[2], row["op"]))
    assert ops[0] == ops[1] == ops[2]
    assert ops[0].count(("", "aten.add.Tensor")) == 2


def test_results_are_counted_as_they_are_returned() -> None:
    """Two parameters may have one gradient, which is returned twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.a + self.b).square().sum(1)

    step = made(Twice(), lambda y: y.mean(), torch.randn(2, 3), quantities=psg_fx.Grads())
    outputs = {row["name"]: row for row in rows(told(step), "tidied") if row["role"] == "output"}
    assert outputs["grads"]["value"] == "2 values"
    assert len(outputs["grads"]["inputs"]) == 2
    assert outputs["loss"]["value"] == "result"


def test_common() -> None:
    assert common(["a.b.c", "a.b", "a.b.d"]) == "a.b"
    assert common(["ab", "a"]) == ""
    assert common(["a", ""]) == ""
    assert common([]) == ""


def test_passes_add_and_remove_what_makes_the_difference(gpt: psg_fx.PerSampleModule) -> None:
    for step in told(gpt)["passes"]:
        added, removed = (Counter(dict(step[key])) for key in ("added", "removed"))
        assert step["after"] - step["before"] == added.total() - removed.total()
        assert not set(added) & set(removed)
    differentiate = next(step for step in told(gpt)["passes"] if step["name"] == "differentiate")
    assert dict(differentiate["removed"])["aten.linear.default"] == 9


def test_the_plan_is_that_of_explain(gpt: psg_fx.PerSampleModule) -> None:
    data, text = told(gpt), gpt.explain(wide=True)
    assert data["summary"] in text
    lines = {re.sub(r"\s+", " ", line).strip() for line in text.splitlines()}
    for row in [row["cells"] for row in data["plan"]["rows"]] + [site["cells"] for site in data["sites"]["rows"]]:
        assert re.sub(r"\s+", " ", " ".join(row)).strip() in lines
    for row in data["plan"]["rows"]:
        assert (row["tree"], row["method"]) not in [(tree, method) for tree, method, _ in row["alternatives"]]
        assert set(row["sites"]) <= {site["name"] for site in data["sites"]["rows"]}


@pytest.mark.rest  # measured by what test_report.py shows, test_measured_beside_predicted
def test_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    as_compiled = tree_times.compiled
    monkeypatch.setattr(tree_times, "compiled", lambda run, given, backend: as_compiled(run, given, "eager"))
    step = example("mlp")
    assert all(row["measured"] > 0 for row in told(step, measure=True)["plan"]["rows"])
    assert all(row["measured"] is None for row in told(step)["plan"]["rows"])


def test_memory_of_a_graph() -> None:
    """float32: a and its view hold 16 bytes, c 16, d 4; a is free once c is made, c is a result."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x.relu()
        c = a.view(2, 2) + 1
        return c, c.sum()

    gm = make_fx(run, tracing_mode="fake")(torch.randn(4))
    found = memory(gm, sympy.Symbol("B"), 1)
    assert [n.name for n in gm.graph.nodes] == ["x_1", "relu", "view", "add", "sum_1", "output"]
    assert found.live == [0, 16, 16, 32, 20, 20]
    assert found.peak == 3
    assert [(node.name, size) for node, size in found.largest] == [("relu", 16), ("add", 16)]


def test_memory_grows_with_the_batch() -> None:
    step = example("mlp")
    gm = step.graphs["tidied"]
    batch = gm.meta["psg_fx"].batch
    one, two = (max(memory(gm, batch, size).live) for size in (10, 20))
    assert one < two < 2 * one + 1


def test_without_a_loss() -> None:
    ex = zoo.example("mlp", **SIZES["mlp"])
    data = told(made(ex.model, None, ex.inputs))
    assert [stage["name"] for stage in data["stages"]][-2:] == ["forward", "backward"]
    assert data["about"]["loss"] is None
    assert {module for _, module in data["stages"][0]["groups"]} <= {path for path, _ in ex.model.named_modules()}
    assert any(row["role"] == "per-sample" for row in rows(data, "backward"))


def test_in_parts() -> None:
    ex = zoo.example("mlp", **SIZES["mlp"] | {"batch": 64})
    step = psg_fx.transform(
        ex.model, ex.loss_fn, quantities=psg_fx.ClippedSum(1.0), backend="eager", memory_budget=20_000
    )
    step(ex.inputs, ex.targets)
    assert told(step)["about"]["part"] < 64


def test_the_file_is_whole(gpt: psg_fx.PerSampleModule, tmp_path: Path) -> None:
    path = gpt.report(tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Tags(text)
    attributes = [(name, value) for _, found in page.tags for name, value in found.items()]
    assert not [value for name, value in attributes if name in ("src", "srcset", "action")]
    assert [value for name, value in attributes if name == "href"] == ["data:,"]
    assert not re.search(
        r"@import|url\(|innerHTML|sourceMappingURL", "".join((PAGE / n).read_text() for n in own_files())
    )
    assert "sourceMappingURL" not in text
    for name in html.VENDOR:
        assert html.as_json((PAGE / "vendor" / f"{name}.LICENSE").read_text())[1:-1] in text


def own_files() -> list[str]:
    return [path.name for path in sorted(PAGE.iterdir()) if path.suffix in (".js", ".css", ".html")]


def test_only_our_scripts_may_run(evil: psg_fx.PerSampleModule, tmp_path: Path) -> None:
    """Names and lines of the user's that look like markup are data, and what is no script of ours has no hash."""
    page = Tags(evil.report(tmp_path / "report.html").read_text(encoding="utf-8"))
    policy = next(found["content"] for tag, found in page.tags if tag == "meta" and "http-equiv" in found)
    kinds = [found for tag, found in page.tags if tag == "script"]
    code = [text for text, found in zip(page.scripts, kinds, strict=True) if "type" not in found]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    assert policy is not None
    assert policy.startswith(f"default-src 'none'; script-src {allowed};")
    assert len(code) == len(html.VENDOR) + len(html.SCRIPTS)
    assert "img" not in [tag for tag, _ in page.tags]
    data = json.loads(next(text for text, found in zip(page.scripts, kinds, strict=True) if found.get("id") == "data"))
    assert f"{EVIL}.weight" in [row["parameter"] for row in data["plan"]["rows"]]
    assert any("@DATA@" in text for text in data["texts"])


def test_json_in_a_script() -> None:
    value = {"</script>": ["<!--", "&amp;", "\u2028\u2029", "ȳ"]}
    text = html.as_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        html.as_json(float("nan"))


def test_there_is_nothing_to_report_before_the_first_call(tmp_path: Path) -> None:
    step = psg_fx.transform(nn.Linear(2, 1), lambda out: out.sum())
    with pytest.raises(psg_fx.BadArgument, match="nothing has been captured yet"):
        step.report(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_the_page_is_installed() -> None:
    project = tomllib.loads((PAGE.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["psg_fx.explain.html"]
    files = [str(p.relative_to(PAGE)) for p in PAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {"page.html", "vendor/cytoscape.min.js"} <= set(files)
    assert not [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)]
