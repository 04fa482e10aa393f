// What is chosen lives in the address (#file=h200&q=rms+backward&dtype=bf16), so that a link shows the same to others.

const data = JSON.parse(document.getElementById("data").textContent);
const libraries = new Map(data.libraries.map(({ name, marker }, number) => [name, { number, look: marker }]));
const EMPTY = { file: "", q: "", norm: "", direction: "", dtype: "", show: "percent", behind: "", sort: "", a: "", b: "" };
let state = { ...EMPTY };

function element(tag, attributes = {}, text = "") {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== "") node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

const microText = (ms) => (ms * 1e3).toLocaleString("en", { maximumFractionDigits: ms < 0.1 ? 1 : 0, minimumFractionDigits: ms < 0.1 ? 1 : 0 });
const timeText = (ms) => (ms < 1 ? `${(ms * 1e3).toPrecision(4)} µs` : `${ms.toPrecision(4)} ms`);
const sizeText = (row) => [row.shape.join(" x "), row.dtype, row.layout].filter(Boolean).join(", ");

function bytesText(bytes, digits = 1) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(bytes) / 3 + 1e-9)));
  return `${Number((bytes / 1000 ** power).toPrecision(digits))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = Object.fromEntries(Object.entries(EMPTY).map(([key, usual]) => [key, given.get(key) ?? usual]));
  if (!SHOWN[state.show]) state.show = EMPTY.show;
}

function writeAddress() {
  const chosen = Object.entries(state).filter(([key, value]) => value !== EMPTY[key]);
  history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
}

const fileOf = (label, other) => data.files.find((file) => file.label === label) || other;

/** Two files to compare: those that were chosen, or the two with the most rows in common. */
function pair() {
  const all = data.files.flatMap((a, k) => data.files.slice(k + 1).map((b) => [a, b]));
  const shared = ([a, b]) => changesOf(a, b).length;
  const [a, b] = all.sort((one, other) => shared(other) - shared(one))[0] || [data.files[0], data.files[0]];
  return [fileOf(state.a, a), fileOf(state.b, b)];
}

function setOptions(id, options, value) {
  const select = document.getElementById(id);
  select.replaceChildren(...options.map(([key, text]) => new Option(text, key)));
  select.value = options.some(([key]) => key === value) ? value : options[0][0];
  return select.value;
}

function renderControls(file) {
  const files = data.files.map(({ label, head }) => [label, [`${label}: ${head.device}`, head.date].filter(Boolean).join(", ")]);
  setOptions("file", files, file.label);
  for (const [key, all] of [["norm", "every norm"], ["direction", "both"], ["dtype", "every dtype"]]) {
    const values = [...new Set(file.rows.map((row) => row[key]))];
    state[key] = setOptions(key, [["", all], ...values.map((value) => [value, value])], state[key]);
  }
  const has = ([, { of }]) => file.rows.some((row) => results(row).some(([, found]) => of(found) !== undefined));
  state.show = setOptions("show", Object.entries(SHOWN).filter(has).map(([key, { label }]) => [key, label]), state.show);
  document.getElementById("q").value = state.q;
  document.getElementById("behind").checked = Boolean(state.behind);
  const [a, b] = pair();
  setOptions("a", files, a.label);
  setOptions("b", files, b.label);
}

function renderSummary(file) {
  const cards = [["ahead", "rows ahead", "--good"], ["level", `level within ${data.levelWithin * 100}\u00a0%`, "--rule"], ["behind", "rows behind", "--bad"]];
  const { ms: counts, wall } = file.standings;
  if (counts.alone) cards.push(["alone", "without a rival", "--rule"]);
  if (counts.failed) cards.push(["failed", "without a time of ours", "--bad"]);
  document.getElementById("cards").replaceChildren(...cards.map(([key, text, tone]) => {
    const card = element("div", { class: "card", style: `--tone: var(${tone})` });
    card.append(element("strong", {}, String(counts[key] || 0)), text);
    if (file.hasWall) card.append(element("small", {}, `whole calls: ${wall[key] || 0}`));
    return card;
  }));
  const facts = [...Object.entries(file.head), ...file.methods.map((method) => ["time", method])];
  document.getElementById("head").replaceChildren(...facts.map(([key, value]) => {
    const fact = element("div");
    fact.append(element("dt", {}, key), element("dd", {}, value));
    return fact;
  }));
  document.getElementById("notes").replaceChildren(...file.notes.map((note) => element("li", {}, note)));
}

function renderLegend(file) {
  const legend = document.getElementById("legend");
  legend.replaceChildren(legend.querySelector("legend"));
  for (const [name, { number }] of libraries) {
    if (!file.rows.some((row) => row.results[name])) continue;
    const label = element("label"), box = element("input", { type: "checkbox", checked: "checked" });
    box.addEventListener("change", () => hidden.sheet.insertRule(`svg.plot .library-${number} { display: ${box.checked ? "inline" : "none"} }`, hidden.sheet.cssRules.length));
    const picture = drawn(label, "svg", { viewBox: "-11 -7 22 14", "aria-hidden": "true" });
    drawn(picture, "path", { d: "M-11 0H11", class: `line ${name === data.ours ? "ours" : ""}`, stroke: `var(--library-${number})` });
    marker(picture, name, 0, 0, name === data.ours ? 5 : 4);
    label.prepend(box);
    label.append(name);
    legend.append(label);
  }
}

const hidden = document.head.appendChild(document.createElement("style")); // libraries that are not shown

function renderPlots(file) {
  const place = document.getElementById("norms");
  place.replaceChildren();
  const large = file.rows.filter((row) => !row.isSmall);
  for (const norm of new Set(large.map((row) => row.norm))) {
    const two = element("div", { class: "pair" });
    place.append(element("h3", {}, norm), two);
    const rows = large.filter((row) => row.norm === norm);
    for (const direction of new Set(rows.map((row) => row.direction))) {
      const figure = two.appendChild(element("figure"));
      renderDirection(figure, rows.filter((row) => row.direction === direction), direction);
    }
  }
  if (large.length < file.rows.length) {
    place.append(element("p", {}, `Shapes that move less than ${data.smallBytes / 2 ** 20} MiB are in the roofline and in the table.`));
  }
  document.getElementById("roofline").replaceChildren();
  drawRoofline(document.getElementById("roofline"), file);
  const slope = shortest(file) ? ", the slope is what the shortest call reaches: the closer to them" : ": the closer to it";
  document.getElementById("roofline-text").textContent = "Each mark is one row by one library: further right more bytes must move, "
    + `further up more of them move in a second; the flat dashed line is the speed of a copy${slope}, the better.`;
}

function renderDirection(figure, rows, direction) {
  const curves = rows.filter((row) => row.isPlotted);
  for (const dtype of new Set(curves.map((row) => row.dtype))) {
    const ofDtype = curves.filter((row) => row.dtype === dtype).sort((one, other) => one.shape[1] - other.shape[1]);
    drawLines(figure, ofDtype, `${direction}, ${dtype}`);
  }
  const single = rows.filter((row) => !row.isPlotted);
  if (single.length) drawBars(figure, single, curves.length ? `${direction}, other shapes` : direction);
}

function render() {
  const file = fileOf(state.file, data.files[0]);
  renderControls(file);
  renderSummary(file);
  renderLegend(file);
  renderPlots(file);
  renderTable(file, state);
  renderChanges(...pair());
}

function choose(changes) {
  Object.assign(state, changes);
  if ("file" in changes) render();
  else if ("a" in changes || "b" in changes) renderChanges(...pair());
  else renderTable(fileOf(state.file, data.files[0]), state);
  writeAddress();
}

function listen() {
  for (const id of ["file", "q", "norm", "direction", "dtype", "show", "a", "b"]) {
    document.getElementById(id).addEventListener("input", (event) => choose({ [id]: event.target.value }));
  }
  document.getElementById("behind").addEventListener("change", (event) => choose({ behind: event.target.checked ? "1" : "" }));
  for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
  document.querySelector("#rows thead").addEventListener("click", (event) => {
    const key = event.target.closest("[data-sort]")?.dataset.sort;
    if (!key) return;
    const steps = WORDS.includes(key) ? [key, `-${key}`, ""] : [`-${key}`, key, ""];
    choose({ sort: steps[(steps.indexOf(state.sort) + 1) % 3] });
    document.querySelector(`#rows [data-sort="${CSS.escape(key)}"]`).focus();
  });
  addEventListener("hashchange", () => {
    if (location.hash === "#table") return; // a place in the page
    readAddress();
    render();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) renderPlots(fileOf(state.file, data.files[0]));
    width = innerWidth;
  });
  listenForTips();
}

readAddress();
render();
listen();
