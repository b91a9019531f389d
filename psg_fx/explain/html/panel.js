"use strict";
// The panel beside the drawing: what is known of the selected node, module or site.

const SITE = new Map(DATA.sites.rows.map((site) => [site.name, site]));

function showPanel() {
  const panel = document.getElementById("panel");
  const stage = view.stage;
  panel.replaceChildren();
  if (view.selected === null) panel.append(...aboutStage(stage));
  else if (stage.ids.has(view.selected)) panel.append(...aboutGroup(stage.ids.get(view.selected)));
  else if (view.stacks.has(view.selected)) panel.append(...aboutStack(view.stacks.get(view.selected)));
  else panel.append(...aboutNode(stage.nodes[Number(view.selected.slice(1))]));
  panel.scrollTop = 0;
}

function facts(pairs) {
  const filled = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return h("dl", {}, filled.flatMap(([name, value, mono]) => [h("dt", {}, name), h("dd", {class: mono ? "mono" : null}, mono && typeof value === "string" ? breakable(value) : value)]));
}

function link(target, text) {
  return h("button", {class: "link mono", onclick: () => jump(target)}, text);
}

function links(title, targets) {
  if (!targets.length) return [];
  const shown = targets.slice(0, 24);
  const more = targets.length - shown.length;
  return [
    h("h4", {}, `${title} (${targets.length})`),
    h("div", {class: "links"}, shown.map(([target, text]) => link(target, text)), more ? h("small", {}, `and ${more} more`) : null),
  ];
}

/** `file.py:12: code` with the place above the code. */
function sourceBox(source) {
  if (!source) return null;
  const found = /^(\S+:\d+): (.*)$/s.exec(source);
  return h("div", {class: "source"}, found ? [h("small", {}, found[1]), found[2]] : source);
}

function badge(role, text) {
  return h("span", {class: "role", style: `color:var(--${role});background:var(--${role}-fill);border-color:var(--${role})`}, text);
}

function aboutNode(node) {
  const stage = view.stage, named = (index) => [stage.nodes[index], stage.nodes[index].name];
  const samples = node.samples && node.samples !== "none" ? node.samples : node.samples ? "none: no samples in it" : "";
  const name = ownName(node);
  return [
    h("h3", {}, `%${node.name}`),
    badge(node.role, ROLES[node.role]),
    facts([
      [name ? "holds" : "op", node.op, true],
      ["value", node.value, true],
      ["samples", samples],
      ["proof", node.proof && (node.proof === "input" ? "an input" : node.proof)],
      ["module", node.home.module ? h("button", {class: "link mono", onclick: () => jump(node.home)}, node.home.module) : ""],
      ["part", node.home.phase],
      ["traced from", origin(node)],
      ["ȳ of", node.cotangent ? `the gradient of the output of ${node.cotangent}` : ""],
    ]),
    sourceBox(node.source),
    ...(name ? aboutParameter(name) : []),
    ...(node.site ? aboutSite(node.site) : []),
    ...links("Reads", node.inputs.map(named)),
    ...links("Read by", node.users.map(named)),
  ].filter(Boolean);
}

/** The node of the stage `sited` from which this one was traced, and the way there. */
function origin(node) {
  if (!node.origin || node.origin === node.name) return "";
  return h("button", {
    class: "link mono",
    onclick: () => {
      showStage("sited");
      const found = view.stage.nodes.find((other) => other.name === node.origin);
      if (found) jump(found);
    },
  }, `%${node.origin} in sited`);
}

function aboutGroup(group) {
  const inside = everything(group);
  const parameters = inside.filter((node) => node.role === "parameter");
  const sites = [...new Set(inside.map((node) => node.site).filter(Boolean))];
  const isOpen = view.open.has(group.key);
  return [
    h("h3", {}, group.module || group.phase),
    badge(group.phase === "per sample" ? "per-sample" : group.phase, group.phase),
    facts([["class", DATA.classes[group.module]], ["nodes", String(inside.length)], ["modules", String(group.children.length || "")]]),
    h("button", {id: "toggle", onclick: () => toggle(group)}, isOpen ? "Collapse" : "Expand"),
    ...links("Parameters and buffers", parameters.map((node) => [node, `${ownName(node)}  ${node.value}`])),
    ...links("Modules", group.children.filter(count).map((child) => [child, child.module])),
    ...(sites.length > 1 ? [h("h4", {}, `Sites (${sites.length})`), ...sites.slice(0, 40).map(siteLine)] : sites.flatMap(aboutSite)),
  ];
}

function aboutStack(run) {
  const [group] = run;
  return [
    h("h3", {}, together(run.map((each) => each.module))),
    badge(group.phase === "per sample" ? "per-sample" : group.phase, group.phase),
    facts([["class", DATA.classes[group.module]], ["modules", `${run.length}, all alike`], ["nodes", `${everything(group).length} in each`]]),
    h("button", {id: "take-apart", onclick: () => takeApart(run)}, "Show each"),
    ...links("Modules", run.map((each) => [each, each.module])),
  ];
}

function everything(group) {
  return [...group.nodes, ...group.children.flatMap(everything)];
}

function siteLine(name) {
  const site = SITE.get(name);
  const rows = site ? DATA.plan.rows.filter((row) => row.sites.includes(name)) : [];
  const seconds = rows.reduce((sum, row) => sum + row.seconds, 0);
  const node = view.stage.nodes.find((other) => other.site === name && other.role === "site") || view.stage.nodes.find((other) => other.site === name);
  return h("div", {class: "links"}, link(node, `${name}  ${site ? site.parameters.join(", ") : ""}`), h("small", {}, duration(seconds)));
}

function aboutParameter(name) {
  const rows = DATA.plan.rows.filter((row) => row.parameter === name);
  return rows.length ? [h("h4", {}, `Plan of ${name}`), ...rows.map(planCard)] : [];
}

function aboutSite(name) {
  const site = SITE.get(name);
  if (!site) return [];
  const rows = DATA.plan.rows.filter((row) => row.sites.includes(name));
  return [
    h("h4", {}, `Site ${name}`),
    facts([["op", site.cells[1], true], ["parameters", site.parameters.join(", ") || "none reaches the loss", true], ["output", site.cells[3], true], ["samples", site.cells[4]]]),
    ...rows.map(planCard),
  ];
}

/** One thing that is asked of one parameter: the network, the tree that is chosen, and the others. */
function planCard(row) {
  if (!row.tree) return h("div", {class: "card"}, h("div", {class: "sub"}, `${row.parameter}: ${row.why}`));
  const others = row.alternatives.map(([tree, method, seconds]) =>
    h("li", {}, h("span", {class: "mono"}, breakable(tree)), h("span", {}, duration(seconds)), h("small", {}, method)));
  return h("div", {class: "card"},
    h("div", {class: "sub"}, `${row.parameter}: ${row.ask}`),
    h("div", {class: "tree"}, breakable(row.tree)),
    facts([
      ["method", row.method],
      ["predicted", duration(row.seconds)],
      ["measured", row.measured === null ? "" : duration(row.measured)],
      ["network", row.network, true],
      ["rule", row.rules.join(", ")],
      row.sites.length > 1 ? ["sites", `${row.sites.length} uses joined`] : ["", ""],
    ]),
    others.length ? h("ul", {}, h("li", {}, h("small", {}, "instead, predicted")), others) : null,
  );
}

function aboutStage(stage) {
  const about = (pass) => [
    h("h4", {}, `Pass ${pass.name}`),
    facts([["took", duration(pass.seconds)], ["nodes", pass.before === pass.after ? String(pass.after) : `${pass.before} → ${pass.after}`]]),
    diff(pass.added, "added"), diff(pass.removed, "removed"),
  ];
  return [
    h("h3", {}, stage.name),
    h("p", {}, STAGES[stage.name] || ""),
    ...DATA.passes.filter((pass) => pass.stage === stage.name).flatMap(about),
    h("h4", {}, "How to read it"),
    h("p", {class: "sub"}, "Click a node or a module to see what is known of it. Double-click a module to open or close it. Drag to move, scroll to zoom. " +
      (stage.root.children.length > 1 ? "Forward, backward and the per-sample part stand side by side; the map in the corner shows all of them." : "")),
  ].filter(Boolean);
}

const STAGES = {
  captured: "Model and loss as one graph without side effects; the batch size is a symbol.",
  batched: "For every value where the samples lie in it, and a proof that no op mixes them.",
  unreduced: "The loss of the batch has become the losses of its samples.",
  sited: "The ops at which a parameter meets data are known.",
  joint: "Forward and backward in one graph, down to the gradient ȳ of each site's output.",
  networked: "For each use of a parameter, the network that is its per-sample gradient.",
  merged: "Uses of one parameter are joined.",
  planned: "For everything asked, the cheapest tree of contractions is chosen.",
  lowered: "The plan is written into the graph.",
  tidied: "Doubled work is removed. This graph is compiled.",
  forward: "The half that runs when the model is called.",
  backward: "The half that runs in backward() and leaves grad_sample.",
};
