"""How many programs run a plan on an iteration space, and what partial sums they leave behind."""

from math import prod
from typing import NamedTuple

from warpnorm.plan.plan import COLUMN as COLUMN_PATTERN
from warpnorm.plan.plan import LONG_ROW, TEAM, Plan
from warpnorm.problem import COLUMN, GROUP, GROUP_SCALAR, ROW, BackwardProblem, Operand, inner_lines
from warpnorm.space import Space


class Sum(NamedTuple):
    """Partial sums (groups, height, width), to be summed over the height."""

    groups: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        return self.groups * self.height * self.width


def forward(plan: Plan, space: Space) -> tuple[int, int]:
    blocks = -(-space.rows // plan.block_rows)
    return min(blocks, plan.programs or blocks), 1


def backward(plan: Plan, space: Space) -> tuple[int, int]:
    by_rows, by_cols = _shares(plan, space)
    if plan.pattern == LONG_ROW:
        return by_cols, by_rows
    return (min(by_rows, plan.programs), plan.splits) if plan.pattern == TEAM else (by_rows, 1)


def _shares(plan: Plan, space: Space) -> tuple[int, int]:
    """How many parts the rows come in, and the columns. Of every group, as many programs share the rows as keep the device
    busy; all groups have equally many."""
    group_rows = space.rows // space.groups
    by_cols = -(-space.cols // plan.block_cols) if plan.pattern == LONG_ROW else plan.splits * plan.chunks
    programs = plan.programs // by_cols if plan.pattern == LONG_ROW else plan.programs
    return space.groups * max(1, min(programs // space.groups, -(-group_rows // plan.block_rows))), by_cols


def part_cols(plan: Plan, space: Space) -> int:
    """How many columns of a line one program takes, of pattern `column`."""
    if plan.chunks:
        return plan.chunks * plan.block_cols
    parts = max(1, plan.programs * plan.block_rows // max(space.rows, plan.block_rows))
    blocks = -(-space.cols // plan.block_cols)
    return -(-blocks // parts) * plan.block_cols


def column_parts(plan: Plan, space: Space) -> int:
    return -(-space.cols // part_cols(plan, space))


def column(plan: Plan, space: Space) -> tuple[int, int]:
    return -(-space.rows // plan.block_rows) * column_parts(plan, space), 1


def line_sum(plan: Plan, space: Space, gradient: Operand) -> Sum:
    """Of a gradient of a norm by channel: a sum over the columns of lines, and then over neighbouring axes of lines."""
    sizes = space.row_sizes
    kept = [stride.literal != 0 for stride in gradient.row_strides]
    inner = inner_lines(gradient)
    outer = kept.index(False) if inner < len(kept) else 0
    width, groups = prod(sizes[len(sizes) - inner :]), prod(sizes[:outer])
    parts = column_parts(plan, space) if plan.pattern == COLUMN_PATTERN else 1
    return Sum(groups, space.rows // (groups * width) * parts, width)


def pieces(plan: Plan, space: Space) -> Sum:
    """Of the statistics of lines, and of the sums that backward needs of them, over the pieces of a row."""
    parts = column_parts(plan, space)
    groups = space.rows // (space.pieces * space.inner_rows)
    return Sum(groups, space.pieces * parts, space.inner_rows)


def gradient_sum(plan: Plan, space: Space, problem: BackwardProblem, which: int) -> Sum:
    """Of one of the gradients that are sums."""
    gradient = problem.gradients[which]
    return line_sum(plan, space, gradient) if problem.norm.is_by_channel else partial_sum(plan, space, gradient.axes)


def partial_sum(plan: Plan, space: Space, axes: str) -> Sum:
    """Of a gradient along `axes`. Every part of the rows leaves one for each column; of a scalar also every part of the
    columns; of a row only the latter do."""
    by_rows, by_cols = _shares(plan, space)
    if axes == ROW:
        return Sum(1, by_cols, space.rows)
    groups = space.groups if axes in (GROUP, GROUP_SCALAR) else 1
    has_cols = axes in (COLUMN, GROUP)
    return Sum(groups, by_rows // groups * (1 if has_cols else by_cols), space.cols if has_cols else 1)
