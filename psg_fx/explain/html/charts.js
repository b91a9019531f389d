"use strict";
// Charts: bars and an area, as plain SVG.

/** rows: {name, count, predicted, measured (or null)}, in seconds for all `count` together, drawn in the order given. */
function bars(rows) {
  const isMeasured = rows.some((row) => row.measured !== null);
  const width = 900, left = 300, line = isMeasured ? 34 : 22, plot = width - left - 160;
  const largest = Math.max(...rows.map((row) => Math.max(row.predicted, row.measured || 0)), 1e-12);
  const drawing = svg("svg", {viewBox: `0 0 ${width} ${rows.length * line + 6}`, width, role: "img", "aria-label": "time per site"});
  rows.forEach((row, index) => {
    const y = index * line + 3;
    const many = row.count > 1 ? `  ×${row.count}` : "", room = 40 - many.length;
    const name = (row.name.length > room ? `${row.name.slice(0, room - 1)}…` : row.name) + many;
    const title = svg("title", {});
    title.textContent = row.title;
    const label = svg("text", {class: "name", x: left - 10, y: y + (isMeasured ? 18 : 11), "text-anchor": "end"});
    label.textContent = name;
    drawing.append(svg("g", {}, title, label, ...bar("predicted", row.predicted, row.count, y), ...(row.measured === null ? [] : bar("measured", row.measured, row.count, y + 14))));
  });
  function bar(kind, seconds, count, y) {
    const length = Math.max(1, (seconds / largest) * plot);
    const text = svg("text", {x: left + length + 6, y: y + 11});
    text.textContent = duration(seconds) + (count > 1 ? ` = ${count}× ${duration(seconds / count)}` : "");
    return [svg("rect", {class: kind, x: left, y: y + 1, width: length, height: 12, rx: 3}), text];
  }
  const keys = [["predicted", "forward"], ...(isMeasured ? [["measured", "per-sample"]] : [])];
  return h("div", {}, h("div", {class: "keys"}, keys.map(([name, role]) => h("span", {}, h("i", {style: `background:var(--${role})`}), name))), drawing);
}

/** live: bytes at each node; phases: the phase of each; peak: where it is largest. */
function area(live, phases, peak, onpick) {
  const width = 1000, height = 300, left = 74, bottom = 30, top = 26, plotW = width - left - 16, plotH = height - bottom - top;
  const largest = Math.max(...live, 1), last = Math.max(1, live.length - 1);
  const x = (index) => left + (index / last) * plotW, y = (value) => top + plotH - (value / largest) * plotH;
  const drawing = svg("svg", {viewBox: `0 0 ${width} ${height}`, width: "100%", style: "max-width:1100px", role: "img", "aria-label": "memory over the step"});
  for (const [phase, from, to] of stretches(phases)) {
    const name = phase === "per sample" ? "per-sample" : phase;
    const label = svg("text", {x: (x(from) + x(to)) / 2, y: 15, "text-anchor": "middle", style: `fill:var(--${name})`});
    label.textContent = x(to) - x(from) > 60 ? phase : "";
    drawing.append(svg("rect", {x: x(from), y: top, width: Math.max(1, x(to) - x(from)), height: plotH, style: `fill:var(--${name}-fill);opacity:.35`}), label);
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const label = svg("text", {x: left - 8, y: y(largest * part) + 4, "text-anchor": "end"});
    label.textContent = bytes(Math.round(largest * part));
    drawing.append(svg("line", {class: "axis", x1: left, x2: width - 16, y1: y(largest * part), y2: y(largest * part)}), label);
  }
  // memory changes at an op and stays until the next one: a step, not a slope
  const path = live.map((value, index) => `${index ? `H${x(index).toFixed(1)}V` : `M${left},`}${y(value).toFixed(1)}`).join("");
  drawing.append(svg("path", {class: "area", d: `${path}V${y(0)}H${left}Z`}), svg("path", {class: "line", d: path}));
  drawing.append(svg("line", {class: "peak", x1: x(peak), x2: x(peak), y1: top, y2: y(0)}), svg("circle", {class: "dot", cx: x(peak), cy: y(live[peak]), r: 4.5}));
  const under = svg("text", {x: left, y: height - 8});
  under.textContent = "ops of the tidied graph, in the order in which they run";
  const cursor = svg("line", {class: "axis", y1: top, y2: y(0), x1: -9, x2: -9, style: "stroke:var(--ink)"});
  drawing.append(under, cursor);
  drawing.addEventListener("mousemove", (event) => {
    const place = drawing.getBoundingClientRect();
    const index = Math.round((((event.clientX - place.left) * width) / place.width - left) / plotW * last);
    if (index < 0 || index >= live.length) return;
    cursor.setAttribute("x1", x(index));
    cursor.setAttribute("x2", x(index));
    onpick(index);
  });
  return drawing;
}

/** Runs of equal phases, short ones given to their neighbours: sizes and constants stand anywhere. */
function stretches(phases) {
  const found = [];
  phases.forEach((phase, index) => {
    const before = found[found.length - 1];
    if (before && before[0] === phase) before[2] = index;
    else found.push([phase, before ? before[2] : 0, index]);
  });
  const long = found.filter(([, from, to]) => to - from > phases.length / 50);
  const joined = [];
  for (const [phase, from, to] of long) {
    const before = joined[joined.length - 1];
    if (before && before[0] === phase) before[2] = to;
    else joined.push([phase, before ? before[2] : from, to]);
  }
  return joined;
}
