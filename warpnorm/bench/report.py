"""Tables for people and result files for documents."""

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from warpnorm.bench.cases import DTYPE_NAMES, BenchCase
from warpnorm.bench.rivals import EAGER, OURS
from warpnorm.bench.run import CaseResult, Measurement, Run
from warpnorm.version import VERSION


def print_demo(run: Run, console: Console) -> None:
    """One row a case: error, time, speed-up over eager PyTorch, percent of the speed of a copy."""
    table = Table(title=f"warpnorm {VERSION} on {run.device_name}", title_justify="left")
    for heading in ("norm", "direction", "dtype", "shape"):
        table.add_column(heading)
    for heading in ("error", "eager error", "ms", "eager ms", "speed-up", "% of copy", ""):
        table.add_column(heading, justify="right")
    for result in run.results:
        case, ours, eager = result.case, result.by(OURS.name), result.by(EAGER.name)
        table.add_row(
            _norm(case),
            case.direction,
            DTYPE_NAMES[case.dtype],
            case.size,
            _number(ours, "error", ".1e"),
            _number(eager, "error", ".1e"),
            _number(ours, "ms", ".3f"),
            _number(eager, "ms", ".3f"),
            _speedup(ours, eager),
            _number(ours, "percent_of_copy", ".0f"),
            _verdict(ours),
        )
    console.print(table)


def print_bench(run: Run, console: Console) -> None:
    """One row a case, one column a rival: percent of the speed of a copy; then our speed over the best rival's, our time on
    the device and of a plain call, and the memory that a call takes."""
    rivals = list(dict.fromkeys(m.rival for result in run.results for m in result.measurements))
    table = Table(
        title=f"Percent of copy speed on {run.device_name} ({run.copy_bandwidth / 1e12:.2f} TB/s)", title_justify="left"
    )
    for heading in ("norm", "direction", "shape", "dtype"):
        table.add_column(heading)
    for name in rivals:
        table.add_column(name, justify="right", style="bold" if name == OURS.name else None)
    for heading in ("over the best", "ms", "wall ms", "peak MB"):
        table.add_column(heading, justify="right")
    for result in run.results:
        case = result.case
        cells = [_cell(result, name) for name in rivals]
        ours = result.by(OURS.name)
        rest = (_number(ours, "ms", ".4f"), _number(ours, "wall_ms", ".4f"), _megabytes(ours))
        table.add_row(
            _norm(case), case.direction, case.size, DTYPE_NAMES[case.dtype], *cells, _over_best(result), *rest
        )
    console.print(table)
    for result in run.results:
        for measurement in result.measurements:
            if measurement.problem and not measurement.problem.startswith("MissingFunctionError"):
                console.print(f"{result.case.name}: {measurement.rival}: {measurement.problem}")
    if any(m.method == "events" for result in run.results for m in result.measurements):
        console.print("* could not be captured in a CUDA graph, and was timed by events: what the host takes may count")
    for name, why in run.missing.items():
        console.print(f"{name}: {why}")


def _norm(case: BenchCase) -> str:
    return " ".join(filter(None, (case.workload.name, case.layout)))


def _cell(result: CaseResult, rival: str) -> str:
    measurement = result.by(rival)
    if measurement is None or measurement.percent_of_copy is None:
        return "-"
    return f"{measurement.percent_of_copy:.0f}" + "*" * (measurement.method == "events")


def _over_best(result: CaseResult) -> str:
    ratio = over_best(result)
    return "-" if ratio is None else f"{ratio:.2f}x"


def over_best(result: CaseResult) -> float | None:
    """Our speed over that of the best rival, where there are both."""
    ours = result.by(OURS.name)
    timed = [m.ms for m in result.measurements if m.rival != OURS.name and m.ms is not None]
    return min(timed) / ours.ms if timed and ours is not None and ours.ms is not None else None


def _number(measurement: Measurement | None, name: str, spec: str) -> str:
    value = getattr(measurement, name, None)
    return "-" if value is None else format(value, spec)


def _megabytes(measurement: Measurement | None) -> str:
    size = measurement.peak_bytes if measurement is not None else None
    return "-" if size is None else f"{size / 1e6:.1f}"


def _speedup(ours: Measurement | None, rival: Measurement | None) -> str:
    if ours is None or rival is None or ours.ms is None or rival.ms is None:
        return "-"
    return f"{rival.ms / ours.ms:.2f}x"


def _verdict(ours: Measurement | None) -> str:
    if ours is not None and ours.is_right:
        return "[green]right[/green]"
    return f"[red]{ours.problem if ours else 'did not run'}[/red]"


def write_json(run: Run, path: Path, kept: Sequence[dict[str, Any]] = ()) -> None:
    """With `kept`, records of other cases that the file has, and what it says of rivals that this run did not measure."""
    write_whole(path, _record(run, kept, _missing(path) if kept else {}))


def write_whole(path: Path, record: dict[str, Any]) -> None:
    """In one step: a run that is stopped while it writes leaves what was there."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def check_place(path: Path, option: str = "--json") -> None:
    """That a file can be written there, found out before hours go into what it will hold."""
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{option}: cannot write to {path.parent}: {error.strerror}; name a file elsewhere") from None


def _missing(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["missing"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _record(run: Run, kept: Sequence[dict[str, Any]], missing: dict[str, str]) -> dict[str, Any]:
    about = head(run.device_name)
    now = {"commit": about["commit"], "date": about["date"]}
    new = {result.case.name: result.record() | (result.origin or now) for result in run.results}
    old = {record["name"]: record for record in kept}
    measured = {measurement.rival for result in run.results for measurement in result.measurements}
    missing = {name: why for name, why in missing.items() if name not in measured}
    order = {name: new.get(name, old.get(name)) for name in (*old, *new)}
    return {
        **about,
        "copy_bandwidth": run.copy_bandwidth,
        "missing": missing | run.missing,
        "is_interrupted": run.is_interrupted,
        "results": list(order.values()),
    }


def head(device_name: str) -> dict[str, Any]:
    """What was measured, on what, and when."""
    return {
        "warpnorm": VERSION,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "python": platform.python_version(),
        "machine": _machine(),
        "device": device_name,
    }


def is_result(path: Path) -> bool:
    """Whether a file was written by `write_json`."""
    try:
        return isinstance(json.loads(path.read_text())["results"], list)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_json(path: Path, device_name: str) -> list[dict[str, Any]]:
    """The records of an earlier run with the same versions on the same machine; otherwise none."""
    try:
        written = json.loads(path.read_text())
        now = head(device_name)
        is_same = all(written[key] == now[key] for key in now if key not in ("commit", "date"))
        return [
            {"commit": written["commit"], "date": written["date"]} | record for record in written["results"] if is_same
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _commit() -> str | None:
    """Of the checkout that this is, if it is one; with a mark where files differ from it."""
    folder = Path(__file__).parent
    try:
        commands = (
            ["git", "rev-parse", "--short", "HEAD"],
            ["git", "status", "--porcelain", "--untracked-files=no", "."],
        )
        commit, changes = (
            subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + " and changes" * bool(changes)


def _machine() -> str:
    """The processor and how many of them there are."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} processors"


def _driver() -> str | None:
    """Of the GPU, where there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0] if found else None


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__
