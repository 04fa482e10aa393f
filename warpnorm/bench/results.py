"""Result files of `warpnorm bench`, read back: rows of measurements, and where each row stands against the best rival.
Older files have fewer fields; what is no result file is refused in a sentence."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from warpnorm.bench.cases import BACKWARD, DTYPE_NAMES, STEP
from warpnorm.bench.rivals import EAGER, OURS

AHEAD, LEVEL, BEHIND, ALONE, FAILED = "ahead", "level", "behind", "alone", "failed"
LEVEL_WITHIN = 0.02
SMALL_BYTES = 32 << 20  # under this the cost of a call counts for more than the speed of memory
HEAD = ("device", "machine", "driver", "warpnorm", "commit", "date", "torch", "triton", "cuda", "python")
FACTS = ("norm", "direction", "dtype")
MISSING_FUNCTION = "MissingFunctionError: "
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Measured:
    """One library on one row. `problem` says why there is no time, if there is none."""

    library: str
    ms: float | None
    percent: float | None
    wall_ms: float | None
    peak_bytes: int | None
    both_bytes: int | None
    error: float | None
    method: str | None
    problem: str | None

    @property
    def is_wrong(self) -> bool:
        return self.problem is not None and self.problem.startswith("wrong")

    @property
    def is_missing(self) -> bool:
        """The library has no such function."""
        return self.problem is not None and self.problem.startswith(MISSING_FUNCTION)

    @property
    def reason(self) -> str:
        return (self.problem or "").removeprefix(MISSING_FUNCTION)


@dataclass(frozen=True)
class Row:
    name: str
    norm: str
    direction: str
    shape: tuple[int, ...]
    layout: str | None
    dtype: str
    least_bytes: int
    why: str
    measured: tuple[Measured, ...]

    @property
    def size(self) -> str:
        return _size(self.shape)

    @property
    def is_small(self) -> bool:
        return self.least_bytes < SMALL_BYTES or self.is_step

    @property
    def is_step(self) -> bool:
        """Of a model, most of which is no norm: its time says more than its share of copy speed."""
        return self.direction == STEP

    def by(self, library: str) -> Measured | None:
        return next((m for m in self.measured if m.library == library), None)

    def has(self, key: str) -> bool:
        return any(getattr(m, key) is not None for m in self.measured)

    def best_rival(self, clock: str = "ms") -> Measured | None:
        timed = [m for m in self.measured if m.library != OURS.name and getattr(m, clock) is not None]
        return min(timed, key=lambda m: getattr(m, clock), default=None)

    def over_best(self, clock: str = "ms") -> float | None:
        """Our speed over that of the best rival, where there are both."""
        ours, best = self.by(OURS.name), self.best_rival(clock)
        own_time = getattr(ours, clock, None)
        return None if best is None or own_time is None else getattr(best, clock) / own_time

    def standing(self, clock: str = "ms") -> str:
        ratio, ours = self.over_best(clock), self.by(OURS.name)
        if ratio is None:
            return FAILED if getattr(ours, clock, None) is None else ALONE
        if abs(ratio - 1) <= LEVEL_WITHIN:
            return LEVEL
        return AHEAD if ratio > 1 else BEHIND


@dataclass(frozen=True)
class ResultFile:
    """`label` is the file's name, told apart from other files of the same name; `head` says what was measured, on what and
    when, without what the file does not know."""

    label: str
    head: Mapping[str, str]
    copy_bandwidth: float
    missing: Mapping[str, str]
    is_interrupted: bool
    rows: tuple[Row, ...]

    @property
    def device(self) -> str:
        return self.head["device"]

    @property
    def libraries(self) -> tuple[str, ...]:
        """Of any row, ours first, then in the order of the file."""
        found = dict.fromkeys(m.library for row in self.rows for m in row.measured)
        return tuple(sorted(found, key=lambda name: name != OURS.name))

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.norm for row in self.rows))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(sorted({m.method for row in self.rows for m in row.measured if m.method}))

    @property
    def has_wall(self) -> bool:
        return any(row.has("wall_ms") for row in self.rows)

    def standings(self, clock: str = "ms") -> Counter[str]:
        """Of all rows, or of those that have whole calls."""
        return Counter(row.standing(clock) for row in self.rows if clock == "ms" or row.has(clock))


def large_grid(rows: Sequence[Row]) -> dict[int, Row]:
    """Of rows that differ in shape alone: for each width the largest, by width. A width that was measured only at a
    fraction of the others' size is left out."""
    by_size = sorted((row for row in rows if row.layout is None and len(row.shape) == 2), key=lambda r: prod(r.shape))
    largest = {row.shape[-1]: row for row in by_size}
    most = max((prod(row.shape) for row in largest.values()), default=0)
    return {width: largest[width] for width in sorted(largest) if 2 * prod(largest[width].shape) >= most}


def read_files(paths: Sequence[Path]) -> list[ResultFile]:
    found: list[ResultFile] = []
    seen: Counter[str] = Counter()
    for path in dict.fromkeys(paths):
        seen[path.stem] += 1
        label = path.stem if seen[path.stem] == 1 else f"{path.stem}-{seen[path.stem]}"
        found.append(_read(path, label))
    return found


def _read(path: Path, label: str) -> ResultFile:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; `warpnorm bench --json {path}` writes one") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(_refusal(path, "it is not JSON")) from None
    try:
        return _file(written, label)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else "its fields are not as they should be"
        raise ValueError(_refusal(path, what)) from None
    except _EmptyError:
        raise ValueError(f"{path} has no results; `warpnorm bench --json {path}` measures some") from None


class _EmptyError(Exception):
    """A result file without results."""


def _refusal(path: Path, what: str) -> str:
    return f"{path} is no result file: {what}; `warpnorm bench --json FILE` writes one"


def _file(written: Any, label: str) -> ResultFile:
    bandwidth = _positive(written["copy_bandwidth"])
    if bandwidth is None or not isinstance(written["device"], str):
        raise TypeError
    rows = tuple(_row(record, bandwidth) for record in written["results"])
    if not rows:
        raise _EmptyError
    head = {key: str(written[key]) for key in HEAD if written.get(key) is not None}
    missing = {str(name): str(why) for name, why in (written.get("missing") or {}).items()}
    return ResultFile(label, head, bandwidth, missing, bool(written.get("is_interrupted")), rows)


def _row(record: Any, bandwidth: float) -> Row:
    norm, direction, dtype = (str(record[key]) for key in FACTS)
    shape, layout = tuple(int(size) for size in record["shape"]), str(record.get("layout") or "") or None
    name = str(record.get("name") or " ".join(filter(None, (norm, direction, layout, _size(shape), dtype))))
    least_bytes = _positive(record["least_bytes"])
    if least_bytes is None:
        raise TypeError
    least_peak = prod(shape) * ITEM_BYTES.get(dtype, 0) if direction == BACKWARD else 0  # the input's gradient
    measured = tuple(_measured(m, least_bytes / bandwidth * 1e5, least_peak) for m in record["measurements"])
    return Row(name, norm, direction, shape, layout, dtype, int(least_bytes), str(record.get("why") or ""), measured)


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _measured(record: Any, percent_at_one_ms: float, least_peak: int) -> Measured:
    """`percent_at_one_ms` is the percent of copy speed of a call that takes a millisecond. A peak below `least_peak`, of
    those that write their results beside what they are given, was taken while an earlier call's were let go: it is none."""
    ms, method, problem = _positive(record.get("ms")), record.get("method"), record.get("problem")
    if problem is None and record.get("is_right") is False:
        problem = "wrong"
    if problem is None and ms is None:
        problem = "not timed"
    is_timed = problem is None and ms is not None
    percent = _positive(record.get("percent_of_copy")) or (percent_at_one_ms / ms if ms else None)
    # On a CPU every time is a whole call's already
    wall_ms = _positive(record.get("wall_ms")) if method != "wall" else None
    peak, both = (_positive(record.get(name)) for name in ("peak_bytes", "both_bytes"))
    if peak is not None and peak < least_peak and record["rival"] in (OURS.name, EAGER.name):
        peak = None
    return Measured(
        library=str(record["rival"]),
        ms=ms if is_timed else None,
        percent=percent if is_timed else None,
        wall_ms=wall_ms if is_timed else None,
        peak_bytes=int(peak) if peak is not None and is_timed else None,
        both_bytes=int(both) if both is not None and is_timed else None,
        error=_positive(record.get("error")),
        method=str(method) if method and is_timed else None,
        problem=None if problem is None else " ".join(str(problem).split()),
    )


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and value > 0 else None
