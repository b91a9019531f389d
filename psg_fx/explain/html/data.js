"use strict";
// The data of the page, and the one way in which it becomes elements: text nodes, never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

const PHASES = ["forward", "backward", "per sample"];
const ROLES = {
  input: "input", parameter: "parameter, buffer", site: "site: a parameter meets data", forward: "forward",
  backward: "backward", "per-sample": "per-sample part", output: "result", size: "size",
};

/** An element: `h("td", {class: "mono", onclick: f}, "text", child, ...)`; null children are left out. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same for the elements of a drawing. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(2)} ms` : `${(seconds * 1e6).toFixed(0)} µs`;
}

function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${Number((count / size).toPrecision(3))} ${unit}`;
  }
  return `${count} bytes`;
}

/** A text that may be broken after a product, a comma, an underscore or a dot, but in no shape, arrow or duration. */
function breakable(text) {
  const whole = text.split(/(\[[^\]]*\]|->|\d (?:s|ms|µs)\b)/); // every second piece is one that stays in a line
  const may = /(?<=[^A-Z0-9]·|[,_+]|\w\.)/;
  return whole.flatMap((piece, k) => k % 2 ? h("span", {class: "whole"}, piece) : piece.split(may).flatMap((part, n) => n ? [h("wbr"), part] : [part]));
}

/** How many nodes a stage has, in its data; its results are drawn as several, and are one. */
function graphSize(stage) {
  const group = DATA.columns.indexOf("group");
  return stage.nodes.filter((row) => row[group] !== -1).length + 1;
}

/** `addmm` of `aten.addmm.default`. */
function shortOp(op) {
  const parts = op.split(".");
  return parts.length > 2 ? parts.slice(1, -1).join(".") : op;
}

/** What an input holds, as the model calls it; "" for an op. */
function ownName(node) {
  if (node.role !== "parameter" && node.role !== "input") return "";
  return node.op === KEPT ? node.name : node.op.slice(node.op.indexOf(" ") + 1);
}

const KEPT = "kept from the forward"; // an input of the backward half of a step without a loss
const decoded = new Map();

/** A stage with its nodes as objects and its modules as a tree of groups; made when it is first looked at. */
function stageNamed(name) {
  if (!decoded.has(name)) decoded.set(name, decode(DATA.stages.find((stage) => stage.name === name)));
  return decoded.get(name);
}

function decode(stage) {
  const numbers = new Set(["group", "inputs"]);
  const nodes = stage.nodes.map((row, index) => {
    const node = {id: `n${index}`, index, users: []};
    DATA.columns.forEach((column, k) => { node[column] = numbers.has(column) ? row[k] : DATA.texts[row[k]]; });
    return node;
  });
  for (const node of nodes) for (const input of node.inputs) nodes[input].users.push(node.index);
  const root = newGroup("", "", "", null);
  const byKey = new Map([["", root]]);
  const homes = stage.groups.map(([phase, module]) => groupFor(byKey, phase, module));
  for (const node of nodes) {
    node.home = node.role === "output" ? homeOfResult(node, nodes, homes, byKey) : homes[node.group];
    node.home.nodes.push(node);
  }
  const ids = new Map([...byKey.values()].map((group) => [group.id, group]));
  return {name: stage.name, size: graphSize(stage), nodes, root, byKey, ids};
}

let made = 0;

function newGroup(key, phase, module, parent) {
  return {id: `g${made++}`, key, phase, module, parent, children: [], nodes: []};
}

/** The group of a module in a phase, and those around it. */
function groupFor(byKey, phase, module) {
  const key = module ? `${phase}/${module}` : phase;
  if (byKey.has(key)) return byKey.get(key);
  const [parentPhase, around] = module ? [phase, module.includes(".") ? module.slice(0, module.lastIndexOf(".")) : ""] : ["", ""];
  const parent = parentPhase ? groupFor(byKey, parentPhase, around) : byKey.get("");
  const group = newGroup(key, phase, module, parent);
  byKey.set(key, group);
  parent.children.push(group);
  return group;
}

/** Results are drawn in the phase that makes most of them. */
function homeOfResult(node, nodes, homes, byKey) {
  const counts = new Map();
  for (const input of node.inputs) {
    const phase = homes[nodes[input].group].phase;
    counts.set(phase, (counts.get(phase) || 0) + 1);
  }
  const [phase] = [...counts].sort((a, b) => b[1] - a[1])[0] || ["forward"];
  return groupFor(byKey, phase, "");
}

/** From the group outwards, without the root. */
function* around(group) {
  for (let at = group; at && at.parent; at = at.parent) yield at;
}
