"""The order of the tasks of pattern `column`: each is done once, and whoever waits comes after those it waits for."""

import hypothesis.strategies as st
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

from warpnorm.kernels.tasks import FIRST, LAST, MERGE, NOTHING, task_of
from warpnorm.plan import grid
from warpnorm.plan.plan import COLUMN, Plan
from warpnorm.space import Space

examples = settings(max_examples=30, deadline=None, database=None, derandomize=True)


@triton.jit
def tell_kernel(found, order, reciprocals, BY_UNITS: tl.constexpr):
    task, unit, number = task_of(order, reciprocals, BY_UNITS)
    tl.store(found + tl.program_id(0) * 3, task)
    tl.store(found + tl.program_id(0) * 3 + 1, unit)
    tl.store(found + tl.program_id(0) * 3 + 2, number)


def tasks(plan: Plan, space: Space) -> tuple[grid.Order, list[tuple[int, int, int]]]:
    """Of all programs of all launches, in their order."""
    here, _ = grid.layout(plan, space)
    found = []
    for _plan, order, programs in grid.column(plan, None, space, True):
        told = torch.full((programs, 3), -1, dtype=torch.int32)
        tell_kernel[(programs,)](told, order, grid.reciprocals(here, order), plan.by_units)
        found += [tuple(row) for row in told.tolist()]
    return grid.order(plan, space), found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Space]:
    pieces, inner, outer = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    inner, outer = (inner, 1) if draw(st.booleans()) else (1, outer)
    rows, cols = pieces * inner * outer, draw(st.integers(1, 20))
    space = Space(rows, cols, (), (), (), (), (rows,), 1, pieces=pieces, inner_rows=inner)
    block_rows, block_cols = 2 ** draw(st.integers(0, 3)), 2 ** draw(st.integers(0, 4))
    chunks, ahead = draw(st.integers(1, 3)), draw(st.integers(0, 20))
    held = draw(st.sampled_from([0, 5, 1000]))
    plan = Plan(COLUMN, block_rows, block_cols, 4, chunks=chunks, ahead=ahead, held=held, by_units=draw(st.booleans()))
    return plan, space


@examples
@given(cases())
def test_every_task_once_and_in_order(case: tuple[Plan, Space]) -> None:
    order, found = tasks(*case)
    begun: dict[int, dict[tuple[int, int], int]] = {task.value: {} for task in (FIRST, MERGE, LAST)}
    for program, (task, unit, number) in enumerate(found):
        if task != NOTHING.value:
            assert (unit, number) not in begun[task], "a task is done twice"
            begun[task][unit, number] = program
    tiles = {(unit, number) for unit in range(order.units) for number in range(order.unit_tiles)}
    assert set(begun[FIRST.value]) == set(begun[LAST.value]) == tiles
    assert set(begun[MERGE.value]) == {(u, n) for u in range(order.units) for n in range(order.merges)}
    for unit in range(order.units):
        firsts, merges, lasts = (
            [program for (u, _), program in begun[task.value].items() if u == unit] for task in (FIRST, MERGE, LAST)
        )
        assert max(firsts) < min(merges), "a merge comes before what it waits for"
        assert max(merges) < min(lasts), "a last task comes before what it waits for"


def test_one_unit_after_another() -> None:
    space = Space(6, 8, (), (), (), (), (3, 2), 1, pieces=2)
    _, found = tasks(Plan(COLUMN, 2, 4, 4, by_units=True), space)
    assert [(unit, number) for task, unit, number in found if task == FIRST.value] == [
        (unit, number) for unit in range(3) for number in range(2)
    ]


def test_by_turns_where_tiles_are_held() -> None:
    """Otherwise the test above would not see turns."""
    space = Space(64, 8, (), (), (), (), (64,), 1, pieces=4, inner_rows=16)
    plan = Plan(COLUMN, 1, 8, 4, ahead=3, held=1000)
    order, found = tasks(plan, space)
    assert order.start == -1
    kinds = [task for task, _, _ in found]
    assert kinds.index(LAST.value) < len(kinds) - 1 - kinds[::-1].index(FIRST.value), (
        "last tasks begin before first ones end"
    )
