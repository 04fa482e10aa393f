"""Every norm and a fused form in every dtype: checked against float64 and timed against eager PyTorch, wherever this is."""

from rich.console import Console

from warpnorm import pipeline
from warpnorm.bench import report
from warpnorm.bench.cases import BACKWARD, DTYPE_NAMES, FORWARD, PLAIN, SWISH_LAYER, BenchCase
from warpnorm.bench.rivals import EAGER
from warpnorm.bench.run import Run, default_device, run_cases

SHAPES = {"cuda": (16384, 4096), "cpu": (1024, 4096)}


def run_demo(console: Console, seconds: float = 0.25) -> Run:
    device = default_device()
    cases = [
        BenchCase(workload, direction, SHAPES[device], dtype, why="the demo")
        for workload in (*PLAIN, SWISH_LAYER)
        for direction in (FORWARD, BACKWARD)
        for dtype in DTYPE_NAMES
    ]
    run = run_cases(cases, [EAGER], device, console, seconds)
    report.print_demo(run, console)
    console.print(_path(device))
    return run


def _path(device: str) -> str:
    if device == "cuda" and pipeline.has_triton():
        return "Run by warpnorm's Triton kernels: one forward, one and a small sum backward."
    if device == "cuda":
        return "Run by PyTorch's own operators: Triton is not installed."
    return "Run by PyTorch's own operators: there is no GPU here, so expect the speed of eager PyTorch."
