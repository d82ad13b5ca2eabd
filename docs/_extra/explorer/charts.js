// Charts as SVG, as wide as what holds them, and a heat map on a canvas.
"use strict";

globalThis.Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const LEFT = 46, RIGHT = 12, TOP = 26, BOTTOM = 38;

  const short = (x) => {
    const size = Math.abs(x);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return x.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return String(+x.toPrecision(3));
  };

  function node(parent, name, attributes = {}, text = "") {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  // About five round numbers from low to high.
  function ticks(low, high, count = 5) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9) + 1e-9 * step; n++)
      found.push(+(n * step).toPrecision(12));
    return found;
  }

  const powers = (low, high) => {
    const found = [];
    const each = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 6));
    for (let n = Math.ceil(Math.log10(low)); n <= Math.log10(high) + 1e-9; n += each) found.push(10 ** n);
    return found;
  };

  // Axes in a box; returns the SVG and the two scales.
  function frame(holder, { x, y, xTitle, yTitle, logY = false, height = 260 }) {
    const width = Math.max(240, holder.clientWidth);
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-hidden", "true");
    holder.replaceChildren(svg);
    const f = logY ? Math.log10 : (v) => v;
    const [xLow, xHigh] = x, [yLow, yHigh] = y.map(f);
    const across = (v) => LEFT + ((v - xLow) / (xHigh - xLow || 1)) * (width - LEFT - RIGHT);
    const up = (v) => height - BOTTOM - ((f(v) - yLow) / (yHigh - yLow || 1)) * (height - TOP - BOTTOM);
    for (const v of logY ? powers(...y) : ticks(...y)) {
      node(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(v), y2: up(v) });
      node(svg, "text", { x: LEFT - 6, y: up(v) + 4, "text-anchor": "end" }, short(v));
    }
    for (const v of ticks(...x)) {
      node(svg, "line", { class: "axis", x1: across(v), x2: across(v), y1: height - BOTTOM, y2: height - BOTTOM + 4 });
      node(svg, "text", { x: across(v), y: height - BOTTOM + 17, "text-anchor": "middle" }, short(v));
    }
    node(svg, "line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM });
    node(svg, "text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" }, xTitle);
    node(svg, "text", { x: 2, y: 12 }, yTitle);
    return { svg, across, up, width, height, low: height - BOTTOM, top: TOP, right: width - RIGHT };
  }

  // Names of the series, right of the title of the vertical axis.
  function names(box, series) {
    let at = box.right;
    for (const { name, kind } of [...series].reverse()) {
      const text = node(box.svg, "text", { class: kind, x: at, y: 12, "text-anchor": "end" }, name);
      at -= text.getComputedTextLength() + 14;
    }
  }

  function path(box, series, points) {
    const d = points.map(([x, y], n) => `${n ? "L" : "M"}${box.across(x).toFixed(1)},${box.up(y).toFixed(1)}`);
    node(box.svg, "path", { class: series, d: d.join("") });
  }

  function rule(box, x, text) {
    const at = box.across(x);
    node(box.svg, "line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.low });
    const left = at > box.right - 110;
    node(box.svg, "text", { class: "label", x: at + (left ? -5 : 5), y: box.top + 11, "text-anchor": left ? "end" : "start" }, text);
  }

  function level(box, y, text) {
    node(box.svg, "line", { class: "mark", x1: LEFT, x2: box.right, y1: box.up(y), y2: box.up(y) });
    node(box.svg, "text", { class: "label", x: box.right, y: box.up(y) - 5, "text-anchor": "end" }, text);
  }

  // Values of rows and columns as blue above `base` and red below; NaN is nothing.
  function heat(canvas, values, side, { base, largest }, colours) {
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    const image = context.createImageData(side, side);
    for (let n = 0; n < values.length; n++) {
      const v = values[n] - base;
      if (Number.isNaN(v)) continue;
      image.data.set(v >= 0 ? colours.rise : colours.fall, 4 * n);
      image.data[4 * n + 3] = 255 * Math.min(1, Math.abs(v) / (largest - base || 1));
    }
    context.putImageData(image, 0, 0);
    canvas.style.imageRendering = side < 200 ? "pixelated" : "auto";
  }

  return { frame, names, path, rule, level, heat, node, short };
})();
