"use strict";
// Header, navigation, toolbar and search.

const byId = (id) => document.getElementById(id);
const opened = new Map(); // stage -> its open groups, kept while other stages are looked at

function showStage(name) {
  byId("table-page").hidden = true;
  byId("graph-page").hidden = byId("panel").hidden = false;
  current(`stage-${name}`);
  if (view.stage && view.stage.name === name) {
    view.cy.resize();
    return;
  }
  view.stage = stageNamed(name);
  view.selected = null;
  if (!opened.has(name)) opened.set(name, openByDefault(view.stage));
  view.open = opened.get(name);
  draw();
  showPanel();
}

function showPage(name) {
  byId("graph-page").hidden = byId("panel").hidden = true;
  byId("table-page").hidden = false;
  byId("table-page").replaceChildren(...PAGES[name][1]());
  byId("table-page").scrollTop = 0;
  current(`page-${name}`);
}

function current(id) {
  for (const button of document.querySelectorAll("nav button[aria-current]")) button.removeAttribute("aria-current");
  byId(id).setAttribute("aria-current", "page");
}

function header() {
  const {model, loss, batch, part, device, torch, version, asked, seconds} = DATA.about;
  document.title = `${model}: per-sample gradients, psg_fx report`;
  byId("model").append(model, h("small", {}, loss ? `per-sample gradients of ${loss}` : "per-sample gradients, without a loss"));
  const chips = [
    ["B", batch], ["device", device], ["asked", asked.join(", ") || "losses only"], ["per-sample part, predicted", duration(seconds)],
    ["in parts of", part && part < batch ? part : null], ["torch", torch], ["psg_fx", version],
  ];
  byId("chips").append(...chips.filter(([, value]) => value !== null).map(([name, value]) => h("span", {class: "chip"}, `${name} `, h("b", {}, String(value)))));
}

function navigation() {
  const item = (id, text, small, onclick) => h("li", {}, h("button", {id, onclick}, text, h("small", {}, small)));
  byId("stages").append(...DATA.stages.map((stage) => item(`stage-${stage.name}`, stage.name, graphSize(stage).toLocaleString("en"), () => showStage(stage.name))));
  byId("pages").append(...Object.entries(PAGES).map(([name, [title]]) => item(`page-${name}`, title, "", () => showPage(name))));
  byId("licences-open").addEventListener("click", () => {
    byId("licences").querySelector("pre").textContent = JSON.parse(byId("licence-texts").textContent);
    byId("licences").showModal();
  });
}

function toolbar() {
  const reopen = (keys) => {
    view.open = keys;
    opened.set(view.stage.name, keys);
    if (view.selected !== null && view.stage.ids.has(view.selected)) view.selected = null;
    draw();
    showPanel();
  };
  byId("expand-all").addEventListener("click", () => reopen(new Set(view.stage.byKey.keys())));
  byId("collapse-all").addEventListener("click", () => reopen(new Set([...view.stage.byKey.values()].filter((g) => !g.module).map((g) => g.key))));
  byId("default-view").addEventListener("click", () => { view.apart.clear(); reopen(openByDefault(view.stage)); });
  byId("fit").addEventListener("click", () => view.cy.fit(undefined, MARGIN));
  byId("sizes").addEventListener("change", (event) => {
    view.sizes = event.target.checked;
    view.selected = null;
    draw();
    showPanel();
  });
  const roles = Object.entries(ROLES).filter(([role]) => role !== "size");
  byId("legend").append(...roles.map(([role, text]) => h("span", {}, h("i", {style: `background:var(--${role}-fill);border-color:var(--${role})`}), text)));
}

/** What can be found in the stage that is shown: parameters by their own names, nodes, modules. */
function matches(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const found = [];
  const offer = (target, name, kind) => {
    const place = name.toLowerCase().indexOf(wanted);
    if (place >= 0) found.push({target, name, kind, rank: (name.length === wanted.length ? 0 : place === 0 ? 1 : 2)});
  };
  for (const node of view.stage.nodes) {
    const own = ownName(node);
    if (own.toLowerCase().includes(wanted)) offer(node, own, node.role);
    else offer(node, node.name, `${shortOp(node.op)}, ${node.home.phase}`);
  }
  for (const group of view.stage.byKey.values()) if (group.module) offer(group, group.module, `module, ${group.phase}`);
  return found.sort((a, b) => a.rank - b.rank || a.name.length - b.name.length).slice(0, 40);
}

function search() {
  const box = byId("search"), list = byId("hits");
  let hits = [], chosen = 0;
  const close = () => { list.hidden = true; };
  const go = (hit) => { close(); box.blur(); jump(hit.target); };
  const show = () => {
    const lines = hits.map((hit, k) => h("li", {"aria-selected": k === chosen, onmousedown: () => go(hit)}, hit.name, h("small", {}, hit.kind)));
    list.replaceChildren(...(lines.length ? lines : [h("li", {class: "none"}, `Nothing in ${view.stage.name} is called so.`)]));
    list.hidden = !box.value.trim();
    list.querySelector("[aria-selected]")?.scrollIntoView({block: "nearest"});
  };
  box.addEventListener("input", () => { hits = matches(box.value); chosen = 0; show(); });
  box.addEventListener("blur", close);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && hits.length) go(hits[chosen]);
    else if (event.key === "Escape") { box.value = ""; hits = []; show(); }
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      chosen = Math.max(0, Math.min(hits.length - 1, chosen + (event.key === "ArrowDown" ? 1 : -1)));
      show();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== box && !byId("graph-page").hidden) { event.preventDefault(); box.focus(); box.select(); }
  });
}

/** `#site=linear_3`, `#node=add_2`, `#stage=planned`, `#page=plan`: what a link to the report may name. */
function follow(hash) {
  const [kind, name] = decodeURIComponent(hash.replace(/^#/, "")).split("=");
  if (kind === "page" && name in PAGES) showPage(name);
  else if (kind === "stage" && DATA.stages.some((stage) => stage.name === name)) showStage(name);
  else if (kind === "site" && SITE.has(name)) openSite(name);
  else if (kind === "node") {
    showStage(view.stage?.nodes.some((node) => node.name === name) ? view.stage.name : LAST);
    const found = view.stage.nodes.find((node) => node.name === name);
    if (found) jump(found);
  } else return false;
  return true;
}

const LAST = DATA.stages.some((stage) => stage.name === "tidied") ? "tidied" : DATA.stages[0].name;
header();
navigation();
toolbar();
search();
if (!follow(location.hash)) showStage(LAST);
window.addEventListener("hashchange", () => follow(location.hash));
