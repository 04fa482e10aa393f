"""Peak device memory, as the benchmark measured it: fused functions need no more than eager PyTorch, but for the sums that
programs leave for each other; norms alone, where PyTorch has no intermediate results either, have such sums too."""

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200.json"
ALONE = ("rms_norm", "layer_norm", "batch_norm", "group_norm", "instance_norm")
SUMS_OF_FUSED = 512 << 10
# Of backward: a row of each parameter's gradient in float32 for each program, 528 of them at the most on this GPU
SUMS = 9 << 20


def beside_eager() -> list[tuple[Any, int, int]]:
    """(record, our peak, eager PyTorch's)"""
    found = []
    for record in json.loads(RESULTS.read_text())["results"]:
        peaks = {m["rival"]: m.get("peak_bytes") for m in record["measurements"]}
        ours, eager = peaks.get("warpnorm"), peaks.get("eager")
        if ours and eager:
            found.append((record, ours, eager))
    return found


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "alone"])
def test_no_more_than_eager_but_for_sums(is_fused: bool) -> None:
    allowed = SUMS_OF_FUSED if is_fused else SUMS
    some = [row for row in beside_eager() if (row[0]["norm"] not in ALONE) == is_fused]
    assert some
    above = [f"{r['name']}: {ours} bytes, eager {eager}" for r, ours, eager in some if ours > eager + allowed]
    assert above == []


def test_a_fused_function_mostly_needs_much_less() -> None:
    ratios = sorted(ours / eager for record, ours, eager in beside_eager() if record["norm"] not in ALONE)
    assert ratios[len(ratios) // 2] < 0.9
