"""Tables for people and result files for documents."""

import json
import platform
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
    """One row a case, one column a rival: percent of the speed of a copy; last, our speed over the best rival's."""
    rivals = [m.rival for m in run.results[0].measurements] if run.results else []
    table = Table(
        title=f"Percent of copy speed on {run.device_name} ({run.copy_bandwidth / 1e12:.2f} TB/s)", title_justify="left"
    )
    for heading in ("norm", "direction", "shape", "dtype"):
        table.add_column(heading)
    for name in rivals:
        table.add_column(name, justify="right", style="bold" if name == OURS.name else None)
    table.add_column("over the best", justify="right")
    for result in run.results:
        case = result.case
        cells = [_cell(result, name) for name in rivals]
        table.add_row(_norm(case), case.direction, case.size, DTYPE_NAMES[case.dtype], *cells, _over_best(result))
    console.print(table)
    for result in run.results:
        for measurement in result.measurements:
            if measurement.problem and not measurement.problem.startswith("MissingFunctionError"):
                console.print(f"{result.case.name}: {measurement.rival}: {measurement.problem}")
    for name, why in run.missing.items():
        console.print(f"{name}: {why}")


def _norm(case: BenchCase) -> str:
    return " ".join(filter(None, (case.workload.name, case.layout)))


def _cell(result: CaseResult, rival: str) -> str:
    measurement = result.by(rival)
    if measurement is None or measurement.percent_of_copy is None:
        return "-"
    return f"{measurement.percent_of_copy:.0f}"


def _over_best(result: CaseResult) -> str:
    ours = result.by(OURS.name)
    timed = [m for m in result.measurements if m.rival != OURS.name and m.ms is not None]
    if not timed:
        return "-"
    return _speedup(ours, min(timed, key=lambda m: m.ms or 0.0))


def _number(measurement: Measurement | None, name: str, spec: str) -> str:
    value = getattr(measurement, name, None)
    return "-" if value is None else format(value, spec)


def _speedup(ours: Measurement | None, rival: Measurement | None) -> str:
    if ours is None or rival is None or ours.ms is None or rival.ms is None:
        return "-"
    return f"{rival.ms / ours.ms:.2f}x"


def _verdict(ours: Measurement | None) -> str:
    if ours is not None and ours.is_right:
        return "[green]right[/green]"
    return f"[red]{ours.problem if ours else 'did not run'}[/red]"


def write_json(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_record(run), indent=1) + "\n")


def _record(run: Run) -> dict[str, Any]:
    return {
        "warpnorm": VERSION,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "device": run.device_name,
        "copy_bandwidth": run.copy_bandwidth,
        "missing": run.missing,
        "is_interrupted": run.is_interrupted,
        "results": [result.record() for result in run.results],
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__
