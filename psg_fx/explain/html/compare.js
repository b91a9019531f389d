"use strict";
// Two stages side by side: which kinds of ops one has more of, and which nodes only one of them has.

const compared = {from: null, to: null};
const MOST_NODES = 200;

function comparePage() {
  const names = DATA.stages.map((stage) => stage.name);
  compared.from ??= names.includes("planned") ? "planned" : names[0];
  compared.to ??= names.at(-1);
  const choice = (side) => h("select", {id: `compare-${side}`, onchange: (event) => { compared[side] = event.target.value; showPage("compare"); }},
    names.map((name) => h("option", {value: name, selected: name === compared[side]}, name)));
  const from = stageNamed(compared.from), to = stageNamed(compared.to);
  return [
    h("h3", {}, "Compare two stages"),
    h("p", {}, "From ", choice("from"), " to ", choice("to"), `: ${from.size.toLocaleString("en")} and ${to.size.toLocaleString("en")} nodes.`),
    h("div", {class: "narrow"}, table(["kind of op", from.name, to.name, "difference"], countedOps(from, to), new Set([1, 2, 3]), new Set([0]))),
    ...onlyIn(from, to), ...onlyIn(to, from),
  ];
}

/** Kinds of ops of which the stages have different numbers, the largest differences first. */
function countedOps(from, to) {
  const counts = [from, to].map((stage) => {
    const found = new Map();
    for (const node of stage.nodes.filter((each) => each.role !== "output")) found.set(shortOp(node.op), (found.get(shortOp(node.op)) || 0) + 1);
    return found;
  });
  const kinds = [...new Set(counts.flatMap((found) => [...found.keys()]))].map((kind) => [kind, ...counts.map((found) => found.get(kind) || 0)]);
  const changed = kinds.filter(([, before, after]) => before !== after).sort((a, b) => Math.abs(b[2] - b[1]) - Math.abs(a[2] - a[1]));
  return changed.map(([kind, before, after]) => [kind, String(before), String(after), `${after > before ? "+" : "−"}${Math.abs(after - before)}`]);
}

function onlyIn(stage, other) {
  const known = new Set(other.nodes.map((node) => node.name));
  const nodes = stage.nodes.filter((node) => !known.has(node.name));
  if (!nodes.length) return [];
  const open = (node) => h("button", {class: "link mono", onclick: () => { showStage(stage.name); jump(node); }}, `%${node.name}`);
  const shown = nodes.slice(0, MOST_NODES);
  return [
    h("h3", {}, `In ${stage.name} alone: ${nodes.length.toLocaleString("en")} nodes` + (nodes.length > shown.length ? `; the first ${shown.length}` : "")),
    table(["node", "op", "value", "part", "module"], shown.map((node) => [open(node), shortOp(node.op), node.value, node.home.phase, node.home.module]), new Set(), new Set([0, 1, 2, 4])),
  ];
}

PAGES.compare = ["Compare", comparePage];
