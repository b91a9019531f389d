"use strict";
// What is seen of a stage: which groups are open, which closed ones stand in one box, and what all of them say.

const VISIBLE = 80; // about what is read at a glance
const ALIKE = 3; // closed modules of one kind in a row from which on they are one box

/**
 * Opens groups from the outside in as long as not too much is seen; first those that hold modules, then the others.
 * The modules inside one are opened together, in all phases, or not at all: they are mostly of one kind.
 */
function openByDefault(stage) {
  const phases = stage.root.children;
  const open = new Set([stage.root.key, ...phases.map((phase) => phase.key)]);
  const more = (group) => group.children.length + shownNodes(group).length;
  let seen = phases.reduce((sum, phase) => sum + more(phase), 0);
  const visit = (outer, wanted) => {
    const inner = outer.flatMap((group) => group.children);
    const candidates = inner.filter((group) => !open.has(group.key) && wanted(group));
    const added = candidates.reduce((sum, group) => sum + more(group) - 1, 0);
    if (seen + added <= VISIBLE) {
      for (const group of candidates) open.add(group.key);
      seen += added;
    }
    const opened = inner.filter((group) => open.has(group.key));
    for (const module of new Set(opened.map((group) => group.module))) visit(opened.filter((group) => group.module === module), wanted);
  };
  visit(phases, (group) => group.children.length);
  visit(phases, () => true);
  return open;
}

function shownNodes(group) {
  return view.sizes ? group.nodes : group.nodes.filter((node) => node.role !== "size");
}

/** How many nodes lie in a group, without sizes unless they are shown. */
function count(group) {
  return shownNodes(group).length + group.children.reduce((sum, child) => sum + count(child), 0);
}

/** What makes two groups alike: their class and ops, without sizes, and those of what is inside. */
function kindOf(group) {
  group.kind ??= JSON.stringify([
    DATA.classes[group.module] || "", group.nodes.filter((node) => node.role !== "size").map((node) => node.op.split(" ")[0]), group.children.map(kindOf),
  ]);
  return group.kind;
}

/** The groups inside one, closed ones that are alike and follow one another together, unless they were taken apart. */
function stacked(group) {
  const runs = [];
  for (const child of group.children.filter(count)) {
    const last = runs.at(-1);
    const joins = last && !view.open.has(child.key) && !view.open.has(last[0].key) && kindOf(last[0]) === kindOf(child);
    if (joins) last.push(child);
    else runs.push([child]);
  }
  return runs.flatMap((run) => (run.length < ALIKE || view.apart.has(group.key) ? run.map((child) => [child]) : [run]));
}

/** `blocks.0…5`, `blocks.{0,2}` for names that differ in their numbers alone. */
function together(names) {
  const pieces = names.map((name) => name.split(/(\d+)/));
  return pieces[0].map((piece, k) => {
    const found = [...new Set(pieces.map((each) => each[k]))];
    if (found.length === 1) return piece;
    const numbers = found.map(Number).sort((a, b) => a - b), last = numbers.at(-1);
    return numbers.length > 2 && last - numbers[0] === numbers.length - 1 ? `${numbers[0]}…${last}` : `{${numbers.join(",")}}`;
  }).join("");
}

function stackLabel(run) {
  const kind = run[0].phase === "forward" ? DATA.classes[run[0].module] : null;
  return [`${together(run.map((group) => group.module))}  ×${run.length}`, `${kind ? `${kind} · ` : ""}${count(run[0])} nodes each`];
}

/** The box tree of what is seen, and for every node the id of what stands for it. */
function seenNow(stage) {
  const standsFor = new Map(), stacks = new Map();
  const hide = (group, id) => {
    for (const node of shownNodes(group)) standsFor.set(node.index, id);
    for (const child of group.children) hide(child, id);
  };
  const stack = (run) => {
    const id = `s${run[0].id}`;
    for (const group of run) hide(group, id);
    stacks.set(id, run);
    return {id, group: run[0], run, order: Math.min(...run.map(firstIndex)), ...sizeOf(stackLabel(run), 19)};
  };
  const box = (group) => {
    if (!view.open.has(group.key)) {
      hide(group, group.id);
      return {id: group.id, group, order: firstIndex(group), ...sizeOf(groupLabel(group), 15)};
    }
    const leaves = shownNodes(group).map((node) => {
      standsFor.set(node.index, node.id);
      return {id: node.id, node, order: node.index, ...sizeOf(nodeLabel(node), 12, node.role === "parameter" ? 1 / TAG : 1)};
    });
    const children = [...stacked(group).map((run) => (run.length > 1 ? stack(run) : box(run[0]))), ...leaves];
    return {id: group.id, group, order: firstIndex(group), phase: group.phase, children};
  };
  const top = stage.root.children.filter(count);
  const root = top.length > 1 ? {...box(stage.root), columns: true} : box(top[0]);
  root.isRoot = true;
  if (root.columns) root.children.sort((a, b) => PHASES.indexOf(a.phase) - PHASES.indexOf(b.phase)).forEach((c, k) => { c.order = k; });
  const links = new Map();
  for (const node of stage.nodes) {
    const to = standsFor.get(node.index);
    for (const input of node.inputs) {
      const from = standsFor.get(input);
      if (from === undefined || to === undefined || from === to) continue;
      const key = `${from} ${to}`;
      if (links.has(key)) links.get(key).count += 1;
      else links.set(key, {from, to, count: 1});
    }
  }
  return {root, links: [...links.values()], standsFor, stacks};
}

/** Where a group begins: at its first op, because all inputs stand before all ops. */
function firstIndex(group) {
  const ops = group.nodes.filter((node) => node.role !== "parameter" && node.role !== "input");
  const own = (ops.length || group.children.length ? ops : group.nodes).map((node) => node.index);
  return Math.min(...own, ...group.children.map(firstIndex));
}

function nodeLabel(node) {
  if (node.role === "output") return [node.name, node.value];
  const value = node.value.length > 34 ? `${node.value.slice(0, 33)}…` : node.value;
  return [ownName(node) || shortOp(node.op), value.replace(/^float32 (?=\[)/, "")];
}

function groupLabel(group) {
  const kind = group.phase === "forward" ? DATA.classes[group.module] : null;
  return [group.module || group.phase, `${kind ? `${kind} · ` : ""}${count(group)} nodes`];
}
