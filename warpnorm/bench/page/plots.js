// Plots as inline SVG, as wide as their place is. Every mark has its exact numbers in data-tip.

const SVG = "http://www.w3.org/2000/svg";
const MARKERS = { // on a square of -1 to 1
  o: "M1 0A1 1 0 1 1-1 0A1 1 0 1 1 1 0Z",
  s: "M-.88-.88H.88V.88H-.88Z",
  "^": "M0-1.1L1.05.8H-1.05Z",
  v: "M0 1.1L1.05-.8H-1.05Z",
  D: "M0-1.2L1.2 0L0 1.2L-1.2 0Z",
  P: "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
  X: "M-1-.5L-.5-1L0-.5L.5-1L1-.5L.5 0L1 .5L.5 1L0 .5L-.5 1L-1 .5L-.5 0Z",
};
const plainPercent = (value) => (value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(1));
const percentText = (value) => `${value >= 10 ? value.toFixed(1) : value.toPrecision(2)} %`;

function drawn(parent, tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function marker(parent, library, x, y, size, more = {}) {
  const { number, look } = libraries.get(library);
  const { class: classes = "", ...rest } = more;
  return drawn(parent, "path", {
    d: MARKERS[look], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`, fill: `var(--library-${number})`,
    class: `marker library-${number} ${classes}`, "vector-effect": "non-scaling-stroke", ...rest,
  });
}

/** An empty plot in a figure: as wide as the figure, with a caption where one is given. */
function plot(figure, height, label, caption) {
  if (caption) figure.append(element("div", { class: "caption" }, caption));
  const style = getComputedStyle(figure);
  const inner = figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const width = Math.max(240, Math.floor(inner) || 480);
  const svg = drawn(figure, "svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, class: "plot", role: "img", "aria-label": label, tabindex: 0,
  });
  return { svg, width };
}

function results(row) {
  return [...libraries.keys()].filter((name) => row.results[name]).map((name) => [name, row.results[name]]);
}

function tipOf(row) {
  const lines = results(row).filter(([, found]) => !found.isMissing).map(([name, found]) =>
    `${name}: ${found.ms === undefined ? found.problem : `${percentText(found.percent)}, ${timeText(found.ms)}`}`);
  return [sizeText(row), ...(row.why ? [row.why] : []), ...lines].join("\n");
}

const columnsText = (width) => (width % 1024 ? String(width) : `${width / 1024}k`);

/** Percent of copy speed against columns, one line a library. */
function drawLines(figure, rows, caption) {
  const height = 250, left = 34, right = 12, top = 12, bottom = 42;
  const { svg, width } = plot(figure, height, `${rows[0].norm}, ${caption}: percent of copy speed by columns`, caption);
  const highest = Math.max(105, ...rows.flatMap((row) => results(row).map(([, found]) => found.percent || 0)));
  const step = (width - left - right) / rows.length;
  const x = (place) => left + step * (place + 0.5);
  const y = (percent) => top + (height - top - bottom) * (1 - percent / highest);
  for (const percent of [0, 25, 50, 75, 100]) {
    drawn(svg, "line", { x1: left, x2: width - right, y1: y(percent), y2: y(percent), class: percent === 100 ? "copy" : "grid" });
    drawn(svg, "text", { x: left - 6, y: y(percent) + 4, "text-anchor": "end" }, String(percent));
  }
  const isTight = step < 42 && rows.some((row) => columnsText(row.shape[1]).length > 3);
  rows.forEach((row, place) => {
    const at = isTight ? { transform: `translate(${x(place) + 4} ${height - bottom + 14}) rotate(-45)`, "text-anchor": "end" }
      : { x: x(place), y: height - bottom + 18, "text-anchor": "middle" };
    drawn(svg, "text", at, columnsText(row.shape[1]));
  });
  if (!isTight) drawn(svg, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "columns");
  for (const name of [...libraries.keys()].reverse()) {
    const points = rows.map((row, place) => [place, row.results[name]?.percent]).filter(([, percent]) => percent !== undefined);
    if (!points.length) continue;
    const { number } = libraries.get(name);
    const ours = name === data.ours ? "ours " : "";
    const path = points.map(([place, percent], k) =>
      `${k && points[k - 1][0] === place - 1 ? "L" : "M"}${x(place).toFixed(1)} ${y(percent).toFixed(1)}`).join("");
    drawn(svg, "path", { d: path, class: `line ${ours}library-${number}`, stroke: `var(--library-${number})` });
    for (const [place, percent] of points) marker(svg, name, x(place), y(percent), ours ? 5 : 4);
  }
  rows.forEach((row, place) => drawn(svg, "rect", {
    x: x(place) - step / 2, y: top, width: step, height: height - top - bottom, class: "hit", "data-tip": tipOf(row),
  }));
}

/** Percent of copy speed of single shapes: a group a row, a bar a library. */
function drawBars(figure, rows, caption) {
  const bar = 12, space = 3, head = 22, gap = 10, right = 40;
  const shown = rows.map((row) => [row, results(row).filter(([, found]) => !found.isMissing)]);
  const tall = shown.reduce((sum, [, found]) => sum + head + found.length * (bar + space) + gap, 0);
  const { svg, width } = plot(figure, tall, `${rows[0].norm}, ${caption}: percent of copy speed by shape`, caption);
  const highest = Math.max(100, ...shown.flatMap(([, found]) => found.map(([, one]) => one.percent || 0)));
  const x = (percent) => (width - right) * percent / highest;
  let y = 0;
  for (const [row, found] of shown) {
    drawn(svg, "text", { x: 0, y: y + 15, class: "strong" }, sizeText(row));
    const start = y;
    y += head;
    drawn(svg, "line", { x1: x(100), x2: x(100), y1: y - 3, y2: y + found.length * (bar + space), class: "copy" });
    for (const [name, one] of found) {
      const { number } = libraries.get(name);
      const group = drawn(svg, "g", { class: `library-${number}` });
      if (one.percent === undefined) {
        drawn(group, "text", { x: 2, y: y + bar - 2, class: "bad" }, `${name}: ${one.isWrong ? "wrong" : "no time"}`);
      } else {
        drawn(group, "rect", { x: 0, y, width: Math.max(1, x(one.percent)), height: bar, rx: 2, fill: `var(--library-${number})` });
        const short = x(100) - x(one.percent); // where the number would lie on the line, it goes beyond
        drawn(group, "text", { x: (short > 0 && short < 26 ? x(100) : x(one.percent)) + 5, y: y + bar - 2 }, plainPercent(one.percent));
      }
      y += bar + space;
    }
    drawn(svg, "rect", { x: 0, y: start, width, height: y - start, class: "hit", "data-tip": tipOf(row) });
    y += gap;
  }
}

/** Whole numbers between. */
const ticks = (low, high) => Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, k) => Math.ceil(low) + k);

/** Bytes that must move against bytes moved in a second, a dot a row and library, both logarithmic. */
function drawRoofline(figure, file) {
  const left = 74, right = 16, top = 24, bottom = 46;
  const dots = file.rows.flatMap((row) => results(row).filter(([, found]) => found.ms !== undefined)
    .map(([name, found]) => ({ row, name, ms: found.ms, speed: row.bytes / found.ms * 1e3 })));
  const { svg, width } = plot(figure, 400, "Roofline: bytes a second by bytes that must move");
  const height = 400, log = Math.log10;
  const range = (values) => { // two powers of ten at least
    const low = log(Math.min(...values)), high = log(Math.max(...values)), pad = Math.max(0.2, 1 - (high - low) / 2);
    return [low - pad, high + pad];
  };
  const [x0, x1] = range(dots.map((dot) => dot.row.bytes));
  const [y0, y1] = range([...dots.map((dot) => dot.speed), file.copyBandwidth * 2]);
  const x = (bytes) => left + (width - left - right) * (log(bytes) - x0) / (x1 - x0);
  const y = (speed) => top + (height - top - bottom) * (1 - (log(speed) - y0) / (y1 - y0));
  const skip = Math.ceil((x1 - x0) * 56 / (width - left - right));
  for (const power of ticks(y0, y1)) {
    drawn(svg, "line", { x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power), class: "grid" });
    drawn(svg, "text", { x: left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, bytesText(10 ** power) + "/s");
  }
  for (const power of ticks(x0, x1).filter((p) => p % skip === 0)) {
    drawn(svg, "text", { x: x(10 ** power), y: height - bottom + 18, "text-anchor": "middle" }, bytesText(10 ** power));
  }
  drawn(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "bytes that must move");
  drawn(svg, "line", { x1: left, x2: width - right, y1: y(file.copyBandwidth), y2: y(file.copyBandwidth), class: "copy" });
  drawn(svg, "text", { x: width - right, y: y(file.copyBandwidth) - 8, "text-anchor": "end", class: "strong" }, `copy: ${file.head.copy}`);
  drawSlope(svg, file, { x, y, low: 10 ** Math.max(x0, y0 + log(shortest(file) / 1e3)) });
  dots.sort((one, other) => (one.name === data.ours) - (other.name === data.ours));
  for (const { row, name, ms, speed } of dots) {
    marker(svg, name, x(row.bytes), y(speed), name === data.ours ? 4.5 : 3.5, {
      class: name === data.ours ? "" : "faint",
      "data-tip": `${row.name}\n${name}: ${bytesText(speed, 3)}/s, ${percentText(row.results[name].percent)} of copy, ${timeText(ms)}`,
    });
  }
}

/** The shortest call of a file with small shapes, in milliseconds; no number where there are none. */
function shortest(file) {
  const times = file.rows.filter((row) => row.isSmall).flatMap((row) => results(row).map(([, found]) => found.ms)).filter(Boolean);
  return times.length ? Math.min(...times) : NaN;
}

/** What a call of that length would reach, from `low` bytes up to the speed of a copy. */
function drawSlope(svg, file, { x, y, low }) {
  const seconds = shortest(file) / 1e3, high = file.copyBandwidth * seconds;
  if (!(low < high)) return;
  drawn(svg, "line", { x1: x(low), y1: y(low / seconds), x2: x(high), y2: y(file.copyBandwidth), class: "copy" });
  const middle = Math.sqrt(low * high);
  const beside = { x: x(middle) - 10, y: y(middle / seconds) - 10, "text-anchor": "end" };
  const above = { x: x(low), y: y(file.copyBandwidth) - 24 };
  drawn(svg, "text", { ...(x(high) - x(low) > 300 ? beside : above), class: "strong" }, `shortest call: ${timeText(seconds * 1e3)}`);
}

// One tooltip for all: by the pointer, by touch, and by the arrow keys on a selected plot.

const tip = document.getElementById("tip");

function showTip(mark, x, y) {
  document.querySelector(".at")?.classList.remove("at");
  tip.hidden = !mark;
  if (!mark) return;
  mark.classList.add("at");
  tip.textContent = mark.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
}

function listenForTips() {
  const ofPointer = (event) => showTip(event.target.closest?.("[data-tip]"), event.clientX, event.clientY);
  document.addEventListener("pointermove", ofPointer);
  document.addEventListener("pointerdown", ofPointer);
  document.addEventListener("scroll", () => showTip(null), true);
  document.addEventListener("focusout", () => showTip(null));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showTip(null);
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way || !event.target.matches?.("svg.plot")) return;
    event.preventDefault();
    const marks = [...event.target.querySelectorAll("[data-tip]")];
    const mark = marks[(marks.findIndex((one) => one.classList.contains("at")) + way + marks.length) % marks.length];
    const box = mark.getBoundingClientRect();
    showTip(mark, box.right, box.top);
  });
}
