"""Cases x rivals, one after another: first the check, then the clock. A case that raises is a row that says so, never the
end of the run; an interrupt keeps what is done."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from warpnorm.bench.cases import DTYPE_NAMES, BenchCase
from warpnorm.bench.check import Subject, is_right
from warpnorm.bench.rivals import EAGER, OURS, Rival
from warpnorm.bench.timing import copy_bandwidth, time_call


@dataclass
class Measurement:
    """One rival on one case. `problem` says why there is no time, if there is none."""

    rival: str
    error: float | None = None
    is_right: bool = False
    ms: float | None = None
    method: str | None = None
    percent_of_copy: float | None = None
    problem: str | None = None


@dataclass
class CaseResult:
    case: BenchCase
    measurements: list[Measurement] = field(default_factory=list)

    def by(self, rival: str) -> Measurement | None:
        return next((m for m in self.measurements if m.rival == rival), None)

    def record(self) -> dict[str, Any]:
        case = self.case
        head: dict[str, Any] = {"norm": case.norm.name, "direction": case.direction, "shape": list(case.shape)}
        head |= {"dtype": DTYPE_NAMES[case.dtype], "least_bytes": case.least_bytes, "why": case.why}
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
        return [r.case.name for r in self.results if (m := r.by(OURS.name)) is None or not m.is_right]


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def run_cases(
    cases: Sequence[BenchCase], rivals: Sequence[Rival], device: str, console: Console, seconds: float
) -> Run:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with _own_stream(device), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("copy bandwidth", total=len(cases) * (1 + len(rivals)))
        run = Run(device, device_name(device), copy_bandwidth(device))
        run.missing = {rival.name: why for rival in rivals if (why := rival.missing(device)) is not None}
        contenders = [OURS, *(rival for rival in rivals if rival.name not in run.missing)]
        progress.update(task, total=len(cases) * len(contenders))
        try:
            for case in cases:
                run.results.append(CaseResult(case))
                subject = Subject(case, device)
                eager_error = subject.error(EAGER.build(case.norm))
                for rival in contenders:
                    progress.update(task, description=f"{case.name}: {rival.name}")
                    measurement = _measure(subject, rival, eager_error, device, run.copy_bandwidth, seconds)
                    run.results[-1].measurements.append(measurement)
                    progress.advance(task)
                del subject
        except KeyboardInterrupt:
            run.is_interrupted = True
            run.results = [result for result in run.results if result.by(OURS.name)]
    return run


@contextmanager
def _own_stream(device: str) -> Iterator[None]:
    """A graph is captured on the stream that autograd has worked on, which must not be the default one."""
    if device != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _measure(
    subject: Subject, rival: Rival, eager_error: float, device: str, bandwidth: float, seconds: float
) -> Measurement:
    case = subject.case
    found = Measurement(rival.name)
    try:
        forward = rival.build(case.norm)
        found.error = subject.error(forward)
        found.is_right = is_right(found.error, eager_error, case.dtype)
        if not found.is_right:
            found.problem = f"wrong: error {found.error:.1e}, eager PyTorch's {eager_error:.1e}"
            return found
        timing = time_call(subject.timed(forward), device, seconds)
    except Exception as error:  # whatever a rival raises is a row of the table
        found.problem = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        return found
    found.ms, found.method = timing
    found.percent_of_copy = case.least_bytes / bandwidth * 1e3 / timing.ms * 100
    return found
