"""Every norm and a fused form in every dtype: checked against float64 and timed against eager PyTorch, wherever this is."""

from rich.console import Console

from warpnorm import routing
from warpnorm.bench import report
from warpnorm.bench.cases import (
    BACKWARD,
    BATCH,
    DTYPE_NAMES,
    FORWARD,
    GROUP,
    INSTANCE,
    LAYER,
    NC,
    NCHW,
    NHWC,
    RMS,
    SWISH_LAYER,
    BenchCase,
)
from warpnorm.bench.rivals import EAGER
from warpnorm.bench.run import Run, default_device, run_cases

# Of each layout; without one an input is rows
SHAPES: dict[str, dict[str | None, tuple[int, ...]]] = {
    "cuda": {None: (16384, 4096), NCHW: (64, 256, 56, 56), NHWC: (64, 256, 56, 56), NC: (65536, 1024)},
    "cpu": {None: (1024, 4096), NCHW: (8, 64, 56, 56), NHWC: (8, 64, 56, 56), NC: (2048, 1024)},
}
WORKLOADS = (
    (RMS, None),
    (LAYER, None),
    (SWISH_LAYER, None),
    (BATCH, NCHW),
    (BATCH, NHWC),
    (BATCH, NC),
    (GROUP, NCHW),
    (INSTANCE, NCHW),
)


def run_demo(console: Console, seconds: float = 0.15) -> Run:
    device = default_device()
    cases = [
        BenchCase(workload, direction, SHAPES[device][layout], dtype, why="the demo", layout=layout)
        for workload, layout in WORKLOADS
        for direction in (FORWARD, BACKWARD)
        for dtype in DTYPE_NAMES
    ]
    run = run_cases(cases, [EAGER], device, console, seconds)
    report.print_demo(run, console)
    console.print(_path(device))
    return run


def _path(device: str) -> str:
    if device == "cuda" and routing.has_triton():
        return "Run by warpnorm's Triton kernels: rows by one forward, one and a small sum backward; channels by a few each."
    if device == "cuda":
        return f"Run by PyTorch's own operators: {routing.why_no_triton()}."
    if routing.has_compiler():
        return "Run by native code, built by the system's C compiler: there is no GPU here."
    return f"Run by PyTorch's own operators, at their speed: there is no GPU here, and {routing.why_no_compiler()}."
