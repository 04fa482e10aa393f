"""What `warpnorm report` writes from result files: `performance.md`, `performance.html` and a picture of each file that has
widths to draw. Everything is made before anything is written; the same files give the same bytes."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from warpnorm.bench import markdown, picture
from warpnorm.bench.palette import in_order, look
from warpnorm.bench.results import LEVEL_WITHIN, SMALL_BYTES, Measured, ResultFile, Row, large_grid, read_files
from warpnorm.bench.rivals import OURS

FOLDER = Path("benchmarks/results")  # of a checkout
PAGE = Path(__file__).parent / "page"
CLOCKS = {"ms": "ms", "wall": "wall_ms"}  # as the page calls them


def write_documents(paths: Sequence[Path], out: Path) -> list[Path]:
    """From these result files, or from all of a checkout. Returns what was written."""
    files = read_files(paths or _found())
    pictures = {file.label: drawn for file in files if (drawn := picture.draw(file)) is not None}
    contents = {
        "performance.md": markdown.performance(files, pictures).encode(),
        "performance.html": page(files).encode(),
    }
    contents |= {f"{label}.svg": drawn for label, drawn in pictures.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise ValueError(f"cannot write to {out}: {error.strerror}; --out names another folder") from None
    return [out / name for name in contents]


def _found() -> list[Path]:
    found = sorted(FOLDER.glob("*.json"))
    if not found:
        raise ValueError(
            f"there is no result file in {FOLDER}; name some, or write one with `warpnorm bench --json FILE`"
        )
    return found


def page(files: Sequence[ResultFile]) -> str:
    """One file, with everything it needs inside."""
    libraries = in_order(dict.fromkeys(name for file in files for name in file.libraries))
    scripts = "\n".join(_part(name) for name in ("plots.js", "tables.js", "page.js"))
    made = _part("page.html").replace("/* style */", _part("page.css") + _colours(libraries))
    return made.replace("/* script */", scripts).replace("/* data */", _embedded(_data(files, libraries)))


def _part(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _colours(libraries: Iterable[str]) -> str:
    looks = [look(name) for name in libraries]
    light, dark = (
        "".join(f"--library-{number}: {colour};" for number, colour in enumerate(colours))
        for colours in ([found.light for found in looks], [found.dark for found in looks])
    )
    return f":root {{{light}}}\n@media (prefers-color-scheme: dark) {{:root {{{dark}}}}}\n"


def _embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(files: Sequence[ResultFile], libraries: Sequence[str]) -> dict[str, Any]:
    return {
        "ours": OURS.name,
        "levelWithin": LEVEL_WITHIN,
        "smallBytes": SMALL_BYTES,
        "libraries": [{"name": name, "marker": look(name).marker} for name in libraries],
        "files": [_file(file) for file in files],
    }


def _file(file: ResultFile) -> dict[str, Any]:
    plotted = set(_plotted(file))
    return {
        "label": file.label,
        "head": {**file.head, "copy": markdown.bandwidth(file.copy_bandwidth)},
        "copyBandwidth": _rounded(file.copy_bandwidth),
        "notes": list(_notes(file)),
        "methods": [markdown.METHODS.get(method, method) for method in file.methods],
        "standings": {clock: dict(file.standings(key)) for clock, key in CLOCKS.items()},
        "hasWall": file.has_wall,
        "rows": [_row(row, row in plotted) for row in file.rows],
    }


def _plotted(file: ResultFile) -> Iterator[Row]:
    """Rows of curves over several widths."""
    large = [row for row in file.rows if not row.is_small]
    for key in dict.fromkeys((row.norm, row.direction, row.dtype) for row in large):
        by_width = large_grid([row for row in large if (row.norm, row.direction, row.dtype) == key])
        if len(by_width) > 1:
            yield from by_width.values()


def _notes(file: ResultFile) -> Iterator[str]:
    yield from (f"{name} was not measured: {why}" for name, why in file.missing.items())
    if file.is_interrupted:
        yield "the run was interrupted: rows are missing"


def _row(row: Row, is_plotted: bool) -> dict[str, Any]:
    return {
        "name": row.name,
        "norm": row.norm,
        "direction": row.direction,
        "shape": list(row.shape),
        "layout": row.layout,
        "dtype": row.dtype,
        "bytes": row.least_bytes,
        "why": row.why,
        "isSmall": row.is_small,
        "isPlotted": is_plotted,
        "over": {clock: _rounded(row.over_best(key)) for clock, key in CLOCKS.items()},
        "standing": {clock: row.standing(key) for clock, key in CLOCKS.items()},
        "results": {m.library: _measured(m) for m in row.measured},
    }


def _measured(m: Measured) -> dict[str, Any]:
    """Without what there is not."""
    found = {
        "ms": _rounded(m.ms),
        "percent": _rounded(m.percent),
        "wall": _rounded(m.wall_ms),
        "peak": m.peak_bytes,
        "error": _rounded(m.error),
        "method": m.method,
        "problem": m.reason or None,
        "isWrong": m.is_wrong or None,
        "isMissing": m.is_missing or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
