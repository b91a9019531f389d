"use strict";
// Positions.  Every open group is laid out by itself and is then one box in the layout of the group around it: small
// problems for dagre, boxes that never overlap, and a place inside a group that does not depend on what is outside.

const LAYOUT = {
  node: 18, rank: 30, pad: 16, head: 24, column: 90, wide: 2600, tall: 1600,
  many: 600, // nodes above which all groups are laid out in rows
  crowd: 150, // nodes of one group above which it is
};

/**
 * Sets x, y (the upper left corner), w, h of every box below `root`.
 *
 * root: a tree of boxes {id, order, w, h} or {id, order, children, phase}.  links: [{from, to}] between the ids of
 * leaves.  fast: rows by depth in all groups, in place of dagre, which takes seconds for some hundred nodes.
 * Returns {bends, rows}: the bends of links inside one group, "from to" -> points; whether any group is in rows.
 */
function arrange(root, links, fast) {
  const sheet = {inside: linksByGroup(root, links), bends: new Map(), fast, rows: false};
  place(root, sheet);
  shift(root, 0, 0, sheet.bends);
  const bends = new Map();
  for (const {points, from, to} of sheet.bends.values()) bends.set(`${from} ${to}`, points);
  return {bends, rows: sheet.rows};
}

/** Group -> the links between its own children, each once, after every link has been lifted to where its ends part. */
function linksByGroup(root, links) {
  const parents = new Map(), boxes = new Map(), depths = new Map();
  (function visit(box, parent, depth) {
    boxes.set(box.id, box);
    parents.set(box.id, parent);
    depths.set(box.id, depth);
    for (const child of box.children || []) visit(child, box.id, depth + 1);
  })(root, null, 0);
  const inside = new Map();
  for (const link of links) {
    let a = link.from, b = link.to;
    while (depths.get(a) > depths.get(b)) a = parents.get(a);
    while (depths.get(b) > depths.get(a)) b = parents.get(b);
    if (a === b) continue;
    while (parents.get(a) !== parents.get(b)) [a, b] = [parents.get(a), parents.get(b)];
    const owner = parents.get(a);
    if (!inside.has(owner)) inside.set(owner, new Map());
    inside.get(owner).set(`${a} ${b}`, {from: a, to: b});
  }
  return inside;
}

function place(box, sheet) {
  if (!box.children) return;
  for (const child of box.children) place(child, sheet);
  const children = [...box.children].sort((a, b) => a.order - b.order);
  const links = [...(sheet.inside.get(box.id) || new Map()).values()];
  const size = box.columns ? columns(children) : placed(box, children, links, sheet);
  box.w = size.w + 2 * LAYOUT.pad;
  box.h = size.h + 2 * LAYOUT.pad + LAYOUT.head;
}

/** Linked children by dagre or in rows, the others in a grid beside them. */
function placed(box, children, links, sheet) {
  const linked = new Set(links.flatMap((link) => [link.from, link.to]));
  const together = children.filter((child) => linked.has(child.id));
  const alone = children.filter((child) => !linked.has(child.id));
  const inRows = sheet.fast || together.length > LAYOUT.crowd;
  sheet.rows ||= inRows;
  const first = inRows ? rows(together, links) : layered(box, together, links, sheet.bends);
  const second = grid(alone);
  const offset = first.w && second.w ? first.w + 2 * LAYOUT.node : 0;
  for (const child of alone) child.x += offset;
  return {w: offset + second.w || first.w, h: Math.max(first.h, second.h)};
}

function layered(box, children, links, bends) {
  if (!children.length) return {w: 0, h: 0};
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({
    rankdir: box.phase === "backward" ? "BT" : "TB", nodesep: LAYOUT.node, ranksep: LAYOUT.rank,
  });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const child of children) graph.setNode(child.id, {width: child.w, height: child.h});
  for (const link of links) graph.setEdge(link.from, link.to);
  dagre.layout(graph);
  for (const child of children) {
    const at = graph.node(child.id);
    child.x = at.x - child.w / 2;
    child.y = at.y - child.h / 2;
  }
  const leaves = new Set(children.filter((child) => !child.children).map((child) => child.id));
  for (const link of links) {
    if (!leaves.has(link.from) || !leaves.has(link.to)) continue;
    bends.set(`${link.from} ${link.to}`, {...link, points: graph.edge(link.from, link.to).points, box: box.id});
  }
  return {w: graph.graph().width, h: graph.graph().height};
}

/** A row for each depth, in the order of the graph; wide rows are broken, and many rows stand in columns. */
function rows(children, links) {
  const depth = new Map(children.map((child) => [child.id, 0]));
  const order = new Map(children.map((child) => [child.id, child.order]));
  for (const link of [...links].sort((a, b) => order.get(a.from) - order.get(b.from))) {
    if (order.get(link.from) < order.get(link.to)) {
      depth.set(link.to, Math.max(depth.get(link.to), depth.get(link.from) + 1));
    }
  }
  const found = [];
  for (const child of [...children].sort((a, b) => depth.get(a.id) - depth.get(b.id) || a.order - b.order)) {
    let row = found.at(-1);
    if (!row || row.depth !== depth.get(child.id) || row.w + child.w > LAYOUT.wide) {
      row = {depth: depth.get(child.id), children: [], w: 0, h: 0};
      found.push(row);
    }
    child.x = row.w;
    row.children.push(child);
    row.w += child.w + LAYOUT.node;
    row.h = Math.max(row.h, child.h);
  }
  return inColumns(found);
}

function inColumns(found) {
  const area = found.reduce((sum, row) => sum + (row.h + LAYOUT.rank) * row.w, 0);
  const limit = Math.max(LAYOUT.tall, Math.sqrt(area));
  let x = 0, y = 0, width = 0, height = 0;
  for (const row of found) {
    if (y > 0 && y + row.h > limit) [x, y, width] = [x + width + LAYOUT.rank, 0, 0];
    for (const child of row.children) {
      child.x += x;
      child.y = y;
    }
    y += row.h + LAYOUT.rank;
    width = Math.max(width, row.w);
    height = Math.max(height, y - LAYOUT.rank);
  }
  return {w: Math.max(0, x + width - LAYOUT.node), h: height};
}

/** In order, in one column or, if that is too tall, in several of about equal height. */
function grid(children) {
  const total = children.reduce((sum, child) => sum + child.h + LAYOUT.node, 0);
  const widest = Math.max(0, ...children.map((child) => child.w));
  const count = total <= LAYOUT.tall ? 1 : Math.max(1, Math.round(Math.sqrt(total / (widest + LAYOUT.node))));
  const limit = total / count;
  let x = 0, y = 0, width = 0, height = 0, right = 0;
  for (const child of children) {
    if (y > 0 && y + child.h > limit + LAYOUT.node) [x, y, width] = [x + width + LAYOUT.node, 0, 0];
    [child.x, child.y] = [x, y];
    y += child.h + LAYOUT.node;
    width = Math.max(width, child.w);
    height = Math.max(height, y - LAYOUT.node);
    right = Math.max(right, x + child.w);
  }
  return {w: right, h: height};
}

/** The phases side by side: the forward runs down, the backward beside it up again. */
function columns(children) {
  let x = 0;
  for (const child of children) {
    [child.x, child.y] = [x, 0];
    x += child.w + LAYOUT.column;
  }
  return {w: x - LAYOUT.column, h: Math.max(...children.map((child) => child.h))};
}

/** From places inside the group to places on the sheet. */
function shift(box, x, y, bends) {
  box.x = (box.x || 0) + x;
  box.y = (box.y || 0) + y;
  const left = box.x + LAYOUT.pad, top = box.y + LAYOUT.pad + LAYOUT.head;
  for (const bend of bends.values()) {
    if (bend.box === box.id) bend.points = bend.points.map((point) => ({x: point.x + left, y: point.y + top}));
  }
  for (const child of box.children || []) shift(child, left, top, bends);
}
