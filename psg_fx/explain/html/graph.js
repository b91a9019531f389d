"use strict";
// The drawing of a stage by cytoscape: what of it is brought into view, what is selected, and its colours.

const view = {stage: null, open: new Set(), apart: new Set(), stacks: new Map(), sizes: false, cy: null, fast: false, selected: null};
const READABLE = 0.7; // the least zoom at which labels are read with ease
const MARGIN = 24; // around what is brought into view
const TAG = 0.76; // how much of the width of a parameter's box, which has a tip, two lines of text may take

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map();

function textWidth(text, font) {
  const key = font + text;
  if (!widths.has(key)) {
    ruler.font = font;
    widths.set(key, ruler.measureText(text).width);
  }
  return widths.get(key);
}

/** part: how much wider the box is than what the text may take of it. */
function sizeOf(lines, margin, part = 1) {
  const text = lines.filter(Boolean);
  const width = Math.max(...text.map((line) => textWidth(line, "12px system-ui, sans-serif")));
  return {w: Math.max(56, Math.ceil((width + 2 * margin) * part)), h: 14 + 15 * text.length};
}

/** Draws what is seen; `keep`: id of a group that stays where it is on the screen. */
function draw(keep = null) {
  const stage = view.stage;
  const seen = seenNow(stage);
  view.stacks = seen.stacks;
  const leaves = [...new Set(seen.standsFor.values())].length;
  const fast = leaves > LAYOUT.many;
  const before = keep ? anchor(keep) : null;
  const {bends, rows} = arrange(seen.root, seen.links, fast);
  const elements = elementsOf(seen, bends);
  if (view.cy && view.fast !== fast) view.cy = void view.cy.destroy();
  view.fast = fast;
  const cy = view.cy || startCytoscape(fast);
  cy.batch(() => {
    cy.elements().remove();
    cy.add(elements);
  });
  document.getElementById("shown").textContent =
    `${leaves.toLocaleString("en")} nodes and modules drawn, for ${stage.size.toLocaleString("en")} nodes` +
    (rows ? `; above ${fast ? LAYOUT.many : `${LAYOUT.crowd} in a module`} they stand in rows by depth, which is faster` : "");
  if (before) {
    const after = anchor(keep);
    if (after) cy.panBy({x: before.x - after.x, y: before.y - after.y});
  } else {
    frame();
  }
  mark();
  chart();
}

/** The middle of the upper edge of a group on the screen. */
function anchor(id) {
  const element = view.cy.getElementById(id);
  if (element.empty()) return null;
  const box = element.renderedBoundingBox({includeLabels: false});
  return {x: (box.x1 + box.x2) / 2, y: box.y1};
}

/**
 * All of it, unless that makes the labels unreadable; then the upper end of the per-sample part, and as many of the
 * phases before it as find room, none of them cut by the edge.
 */
function frame() {
  const cy = view.cy, width = cy.width() - 2 * MARGIN;
  cy.fit(undefined, MARGIN);
  if (cy.zoom() > 1.15) {
    cy.zoom(1.15);
    cy.center();
  }
  if (cy.zoom() >= READABLE) return;
  const phases = cy.nodes(".open, .closed").orphans().map((node) => node.boundingBox({includeLabels: false})).sort((a, b) => a.x1 - b.x1);
  const all = cy.elements().boundingBox(), asked = cy.nodes('[phase="per sample"]').orphans();
  if (asked.empty()) {
    cy.zoom(READABLE);
    cy.pan({x: Math.max(MARGIN, (cy.width() - all.w * READABLE) / 2) - all.x1 * READABLE, y: MARGIN - all.y1 * READABLE});
    return;
  }
  const last = asked.boundingBox({includeLabels: false});
  const first = phases.find((box) => (last.x2 - box.x1) * READABLE <= width) || last;
  const zoom = Math.min(1, Math.max(READABLE, Math.min(width / (last.x2 - first.x1), (cy.height() - 2 * MARGIN) / last.h)));
  cy.zoom(zoom);
  cy.pan({x: MARGIN - first.x1 * zoom, y: MARGIN - all.y1 * zoom});
}

function elementsOf(seen, bends) {
  const elements = [], at = new Map();
  const visit = (box, parent) => {
    const center = {x: box.x + box.w / 2, y: box.y + box.h / 2};
    at.set(box.id, {...center, parent, phase: (box.group || box.node.home).phase});
    if (box.children) {
      if (!box.isRoot) elements.push(openGroup(box, parent));
      for (const child of box.children) visit(child, box.isRoot ? undefined : box.id);
    } else {
      elements.push(box.group ? closedGroup(box, parent, center) : leaf(box, parent, center));
    }
  };
  visit(seen.root, undefined);
  for (const link of seen.links) elements.push(edge(link, at, bends.get(`${link.from} ${link.to}`)));
  return elements;
}

function openGroup(box, parent) {
  const {group} = box;
  const kind = group.phase === "forward" ? DATA.classes[group.module] : null;
  const label = group.module ? group.module + (kind ? `  ${kind}` : "") : group.phase;
  const shift = textWidth(label, "600 12px system-ui, sans-serif") + 2; // cytoscape puts a label beside the box, this inside
  return {group: "nodes", data: {id: box.id, parent, label, phase: group.phase, shift}, classes: "open"};
}

function closedGroup(box, parent, position) {
  const label = (box.run ? stackLabel(box.run) : groupLabel(box.group)).join("\n");
  const classes = box.run ? "closed stack" : "closed";
  return {group: "nodes", data: {id: box.id, parent, label, phase: box.group.phase, w: box.w, h: box.h}, classes, position};
}

function leaf(box, parent, position) {
  const label = nodeLabel(box.node).filter(Boolean).join("\n");
  return {group: "nodes", data: {id: box.id, parent, label, role: box.node.role, w: box.w, h: box.h}, classes: "leaf", position};
}

function edge(link, at, bend) {
  const data = {id: `${link.from} ${link.to}`, source: link.from, target: link.to, width: Math.min(5, 1 + Math.log2(link.count))};
  const a = at.get(link.from), b = at.get(link.to);
  if (a.phase !== b.phase) return {group: "edges", data: {...data, width: 1}, classes: "far"};
  if (a.parent !== b.parent) return {group: "edges", data: {...data, width: 1}, classes: "across"};
  const middle = bend ? bend.slice(1, -1) : [];
  const [dx, dy] = [b.x - a.x, b.y - a.y], length = Math.hypot(dx, dy);
  if (!middle.length || !length) return {group: "edges", data};
  // cytoscape wants bends as parts of the way from source to target, and distances from that line
  data.weights = middle.map((p) => ((p.x - a.x) * dx + (p.y - a.y) * dy) / (length * length));
  data.distances = middle.map((p) => ((p.y - a.y) * dx - (p.x - a.x) * dy) / length);
  return {group: "edges", data, classes: "bent"};
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function styles(large) {
  const font = {"font-family": "system-ui, sans-serif", "font-size": 12, color: color("ink"), "min-zoomed-font-size": 6};
  const phases = {forward: "forward", backward: "backward", "per sample": "per-sample"};
  return [
    {selector: "node", style: {...font, label: "data(label)", "text-wrap": "wrap", "text-valign": "center", "line-height": 1.25, shape: "round-rectangle", "corner-radius": 7, "border-width": 1.5}},
    {selector: ".leaf, .closed", style: {width: "data(w)", height: "data(h)"}},
    ...Object.keys(ROLES).map((role) => ({selector: `node[role="${role}"]`, style: {"background-color": color(`${role}-fill`), "border-color": color(role)}})),
    {selector: 'node[role="parameter"]', style: {shape: "round-tag", "text-margin-x": (node) => -((1 - TAG) / 2) * node.data("w")}},
    {selector: 'node[role="input"], node[role="output"]', style: {"corner-radius": 18}},
    {selector: 'node[role="site"]', style: {"border-width": 2.5}},
    ...Object.entries(phases).map(([phase, name]) => ({selector: `node[phase="${phase}"]`, style: {"background-color": color(`${name}-fill`), "border-color": color(name)}})),
    {selector: ".closed", style: {"border-style": "double", "border-width": 4.5}},
    {selector: ".stack", style: {"border-width": 8}},
    {selector: ".open", style: {"background-opacity": 0.28, "border-width": 1, "border-opacity": 0.55, "text-valign": "top", "text-halign": "left", "text-margin-x": "data(shift)", "text-margin-y": -3, "font-weight": 600, padding: LAYOUT.pad, "compound-sizing-wrt-labels": "exclude"}},
    {selector: "edge", style: {width: "data(width)", "line-color": color("edge"), "target-arrow-color": color("edge"), "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "straight"}},
    {selector: ".bent", style: {"curve-style": "round-segments", "segment-weights": "data(weights)", "segment-distances": "data(distances)", "edge-distances": "node-position"}},
    {selector: ".across", style: {opacity: 0.5}},
    {selector: ".far", style: {opacity: 0.2}},
    {selector: large ? "edge" : ".far", style: {"curve-style": "haystack", "haystack-radius": 0}}, // no arrows, the cheapest to draw
    {selector: "edge.near", style: {"line-color": color("accent"), "target-arrow-color": color("accent"), opacity: 1, "z-index": 9}},
    {selector: "node:selected", style: {"border-color": color("accent"), "border-width": 4, "border-style": "solid"}},
    {selector: "node:active", style: {"overlay-opacity": 0.06}},
  ];
}

/** large: while it is moved, the drawing is a picture without edges, so that it follows the mouse. */
function startCytoscape(large) {
  const cy = cytoscape({
    container: document.getElementById("canvas"), style: styles(large), layout: {name: "preset"}, minZoom: 0.02, maxZoom: 3,
    selectionType: "single", boxSelectionEnabled: false, hideEdgesOnViewport: large, textureOnViewport: large,
  });
  cy.on("tap", "node", (event) => select(event.target.id()));
  cy.on("tap", (event) => { if (event.target === cy) select(null); });
  cy.on("dbltap", "node", (event) => {
    const id = event.target.id(), group = view.stage.ids.get(id);
    if (group) toggle(group);
    else if (view.stacks.has(id)) takeApart(view.stacks.get(id));
  });
  cy.on("viewport resize", chartFrame);
  view.cy = cy;
  return cy;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.cy.style(styles(view.fast)));

function toggle(group) {
  if (view.open.has(group.key)) view.open.delete(group.key);
  else view.open.add(group.key);
  draw(group.id);
  showPanel();
}

/** Shows each of the modules of a stack. */
function takeApart(run) {
  const around = run[0].parent;
  view.apart.add(around.key);
  view.selected = null;
  draw(around.id);
  showPanel();
}

/** Selects a node or a group by its id, or nothing. */
function select(id) {
  view.selected = id;
  mark();
  showPanel();
}

/** Shows the selection on the drawing. */
function mark() {
  const cy = view.cy;
  cy.batch(() => {
    cy.elements(".near").removeClass("near");
    cy.elements(":selected").unselect();
    if (view.selected === null) return;
    const found = cy.getElementById(view.selected);
    found.select();
    found.connectedEdges().addClass("near");
  });
}

/** Opens what hides a node or group, selects it, and brings it to the middle. */
function jump(target) {
  const group = target.home || target.parent;
  let changed = false;
  for (const outer of around(group)) {
    if (!view.open.has(outer.key)) { view.open.add(outer.key); changed = true; }
  }
  if (target.parent && !view.apart.has(target.parent.key)) { // a group, which may stand in a stack
    view.apart.add(target.parent.key);
    changed = true;
  }
  if (target.role === "size" && !view.sizes) {
    view.sizes = document.getElementById("sizes").checked = changed = true;
  }
  view.selected = target.id;
  if (changed) draw(); else mark();
  const found = view.cy.getElementById(target.id);
  if (view.cy.zoom() < 0.6) view.cy.zoom(0.8);
  view.cy.center(found);
  showPanel();
}
