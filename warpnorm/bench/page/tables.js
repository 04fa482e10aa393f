// The table of every row, and the one of two files side by side.

const SHOWN = { // what the cells of a library show
  percent: { label: "% of copy speed", of: (found) => found.percent, text: (value) => plainPercent(value), isMore: true },
  ms: { label: "microseconds", of: (found) => found.ms, text: (value) => microText(value) },
  wall: { label: "microseconds, whole call", of: (found) => found.wall, text: (value) => microText(value) },
  peak: { label: "extra memory, MB", of: (found) => found.peak, text: (value) => (value / 1e6).toFixed(value < 1e7 ? 2 : 0) },
  error: { label: "error against float64", of: (found) => found.error, text: (value) => value.toExponential(1) },
};
const WORDS = ["norm", "direction", "shape", "dtype", "layout"];
const STANDING = { ahead: "ahead", level: "level", behind: "behind", alone: "alone", failed: "no time" };
const elements = (row) => row.shape.reduce((product, size) => product * size, 1);

const clockOf = (state) => (state.show === "wall" ? "wall" : "ms");

function matches(row, state) {
  const text = `${row.name} ${row.shape.join("x")}`.toLowerCase();
  return state.q.toLowerCase().split(/\s+/).every((word) => text.includes(word))
    && ["norm", "direction", "dtype"].every((key) => !state[key] || row[key] === state[key])
    && (!state.behind || row.standing[clockOf(state)] === "behind");
}

function sorted(rows, state) {
  const key = state.sort.replace(/^-/, ""), way = state.sort.startsWith("-") ? -1 : 1;
  const found = rows.map((row) => [key === "over" ? row.over[clockOf(state)] : key === "shape" ? elements(row) : WORDS.includes(key)
    ? row[key] : SHOWN[state.show].of(row.results[key] || {}), row]);
  if (!key) return rows;
  const isEmpty = (value) => value === null || value === undefined;
  found.sort(([one], [other]) => isEmpty(one) - isEmpty(other) || (isEmpty(one) ? 0 : way * (one < other ? -1 : one > other ? 1 : 0)));
  return found.map(([, row]) => row);
}

/** Libraries that have a figure or a reason in any of these rows; one that has no such function is no column. */
function columnsOf(rows) {
  return [...libraries.keys()].filter((name) => rows.some((row) => row.results[name] && !row.results[name].isMissing));
}

function heading(text, key, state, isWord) {
  const cell = element("th", { scope: "col", class: isWord ? "word" : "" });
  const button = element("button", { type: "button", "data-sort": key }, text);
  if (state.sort.replace(/^-/, "") === key) cell.setAttribute("aria-sort", state.sort.startsWith("-") ? "descending" : "ascending");
  cell.append(button);
  return cell;
}

function resultCell(row, name, shown, best) {
  const found = row.results[name];
  const value = found && shown.of(found);
  if (value !== undefined) return element("td", { class: value === best ? "best" : "" }, shown.text(value));
  const reason = found?.problem || "not measured";
  return element("td", { class: found?.isWrong ? "dash bad" : "dash", title: reason }, found?.isWrong ? "– wrong" : "–");
}

/** Only images lie in one layout or another. */
const wordsOf = (rows) => WORDS.filter((key) => key !== "layout" || rows.some((row) => row.layout));

function rowOf(row, words, names, state) {
  const shown = SHOWN[state.show];
  const line = element("tr", { "data-name": row.name });
  line.append(element("th", { scope: "row", title: row.why }, row.norm));
  for (const key of words.slice(1)) line.append(element("td", { class: "word" }, key === "shape" ? row.shape.join(" x ") : row[key] || ""));
  const values = names.map((name) => shown.of(row.results[name] || {})).filter((value) => value !== undefined);
  const best = values.length ? (shown.isMore ? Math.max : Math.min)(...values) : NaN;
  const over = row.over[clockOf(state)], standing = row.standing[clockOf(state)];
  line.append(element("td", { class: standing }, over === null ? "–" : `${over.toFixed(2)}x`));
  line.append(element("td", { class: `word ${standing}` }, STANDING[standing]));
  for (const name of names) line.append(resultCell(row, name, shown, best));
  return line;
}

function renderTable(file, state) {
  const rows = sorted(file.rows.filter((row) => matches(row, state)), state);
  const names = columnsOf(rows.length ? rows : file.rows);
  const top = element("tr");
  for (const key of wordsOf(rows)) top.append(heading(key, key, state, true));
  top.append(heading("over best", "over", state, false), element("th", { scope: "col", class: "word" }));
  top.lastChild.append(element("span", {}, "we are"));
  for (const name of names) top.append(heading(name, name, state, false));
  document.querySelector("#rows thead").replaceChildren(top);
  document.querySelector("#rows tbody").replaceChildren(...rows.map((row) => rowOf(row, wordsOf(rows), names, state)));
  document.getElementById("count").textContent = `${rows.length} of ${file.rows.length} rows`;
  renderReasons(rows);
}

function renderReasons(rows) {
  const reasons = new Set(rows.flatMap((row) => results(row).filter(([, found]) => found.problem)
    .map(([name, found]) => (found.isMissing ? found.problem : `${name}, ${row.name}: ${found.problem}`))));
  const place = document.getElementById("reasons");
  place.hidden = !reasons.size;
  place.querySelector("summary").textContent = `Why there are dashes (${reasons.size})`;
  place.querySelector("ul").replaceChildren(...[...reasons].map((reason) => element("li", {}, reason)));
}

/** Rows of both files by name, with our times; the worst change first. */
function changesOf(a, b) {
  const times = new Map(a.rows.map((row) => [row.name, row.results[data.ours]?.ms]));
  return b.rows.map((row) => ({ name: row.name, before: times.get(row.name), after: row.results[data.ours]?.ms }))
    .filter(({ before, after }) => before && after)
    .map((change) => ({ ...change, ratio: change.after / change.before }))
    .sort((one, other) => other.ratio - one.ratio);
}

const kindOf = (ratio) => (Math.abs(ratio - 1) <= data.levelWithin ? "same" : ratio > 1 ? "slower" : "faster");

function renderChanges(a, b) {
  const changes = changesOf(a, b);
  const count = (kind) => changes.filter(({ ratio }) => kindOf(ratio) === kind).length;
  document.getElementById("compared").textContent = a === b ? "Choose two different files."
    : !changes.length ? "These two files have no row in common."
    : `${changes.length} rows in both: ${count("slower")} slower, ${count("same")} level within ${data.levelWithin * 100} %, ${count("faster")} faster`;
  const isShown = a !== b && changes.length > 0;
  document.getElementById("changes").parentElement.hidden = !isShown;
  const top = element("tr");
  for (const text of ["row", "time", "B is", `A: ${a.label}`, `B: ${b.label}`]) {
    top.append(element("th", { scope: "col", class: text === "row" || text === "B is" ? "word" : "" }));
    top.lastChild.append(element("span", {}, text));
  }
  document.querySelector("#changes thead").replaceChildren(top);
  document.querySelector("#changes tbody").replaceChildren(...(isShown ? changes.map(changeRow) : []));
}

function changeRow({ name, before, after, ratio }) {
  const kind = kindOf(ratio), percent = (ratio - 1) * 100;
  const line = element("tr", { "data-name": name });
  line.append(element("th", { scope: "row", title: name }, name));
  line.append(element("td", { class: kind }, `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(1)} %`));
  line.append(element("td", { class: `word ${kind}` }, kind === "same" ? "level" : kind));
  for (const time of [before, after]) line.append(element("td", {}, timeText(time)));
  return line;
}
