"""Peak device memory, as the benchmark measured it: fused functions need no more than eager PyTorch, but for the sums that
programs leave for each other; norms alone, where PyTorch has no intermediate results either, have such sums too. Both
directions of a fused function together need no more at all, where that was measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warpnorm import pipeline
from warpnorm.norms import LAYER_NORM
from warpnorm.plan import choose, grid
from warpnorm.plan.device import KNOWN
from warpnorm.problem import COLUMN, FULL, Call, View
from warpnorm.reference import Affine, Itself

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200.json"
ALONE = ("rms_norm", "layer_norm", "batch_norm", "batch_norm_eval", "group_norm", "instance_norm")
SUMS_BY_CHANNEL = 512 << 10
UNITS = KNOWN["sm_90"].units
# Of backward: a row of each parameter's gradient in float32 for each program, 528 of them at the most on this GPU
SUMS = 9 << 20


def beside_eager(of: str = "peak_bytes") -> list[tuple[Any, int, int]]:
    """(record, our peak, eager PyTorch's)"""
    found = []
    for record in json.loads(RESULTS.read_text())["results"]:
        peaks = {m["rival"]: m.get(of) for m in record["measurements"]}
        ours, eager = peaks.get("warpnorm"), peaks.get("eager")
        if ours and eager:
            found.append((record, ours, eager))
    return found


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "alone"])
def test_no_more_than_eager_but_for_sums(is_fused: bool) -> None:
    some = [row for row in beside_eager() if (row[0]["norm"] not in ALONE) == is_fused]
    assert some
    for record, ours, eager in some:
        of_rows = 0 if record["layout"] else UNITS * record["shape"][-1] * 4  # a row of float32 for each multiprocessor
        allowed = SUMS_BY_CHANNEL + of_rows if is_fused else SUMS
        assert ours <= eager + allowed, record["name"]


def test_both_directions_of_fused_functions_need_no_more_than_eager() -> None:
    some = beside_eager("both_bytes")
    if not some:
        pytest.skip("these results are older than the measurement")
    for record, ours, eager in some:
        assert ours <= eager or record["norm"] in ALONE, record["name"]


def test_a_fused_function_mostly_needs_much_less() -> None:
    ratios = sorted(ours / eager for record, ours, eager in beside_eager() if record["norm"] not in ALONE)
    assert ratios[len(ratios) // 2] < 0.9


WIDTHS = (64, 256, 512, 760, 1023, 1024, 4095, 4096, 5120, 8191, 8192, 16_384, 50_257, 65_536, 262_144)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_sums_are_no_more_than_is_said(cols: int, dtype: torch.dtype) -> None:
    """In docs/how_it_works.md, of layer_norm on an H200."""
    call = Call(LAYER_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, COLUMN, COLUMN), (dtype,))
    for rows in (1, 16, 64, 128, 129, 500, 2048, 10_000, 1_000_000):
        full, column = View((rows, cols), (cols, 1), dtype), View((cols,), (1,), dtype)
        problem, space = pipeline.backward_problem(call, (full, column, column, full), (0,), (0, 1, 2))
        plan = choose.backward(problem, KNOWN["sm_90"])
        sums = [grid.gradient_sum(plan, space, problem, i) for i in problem.reduced]
        size = 0 if grid.sum_programs(plan, space, problem) else 4 * sum(s.numel for s in sums)
        assert size <= min(8 * rows * cols, 11_000_000)
        assert (size == 0) == (cols <= 4096 and rows <= 64) or 64 < rows <= 128
