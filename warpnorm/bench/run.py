"""Cases x rivals, one after another: first the check, then the clock. A case that raises is a row that says so, never the
end of the run; an interrupt keeps what is done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from warpnorm import repeat, settings
from warpnorm.bench.ahead import compile_ahead
from warpnorm.bench.cases import BACKWARD, DTYPE_NAMES, STEP, BenchCase
from warpnorm.bench.check import Subject, draws, is_right
from warpnorm.bench.rivals import OURS, Forward, Rival, build
from warpnorm.bench.timing import copy_bandwidth, peak_memory, time_calls, time_steps, wall_time


@dataclass
class Measurement:
    """One rival on one case: median milliseconds of the device (`method` says how they were measured), of a plain call, and
    bytes that a call allocates at once, and of a backward those of its forward and it. `problem` says why there is no time,
    if there is none."""

    rival: str
    error: float | None = None
    is_right: bool = False
    ms: float | None = None
    method: str | None = None
    percent_of_copy: float | None = None
    wall_ms: float | None = None
    peak_bytes: int | None = None
    both_bytes: int | None = None
    problem: str | None = None


@dataclass
class CaseResult:
    """`origin` says of which commit and when, if it was measured before."""

    case: BenchCase
    measurements: list[Measurement] = field(default_factory=list)
    origin: dict[str, Any] | None = None

    def by(self, rival: str) -> Measurement | None:
        return next((m for m in self.measurements if m.rival == rival), None)

    @staticmethod
    def of(case: BenchCase, record: dict[str, Any]) -> "CaseResult":
        """What was measured before."""
        origin = {"commit": record["commit"], "date": record["date"]}
        return CaseResult(case, [Measurement(**measurement) for measurement in record["measurements"]], origin)

    def record(self) -> dict[str, Any]:
        case = self.case
        head: dict[str, Any] = {"name": case.name, "norm": case.workload.name, "direction": case.direction}
        head["shape"] = list(case.shape)
        head |= {"layout": case.layout, "dtype": DTYPE_NAMES[case.dtype], "least_bytes": case.least_bytes}
        head |= {"why": case.why}
        return head | {"measurements": [asdict(m) for m in self.measurements]}


@dataclass
class Run:
    device: str
    device_name: str
    copy_bandwidth: float
    results: list[CaseResult] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    @property
    def wrong(self) -> list[str]:
        """Cases where we were wrong, or did not run."""
        return [r.case.name for r in self.results if (m := r.by(OURS.name)) is None or m.problem or not m.is_right]


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def run_cases(
    cases: Sequence[BenchCase],
    rivals: Sequence[Rival],
    device: str,
    console: Console,
    seconds: float,
    before: Mapping[str, dict[str, Any]] | None = None,
    keep: Callable[[Run], None] = lambda run: None,
    jobs: int = 1,
) -> Run:
    """`before` holds what was measured already, by the names of cases, and is not measured again; `keep` is called after
    each case, so that nothing is lost when the run ends early. More than one of `jobs` compile what is to be timed first."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with own_stream(device), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("the launcher", total=len(cases) * (1 + len(rivals)))
        if settings.current().launcher == "auto":
            repeat.prepare_launcher()  # not while something is timed
        progress.update(task, description="copy bandwidth")
        run = Run(device, device_name(device), copy_bandwidth(device))
        run.missing = {rival.name: why for rival in rivals if (why := rival.missing(device)) is not None}
        contenders = [OURS, *(rival for rival in rivals if rival.name not in run.missing)]
        progress.update(task, total=len(cases) * len(contenders))
        try:
            if jobs > 1:
                todo = [case for case in cases if case.name not in (before or {})]
                there = [rival.name for rival in contenders[1:]]
                say = "{} of {} cases compiled".format
                compile_ahead(todo, there, device, jobs, lambda n: progress.update(task, description=say(n, len(todo))))
            for case in cases:
                progress.update(task, description=case.name)
                if before and case.name in before:
                    run.results.append(CaseResult.of(case, before[case.name]))
                    progress.advance(task, len(contenders))
                    continue
                names = case.workload.rivals
                own = [c for c in contenders if names is None or c.name in (OURS.name, *names)]
                result = _run_case(case, own, run, seconds, lambda part: progress.advance(task, part))
                run.results.append(result)
                keep(run)
        except KeyboardInterrupt:
            run.is_interrupted = True
    return run


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """A graph is captured on the stream that autograd has worked on, which must not be the default one."""
    if device != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _run_case(
    case: BenchCase, contenders: Sequence[Rival], run: Run, seconds: float, advance: Callable[[float], None]
) -> CaseResult:
    result = CaseResult(case)
    try:
        subjects = [Subject(case, run.device) for _ in range(draws(case))]
        eager_error = _error(subjects, case.workload.function)
    except Exception as error:  # out of memory, say: no contender can run
        result.measurements = [Measurement(rival.name, problem=in_a_line(error)) for rival in contenders]
        advance(len(contenders))
        return result
    right = []
    for rival in contenders:
        found, function = _check(subjects, rival, eager_error)
        result.measurements.append(found)
        if function is not None:
            right.append((found, function))
        advance(0.5)
    _time(subjects[0], right, run, seconds)
    advance(0.5 * len(contenders))
    return result


def _error(subjects: Sequence[Subject], function: Forward) -> float:
    return mean(subject.error(function) for subject in subjects)


def _check(subjects: Sequence[Subject], rival: Rival, eager_error: float) -> tuple[Measurement, Forward | None]:
    """And its function, if that is right."""
    found, subject = Measurement(rival.name), subjects[0]
    try:
        function = build(rival, subject.case.workload)
        found.error = _error(subjects, function)
    except Exception as error:  # whatever a rival raises is a row of the table
        found.problem = in_a_line(error)
        return found, None
    found.is_right = is_right(found.error, eager_error, subject.case.dtype)
    if not found.is_right:
        found.problem = f"wrong: error {found.error:.1e}, eager PyTorch's {eager_error:.1e}"
    return found, function if found.is_right else None


def _time(subject: Subject, right: Sequence[tuple[Measurement, Forward]], run: Run, seconds: float) -> None:
    """Whoever is right: in turns, unless one of them raises; on a GPU one after the other, but for whole steps, whose times
    differ by little."""
    case = subject.case
    is_step = case.direction == STEP
    if run.device == "cuda" and len(right) > 1 and not is_step:
        for pair in right:
            _time(subject, [pair], run, seconds)
        return
    try:
        calls = [subject.timed(function) for _, function in right]
        timings = (time_steps if is_step else time_calls)(calls, run.device, seconds) if calls else []
        extras = [(wall_time(call), peak_memory(call)) if run.device == "cuda" else None for call in calls]
        has_both = run.device == "cuda" and case.direction == BACKWARD
        both = [peak_memory(subject.whole(function)) if has_both else None for _, function in right]
    except Exception as error:
        if len(right) == 1:
            right[0][0].problem = in_a_line(error)
            return
        for pair in right:
            _time(subject, [pair], run, seconds)
        return
    for (measurement, _), timing, extra, both_bytes in zip(right, timings, extras, both, strict=True):
        measurement.both_bytes = both_bytes
        measurement.ms, measurement.method = timing
        measurement.wall_ms, measurement.peak_bytes = extra or (timing.ms, None)
        measurement.percent_of_copy = case.least_bytes / run.copy_bandwidth * 1e3 / timing.ms * 100


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
