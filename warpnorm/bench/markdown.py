"""`docs/performance.md`: every figure of the result files as tables, with a summary that says where a rival is ahead."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import quote

from warpnorm.bench.cases import FORWARD
from warpnorm.bench.palette import in_order
from warpnorm.bench.results import (
    AHEAD,
    ALONE,
    BEHIND,
    FAILED,
    LEVEL,
    LEVEL_WITHIN,
    SMALL_BYTES,
    Measured,
    ResultFile,
    Row,
)
from warpnorm.bench.rivals import OURS

FIRST_LINE = "<!-- Made by `warpnorm report` from the result files of `warpnorm bench`; changes here are lost. -->"
METHODS = {
    "graph": "the device's own time, by replaying a CUDA graph of several calls",
    "events": "the device's time between two events, with the gaps between launches (marked †)",
    "wall": "wall time, the libraries in turns and each with fresh memory for its results",
}
WITHIN = f"{LEVEL_WITHIN:.0%}".replace("%", " %")
READING = f"""\
## How to read this

- **Percent of copy speed** is the time that a copy of the bytes a norm must move at least (every input read once, every
  output written once) would take, over the time that was taken. 100 is as fast as a copy that is far larger than any cache;
  what lies in a cache may go beyond. The best of a row is bold.
- **Over the best** is the speed of {OURS.name} over that of the fastest other library: above 1 {OURS.name} is ahead.
- Shapes that move less than {SMALL_BYTES >> 20} MiB are given in **microseconds**: there the cost of a call counts for
  more than the speed of memory.
- Every result is compared with float64 first. One that is more than twice as far off as eager PyTorch's, but
  for roundings of its sums, is **wrong and is not timed**:
  a dash, with the reason below the table.
"""
Cell = Callable[[Measured], str]


def performance(files: Sequence[ResultFile], pictures: Iterable[str]) -> str:
    """`pictures` are the labels of the files that have one."""
    drawn = set(pictures)
    parts = [FIRST_LINE, "", "# Performance", ""]
    parts += ["[The same as a page](performance.html), with plots, a table to filter and two files side by side.", ""]
    parts += [*_summary(files), READING, *_rivals_ahead(files)]
    for file in files:
        parts += _section(file, file.label in drawn)
    return "\n".join(parts).rstrip() + "\n"


def _summary(files: Sequence[ResultFile]) -> Iterator[str]:
    yield f"Against the fastest other library in each row (a norm in one direction, of one shape and dtype), {OURS.name} is:"
    yield ""
    headings = {AHEAD: "ahead", LEVEL: f"level within {WITHIN}", BEHIND: "behind"}
    rare = {ALONE: "without a rival", FAILED: "without a time"}
    headings |= {key: heading for key, heading in rare.items() if any(file.standings()[key] for file in files)}
    lines = []
    for file in files:
        clocks = [("ms", "")] + [("wall_ms", ", whole calls")] * file.has_wall
        for clock, note in clocks:
            counts = file.standings(clock)
            numbers = [str(counts[key]) for key in headings]
            lines.append([_text(file.device), _text(file.label) + note, str(counts.total()), *numbers])
    yield from _table(["device", "results", "rows", *headings.values()], lines, 2)


def _rivals_ahead(files: Sequence[ResultFile]) -> Iterator[str]:
    yield "## Where a rival is ahead"
    yield ""
    if any(file.has_wall for file in files):
        yield "By the time of the device; the tables have whole calls too."
        yield ""
    lines = [line for file in files for line in _lines_behind(file)]
    if lines:
        yield from _table(["results", "row", "fastest", "faster by"], lines, 3)
    else:
        yield f"In no row by more than {WITHIN}."
        yield ""
    failures = [f"- {_text(file.label)}, {line}" for file in files for line in _failures(file)]
    yield from [*failures, ""] if failures else ()


def _failures(file: ResultFile) -> Iterator[str]:
    for row in file.rows:
        ours = row.by(OURS.name)
        if row.standing() == FAILED:
            reason = ours.reason if ours is not None else "not measured"
            yield f"{_text(row.name)}: no time of {OURS.name}: {_text(reason)}"


def _lines_behind(file: ResultFile) -> list[list[str]]:
    found = []
    for row in file.rows:
        ratio, best = row.over_best(), row.best_rival()
        if ratio is not None and best is not None and row.standing() == BEHIND:
            faster = f"{percent(100 / ratio - 100)} %"
            found.append((ratio, [_text(file.label), _text(row.name), _text(best.library), faster]))
    return [line for _, line in sorted(found, key=lambda pair: pair[0])]


def _section(file: ResultFile, has_picture: bool) -> Iterator[str]:
    yield f"## {_text(file.device)}: {_text(file.label)}"
    yield ""
    if has_picture:
        yield f"![Percent of copy speed by width on {_text(file.device)}]({quote(file.label)}.svg)"
        yield ""
    yield from (f"- {key}: {_text(value)}" for key, value in file.head.items() if key != "device")
    yield f"- copy: {bandwidth(file.copy_bandwidth)}, read and written"
    yield from (f"- time: {METHODS.get(method, _text(method))}" for method in file.methods)
    if file.has_wall:
        yield "- whole call: wall time of one plain call, Python and launches included"
    yield from (f"- not measured: {_text(name)} ({_text(why)})" for name, why in file.missing.items())
    if file.is_interrupted:
        yield "- the run was interrupted: rows are missing"
    yield ""
    for norm in file.norms:
        rows = sorted((row for row in file.rows if row.norm == norm), key=lambda row: row.direction != FORWARD)
        yield f"### {_text(norm)}"
        yield ""
        yield from _large(file, [row for row in rows if not row.is_small])
        yield from _small(file, [row for row in rows if row.is_small])
        yield from _reasons(rows)


def _large(file: ResultFile, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "Percent of copy speed:"
    yield ""
    libraries, facts = _present(file, rows), _facts(rows)
    has_memory, has_both = (any(row.has(name) for row in rows) for name in ("peak_bytes", "both_bytes"))
    lines = []
    for row in rows:
        line = [facts[key](row) for key in facts]
        line += [*_cells(row, libraries, lambda m: percent(m.percent)), over(row.over_best())]
        lines.append(line + [_memory(row)] * has_memory + [_memory(row, "both_bytes")] * has_both)
    headings = [*facts, *map(_text, libraries), "over the best"]
    headings += ["extra MB, ours / least of the others"] * has_memory + ["with forward"] * has_both
    yield from _table(headings, lines, len(facts))


def _small(file: ResultFile, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    has_wall = any(row.has("wall_ms") for row in rows)
    what = "Whole steps" if all(row.is_step for row in rows) else "Small shapes"
    yield f"{what}, microseconds{' of the device / of a whole call' * has_wall}:"
    yield ""
    libraries, facts = _present(file, rows), _facts(rows)

    def cell(m: Measured) -> str:
        return f"{microseconds(m.ms)} / {microseconds(m.wall_ms)}" if has_wall else microseconds(m.ms)

    lines = []
    for row in rows:
        line = [facts[key](row) for key in facts]
        line += [*_cells(row, libraries, cell), over(row.over_best())]
        lines.append(line + [over(row.over_best("wall_ms"))] * has_wall)
    headings = [*facts, *map(_text, libraries), "over the best"] + ["whole call over the best"] * has_wall
    yield from _table(headings, lines, len(facts))


def _facts(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """The columns that say which row it is."""
    facts: dict[str, Callable[[Row], str]] = {
        "direction": lambda row: _text(row.direction),
        "shape": lambda row: row.size,
        "dtype": lambda row: _text(row.dtype),
    }
    if any(row.layout for row in rows):
        facts["layout"] = lambda row: _text(row.layout or "")
    return facts


def _cells(row: Row, libraries: Sequence[str], written: Cell) -> Iterator[str]:
    """The best is bold; a dash is a result without a time."""
    best = min((m.ms for m in row.measured if m.ms is not None), default=None)
    for library in libraries:
        found = row.by(library)
        if found is None or found.ms is None:
            yield "- (wrong)" if found is not None and found.is_wrong else "-"
            continue
        mark = " †" if found.method == "events" else ""
        yield f"**{written(found)}**{mark}" if found.ms == best else f"{written(found)}{mark}"


def _memory(row: Row, of: str = "peak_bytes") -> str:
    ours = row.by(OURS.name)
    others = [size for m in row.measured if m.library != OURS.name and (size := getattr(m, of)) is not None]
    own = getattr(ours, of) if ours is not None else None
    return f"{megabytes(own)} / {megabytes(min(others, default=None))}"


def _present(file: ResultFile, rows: Sequence[Row]) -> tuple[str, ...]:
    """Libraries that have such a function."""
    have = {m.library for row in rows for m in row.measured if not m.is_missing}
    return in_order(name for name in file.libraries if name in have)


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why there are dashes: what a library does not have once, everything else by row."""
    found: dict[str, None] = {}
    for row in rows:
        where = " ".join(filter(None, (row.direction, row.layout, row.size, row.dtype)))
        for m in row.measured:
            if m.problem is not None:
                found[_text(m.reason) if m.is_missing else f"{_text(m.library)}, {where}: {_text(m.reason)}"] = None
    if found:
        yield "Not timed:"
        yield ""
        yield from (f"- {reason}" for reason in found)
        yield ""


def percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.1g}"


def over(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def microseconds(ms: float | None) -> str:
    return "-" if ms is None else f"{ms * 1e3:.0f}" if ms >= 0.1 else f"{ms * 1e3:.1f}"


def megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.0f}" if size >= 1e7 else f"{size / 1e6:.1f}"


def bandwidth(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e12:.2f} TB/s" if bytes_a_second >= 1e12 else f"{bytes_a_second / 1e9:.1f} GB/s"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]], left: int) -> Iterator[str]:
    """The first `left` columns are words, the others numbers."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * left}{'--:|' * (len(headings) - left)}"
    yield from (f"| {' | '.join(line)} |" for line in lines)
    yield ""


def _text(value: str) -> str:
    """As it is, whatever Markdown would make of it."""
    value = re.sub(r"[\\`*\[\]|]|\b_|_\b", r"\\\g<0>", value)
    return " ".join(value.replace("&", "&amp;").replace("<", "&lt;").split())
