"use strict";
// The pages beside the graph: plan, time, memory, passes.

const PAGES = {plan: ["Plan", planPage], time: ["Time", timePage], memory: ["Memory", memoryPage], passes: ["Passes", passesPage]};

function table(header, rows, numbers = new Set(), mono = new Set()) {
  const kind = (k) => (numbers.has(k) ? "number" : mono.has(k) ? "mono" : null);
  return h("div", {class: "wide"}, h("table", {},
    h("thead", {}, h("tr", {}, header.map((name, k) => h("th", {class: numbers.has(k) ? "number" : null}, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, k) => h("td", {class: kind(k)}, mono.has(k) && typeof cell === "string" ? breakable(cell) : cell)))))));
}

function planPage() {
  const notes = DATA.notes.length ? [h("h3", {}, "Notes"), h("ul", {}, DATA.notes.map((note) => h("li", {}, note)))] : [];
  return [
    h("h3", {}, "Plan: what is computed of each parameter's gradient, and how"),
    h("p", {}, `${DATA.summary}\n\n${DATA.plan.legend}`),
    h("p", {}, "Parameters of layers that are alike share rows, the most expensive ones first; below each tree the next best one. " +
      "What one row of a parameter has computed its other rows use, so an \u201cinstead\u201d may be faster by itself and slower in all."),
    shortPlan(),
    h("details", {id: "whole-plan"}, h("summary", {}, "Every parameter by itself, with formulas, flops and bytes"),
      table(DATA.plan.header, DATA.plan.rows.map((row) => row.cells), new Set([6, 7, 8]), new Set([0, 2, 3, 4, 5, 9]))),
    h("h3", {}, "Sites: where a parameter meets data"),
    table(DATA.sites.short.header, DATA.sites.short.rows, new Set(), new Set([0, 1, 2, 3, 5])),
    h("details", {id: "whole-sites"}, h("summary", {}, "Every site by itself, with the way to its node"),
      table(DATA.sites.header, DATA.sites.rows.map((site) => [siteButton(site.name), ...site.cells.slice(1)]), new Set(), new Set([0, 1, 2, 3, 5]))),
    ...notes,
  ];
}

function shortPlan() {
  const {header, groups} = DATA.plan.short;
  const found = table(header, groups.flat(), new Set([5]), new Set([0, 2, 3, 4]));
  const rows = [...found.querySelectorAll("tbody tr")];
  groups.flat().forEach((cells, k) => { if (!cells[0] && cells[2].startsWith("  ")) rows[k].className = "instead"; });
  return found;
}

function siteButton(name) {
  return h("button", {
    class: "link mono",
    onclick: () => { location.hash = `site=${name}`; openSite(name); },
  }, name);
}

function openSite(name) {
  showStage("sited");
  const found = view.stage.nodes.find((node) => node.site === name);
  if (found) jump(found);
}

/** Times of the plan, added up for each set of sites; those of modules that are alike, and predicted so, together. */
function timesPerSite() {
  const found = new Map();
  for (const row of DATA.plan.rows) {
    if (!row.tree) continue;
    const key = row.sites.join(" ");
    const more = row.sites.length > 1 ? ` and ${row.sites.length - 1} more` : "";
    const module = SITE.get(row.sites[0])?.module;
    const at = found.get(key) || {site: row.sites[0], module, more, predicted: 0, measured: null, parameters: new Set()};
    at.predicted += row.seconds;
    if (row.measured !== null) at.measured = (at.measured || 0) + row.measured;
    at.parameters.add(row.parameter);
    found.set(key, at);
  }
  const alike = new Map();
  for (const at of found.values()) {
    const key = JSON.stringify([at.module, at.site.replace(/_\d+$/, ""), at.more, [...at.parameters]]).replace(/\d+/g, "#") + duration(at.predicted);
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(at);
  }
  return [...alike.values()].map(added);
}

function added(group) {
  const [{site, module, more}] = group;
  const sum = (kind) => group.reduce((total, at) => total + at[kind], 0);
  return {
    name: (group.length > 1 ? together(group.map((at) => at.module || at.site)) : module ? `${module}  ${site}` : site) + more,
    count: group.length, predicted: sum("predicted"), measured: group.some((at) => at.measured === null) ? null : sum("measured"),
    title: group.flatMap((at) => [...at.parameters]).join(", "),
  };
}

function timePage() {
  const rows = timesPerSite().sort((a, b) => b.predicted - a.predicted);
  const shown = rows.slice(0, 60);
  return [
    h("h3", {}, "Time per site"),
    h("p", {}, "What the per-sample part costs beside forward and backward, at each site, largest first, sites that are alike together: predicted by the planner from its table of rates" +
      (rows.some((row) => row.measured !== null) ? ", and measured: every tree compiled and timed by itself." : ". report(measure=True) measures it too.") +
      (rows.length > shown.length ? ` The largest ${shown.length} of ${rows.length} are shown.` : "")),
    shown.length ? bars(shown) : h("p", {}, "Nothing is asked of any parameter."),
  ];
}

function memoryPage() {
  const {live, peak, largest} = DATA.memory;
  const stage = stageNamed("tidied");
  const nodes = stage.nodes, byName = new Map(nodes.map((node) => [node.name, node]));
  const reading = h("p", {}, " ");
  const open = (node) => h("button", {class: "link mono", onclick: () => { showStage("tidied"); jump(node); }}, `%${node.name}`);
  const show = (index) => reading.replaceChildren(`${bytes(live[index])} at %${nodes[index].name}, ${shortOp(nodes[index].op)} in ${nodes[index].home.module || nodes[index].home.phase}`);
  return [
    h("h3", {}, "Memory over the step"),
    h("p", {}, `An estimate, read off the graph before kernels are fused, for B=${DATA.about.batch}: the bytes of all values that are still to be read, at each op. ` +
      "Parameters and inputs are not counted, they are there anyway; views lie in the memory of what they show; results live to the end. " +
      "Fused kernels keep fewer values, so the compiled step needs less, but for scratch space inside libraries."),
    area(live, nodes.slice(0, live.length).map((node) => node.home.phase), peak, show),
    reading,
    h("h3", {}, `At the peak: ${bytes(live[peak])}`),
    h("p", {}, "The largest values that are alive while ", open(nodes[peak]), " runs."),
    table(["value", "op", "shape", "module", "bytes"], largest.map(([name, size]) => {
      const node = byName.get(name);
      return [open(node), shortOp(node.op), node.value, node.home.module, bytes(size)];
    }), new Set([4]), new Set([0, 1, 2, 3])),
  ];
}

function passesPage() {
  const total = DATA.passes.reduce((sum, pass) => sum + pass.seconds, 0);
  return [
    h("h3", {}, "Passes"),
    h("p", {}, `What each pass added to the graph and removed from it, by kind of op; ${duration(total)} in all. A pass that traces the graph anew writes some ops in simpler ones.`),
    table(["pass", "stage after it", "time", "nodes before", "after", "added", "removed"], DATA.passes.map((pass) => [
      pass.name, h("button", {class: "link mono", onclick: () => showStage(pass.stage)}, pass.stage), duration(pass.seconds),
      pass.before.toLocaleString("en"), pass.after.toLocaleString("en"), diff(pass.added, "added"), diff(pass.removed, "removed"),
    ]), new Set([2, 3, 4]), new Set([0])),
  ];
}

/** How many ops of each kind, or null where there are none. */
function diff(pairs, kind) {
  if (!pairs.length) return null;
  const sign = kind === "added" ? "+" : "−", counts = new Map();
  for (const [op, count] of pairs) counts.set(shortOp(op), (counts.get(shortOp(op)) || 0) + count);
  return h("div", {class: "diff"}, [...counts].map(([op, count]) => h("span", {class: kind}, `${sign}${count} `, breakable(op))));
}
