"""Which cases of the contracts a run has: where they take long, one in several, by their names; all with
WARPNORM_TEST_ALL=1. Of those on a GPU, with WARPNORM_TEST_SANITIZED, the small ones that a tool of compute-sanitizer
watches, under which kernels take many times as long."""

import os
import zlib
from collections.abc import Sequence

import pytest

# By tool: tests, and one of how many of their cases. Memory is watched in every access pattern; what threads of a program
# leave for each other in shared memory where rows are reduced by several warps: `row`, `team` and `held`
SANITIZED = {
    "memcheck": {
        "test_every_forward_plan": 8,
        "test_narrow_rows_few_and_many": 9,
        "test_every_backward_plan": 6,
        "test_backward_plans_as_of_many_rows": 4,
        "test_gradients_of_rows_few_and_many": 2,
        "test_partial_rows_are_summed_by_blocks_of_any_size": 4,
        "test_layouts": 16,
        "test_fused_every_kind_of_operand_under_every_plan": 3,
        "test_fused_broadcasting": 11,
        "test_nothing_is_written_outside_the_output": 1,
        "test_nothing_is_written_outside_the_output_by_channel": 1,
        "test_every_plan_by_channel": 7,
        "test_held_rows": 4,
        "test_channel_layouts": 14,
        "test_plans_of_a_lone_row": 2,
        "test_plans_without_pieces": 3,
        "test_every_team": 12,
        "test_nan_travels": 1,
        "test_empty_inputs": 1,
    },
    "racecheck": {
        "test_every_forward_plan": 8,
        "test_every_backward_plan": 6,
        "test_backward_plans_as_of_many_rows": 4,
        "test_gradients_of_rows_few_and_many": 2,
        "test_every_team": 9,
        "test_held_rows": 4,
        "test_nan_travels": 1,
    },
    "broken": {"test_a_fault_that_memcheck_has_to_see": 1},
}


def select(
    config: pytest.Config,
    items: list[pytest.Item],
    folder: str,
    files: Sequence[str],
    one_in: int,
    keeps_lone: bool = False,
    every_but: Sequence[str] | None = None,
) -> None:
    """`keeps_lone`: tests of one case stay. `every_but`: of each test one case at least, but of these."""
    if os.environ.get("WARPNORM_TEST_ALL") == "1":
        return
    ours = [item for item in items if item.path.parent.name == folder and item.path.name in files]
    if keeps_lone:
        ours = [item for item in ours if "[" in item.name]
    left_out = {item for item in ours if _number(item) % one_in}
    if every_but is not None:
        kept = {_test(item) for item in ours if item not in left_out} | set(every_but)
        first: dict[str, pytest.Item] = {}
        for item in sorted(left_out, key=_number):
            first.setdefault(_test(item), item)
        left_out -= {item for test, item in first.items() if test not in kept}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _number(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def _test(item: pytest.Item) -> str:
    return item.name.partition("[")[0]


def select_sanitized(config: pytest.Config, items: list[pytest.Item], folder: str) -> None:
    """Only those of the tool; without one, all but what is broken on purpose."""
    tool = os.environ.get("WARPNORM_TEST_SANITIZED", "")
    if tool not in ("", *SANITIZED):
        raise pytest.UsageError(f"WARPNORM_TEST_SANITIZED is {tool!r}, which is none of {', '.join(SANITIZED)}")
    left_out = set()
    for item in (item for item in items if item.path.parent.name == folder):
        name = item.name.partition("[")[0]
        one_in = SANITIZED[tool].get(name, 0) if tool else int(name not in SANITIZED["broken"])
        if not one_in or zlib.crc32(item.nodeid.encode()) % one_in:
            left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
