"use strict";
// The whole drawing in a corner, with a frame around what is seen of it; a click goes there.

const chartBoxes = document.createElement("canvas").getContext("2d"); // all boxes, drawn once
const LARGEST_CHART = {w: 200, h: 130};
let chartScale = 1, chartBox = null;

/** Draws all boxes anew. */
function chart() {
  const shown = byId("minimap"), box = view.cy.elements().boundingBox({includeLabels: false});
  chartBox = box;
  chartScale = Math.min(LARGEST_CHART.w / box.w, LARGEST_CHART.h / box.h);
  for (const canvas of [shown, chartBoxes.canvas]) Object.assign(canvas, {width: Math.ceil(box.w * chartScale), height: Math.ceil(box.h * chartScale)}); // which clears it
  const colors = new Map();
  for (const node of view.cy.nodes(".leaf, .closed")) {
    const {x, y} = node.position(), kind = node.data("role") || node.data("phase").replace(" ", "-");
    if (!colors.has(kind)) colors.set(kind, color(kind));
    chartBoxes.fillStyle = colors.get(kind);
    const w = node.width(), h = node.height();
    chartBoxes.fillRect((x - w / 2 - box.x1) * chartScale, (y - h / 2 - box.y1) * chartScale, Math.max(1.5, w * chartScale), Math.max(1.5, h * chartScale));
  }
  chartFrame();
}

/** Draws the frame; nothing where all of the drawing is seen. */
function chartFrame() {
  const shown = byId("minimap"), seen = view.cy?.extent();
  if (!seen || !chartBox) return;
  shown.hidden = seen.x1 <= chartBox.x1 && seen.y1 <= chartBox.y1 && seen.x2 >= chartBox.x2 && seen.y2 >= chartBox.y2;
  const context = shown.getContext("2d");
  context.clearRect(0, 0, shown.width, shown.height);
  context.drawImage(chartBoxes.canvas, 0, 0);
  context.strokeStyle = color("accent");
  context.lineWidth = 1.5;
  context.strokeRect((seen.x1 - chartBox.x1) * chartScale, (seen.y1 - chartBox.y1) * chartScale, seen.w * chartScale, seen.h * chartScale);
}

function goThere(event) {
  if (!(event.buttons & 1)) return;
  const {left, top} = byId("minimap").getBoundingClientRect(), cy = view.cy, zoom = cy.zoom();
  const x = chartBox.x1 + (event.clientX - left) / chartScale, y = chartBox.y1 + (event.clientY - top) / chartScale;
  cy.pan({x: cy.width() / 2 - x * zoom, y: cy.height() / 2 - y * zoom});
}

document.getElementById("minimap").addEventListener("mousedown", goThere);
document.getElementById("minimap").addEventListener("mousemove", goThere);
