"""How many programs run a plan on an iteration space, and what partial sums they leave behind."""

from math import lcm, prod
from typing import NamedTuple

from warpnorm.plan.plan import ALL, HELD, JOINT, LONG_ROW, TEAM, Plan
from warpnorm.plan.plan import COLUMN as COLUMN_PATTERN
from warpnorm.plan.plan import ROW as ROW_PATTERN
from warpnorm.problem import COLUMN, GROUP, GROUP_SCALAR, ROW, BackwardProblem, Operand, inner_lines
from warpnorm.space import Space

# Programs of pattern `row`, backward, that are enough to begin with, and the blocks of rows that each has before there are
# more: each leaves a partial row, which has to be summed
MANY_PROGRAMS = 128
BLOCKS_A_PROGRAM = 4
# Rows up to which other programs of the same launch sum over them, in so many steps at the most. LayerNorm backward of 32 x
# 1024 fp32 takes 1.9 us so, and 3.4 otherwise, of 128 x 1024 2.6 and 3.8. Of 128 x 512 it takes 2.1 in two steps of few
# columns each, 3.75 in eight steps of 32, and 3.85 otherwise; of 128 x 4096 3.7 in two steps, 4.8 in four of 64 columns
FEW_ROWS = 128
FEW_STEPS = 4
WIDEST_FEW = 4096  # columns: beyond, kernels have no registers to spare
# Programs of pattern `row`, forward, of narrow rows, up to which a warp has fewer of these: there is room for all at once.
# LayerNorm of 8 x 256 fp32 takes 1.4 us so and 2.0 otherwise, of 8 x 128 1.6 and 2.7, of 512 x 256 1.8 and 2.2; with 1024
# programs, of 4096 x 64 fp16, 2.3 and 2.1
FEW_PROGRAMS = 512
MANY_A_UNIT = 4  # programs of teams on a multiprocessor


class Sum(NamedTuple):
    """Partial sums (groups, height, width), to be summed over the height."""

    groups: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        return self.groups * self.height * self.width


def forward(plan: Plan, space: Space) -> tuple[int, int]:
    if plan.pattern == HELD:
        return held(plan, space)
    few = -(-space.rows // few_rows(plan))
    blocks = few if few <= FEW_PROGRAMS else -(-space.rows // plan.block_rows)
    return min(blocks, plan.programs or blocks), plan.splits


def few_rows(plan: Plan) -> int:
    """Rows of one program of pattern `row`, forward, where there are few of them."""
    is_narrow = plan.pattern == ROW_PATTERN and plan.programs == 0 and plan.warps <= 2
    few = max(1, plan.least * plan.warps // plan.block_cols)
    return min(few, plan.block_rows) if is_narrow else plan.block_rows


def held(plan: Plan, space: Space) -> tuple[int, int]:
    """Teams, and programs of one, of pattern `held`."""
    splits = -(-space.pieces // plan.block_rows)
    return min(plan.programs // splits, space.statistics), splits


def backward(plan: Plan, space: Space) -> tuple[int, int]:
    if plan.pattern == HELD:
        return held(plan, space)
    by_rows, by_cols = _shares(plan, space)
    if plan.pattern == LONG_ROW:
        return by_cols, by_rows
    return (min(by_rows, plan.programs), plan.splits) if plan.pattern == TEAM else (by_rows, 1)


def launched(plan: Plan, programs: tuple[int, int]) -> tuple[int, ...]:
    """In what order. A GPU starts programs in the order of their numbers, the first axis first, one on each multiprocessor
    in turn. Where those of a team come one after another, the programs of a multiprocessor are of several teams, and compute
    while others wait. In microseconds, and with as many of a team on it as the numbers happen to give: BatchNorm of 256 x 64
    x 112 x 112 forward and backward 256 and 413, 261 and 423; silu(x) * r -> LayerNorm at 16384 backward 362, 405; LayerNorm
    at 262144 149, 152; but where there are few on a multiprocessor, its backward 260 and 251, LayerNorm fp32 at 65536 148
    and 145."""
    if plan.pattern == HELD or (plan.pattern == TEAM and plan.per_unit >= MANY_A_UNIT):
        return programs[1], programs[0]
    return (1, *programs) if plan.pattern == TEAM else programs


def sum_tile(plan: Plan, problem: BackwardProblem) -> tuple[int, int]:
    """Rows and columns that these have at once; none where there are no such programs."""
    if plan.pattern != ROW_PATTERN or not problem.sums_by_columns or problem.cols_class > WIDEST_FEW:
        return 1, 0
    cols = min(8 * plan.warps, 32)
    return max(plan.warps * (512 if plan.warps < 8 else 256) // cols, 16), cols


def sum_programs(plan: Plan, space: Space, problem: BackwardProblem) -> int:
    """How many there are."""
    rows, cols = sum_tile(plan, problem)
    is_few = space.rows <= min(FEW_ROWS, FEW_STEPS * rows) and space.groups == 1
    return -(-space.cols // cols) if cols and is_few else 0


def lone_rows(plan: Plan) -> int:
    """Rows of one program of pattern `row`, backward, where there are such programs."""
    return min(plan.block_rows, max(1, plan.least // plan.block_cols)) if plan.warps == 1 else plan.block_rows


def row_programs(plan: Plan, space: Space, problem: BackwardProblem) -> int:
    """How many programs have rows, or how many teams, backward."""
    is_few = sum_programs(plan, space, problem) > 0
    return -(-space.rows // lone_rows(plan)) if is_few else backward(plan, space)[0]


def _shares(plan: Plan, space: Space) -> tuple[int, int]:
    """How many parts the rows come in, and the columns. Of every group, as many programs share the rows as keep the device
    busy; all groups have equally many."""
    group_rows = space.rows // space.groups
    blocks = -(-group_rows // plan.block_rows)
    if plan.pattern == ROW_PATTERN:
        blocks = max(min(blocks, MANY_PROGRAMS), -(-blocks // BLOCKS_A_PROGRAM))
    by_cols = -(-space.cols // plan.block_cols) if plan.pattern == LONG_ROW else plan.splits * plan.chunks
    programs = plan.programs // by_cols if plan.pattern == LONG_ROW else plan.programs
    return space.groups * max(1, min(programs // space.groups, blocks)), by_cols


class Spans(NamedTuple):
    """How many columns apart the parts of a line begin, of pattern `column`, and the blocks of one; how many columns it
    reaches over at the most."""

    part_cols: int
    step_cols: int
    span_cols: int


def spans(plan: Plan, space: Space) -> Spans:
    """Where as many programs share the columns as there are at the same time, their blocks take turns: memory is read in
    its order."""
    if plan.chunks:
        return Spans(plan.chunks * plan.block_cols, plan.block_cols, plan.chunks * plan.block_cols)
    return Spans(plan.block_cols, column_parts(plan, space) * plan.block_cols, space.cols)


def column_parts(plan: Plan, space: Space) -> int:
    if plan.chunks:
        return -(-space.cols // (plan.chunks * plan.block_cols))
    parts = max(1, plan.programs * plan.block_rows // max(space.rows, plan.block_rows))
    return min(parts, -(-space.cols // plan.block_cols))


class Layout(NamedTuple):
    """Of the units of pattern `column`. How far apart they are, in lines, and the blocks of lines in one; the same where
    lines are counted up to `limit`. How many blocks a unit has; in how many pieces its rows lie, how many of its lines apart
    these are, and how many rows it has."""

    unit_stride: int
    block_stride: int
    unit_step: int
    block_step: int
    limit: int
    blocks: int
    pieces: int
    inner: int
    rows: int


def layout(plan: Plan, space: Space) -> tuple[Layout, int]:
    """And how many units there are. Where all rows lie side by side in every piece, a unit is a block of them. Otherwise,
    pieces lying side by side, it is so many lines as are both whole rows and whole blocks."""
    block, pieces, inner = plan.block_rows, space.pieces, space.inner_rows
    if 1 < inner == space.rows // pieces:
        return Layout(block, inner, block, 0, inner, pieces, pieces, block, block), -(-inner // block)
    lines = lcm(pieces * inner, block)
    blocks = min(lines // block, -(-space.rows // block))
    rows = min(lines // pieces, space.statistics)
    return Layout(lines, block, lines, block, space.rows, blocks, pieces, inner, rows), -(-space.rows // lines)


class Order(NamedTuple):
    """In which order the tasks of pattern `column` are begun. Every unit has `unit_tiles` tiles and `merges` blocks of rows.
    All first tasks, then the merges, then the last ones, in a launch each, whose numbers go on from `start`. Or by turns,
    where `start` is -1: a turn has `round_tiles` first tasks, as many last ones, and merges; a unit has `unit_rounds` of
    the former. Merges come `merge_lag` turns later, the last tasks of the same tiles `lag` turns."""

    units: int
    unit_tiles: int
    merges: int
    start: int
    round_tiles: int
    unit_rounds: int
    merge_lag: int
    lag: int

    @property
    def is_by_turns(self) -> bool:
        return self.start < 0

    @property
    def launches(self) -> tuple[tuple["Order", int], ...]:
        """And how many programs each has."""
        if self.is_by_turns:
            turns = self.units * self.unit_rounds + self.lag
            return ((self, turns * (2 * self.round_tiles + self.merges)),)
        tiles, merges = self.units * self.unit_tiles, self.units * self.merges
        return (self, tiles), (self._replace(start=tiles), merges), (self._replace(start=tiles + merges), tiles)

    @property
    def divisors(self) -> tuple[int, int]:
        """What programs divide by."""
        if self.is_by_turns:
            return 2 * self.round_tiles + self.merges, self.unit_rounds
        return 1, self.units


ROUND_TILES = 128  # at the most
LARGEST_MERGE = 32  # pieces of a row that every program of the last tasks may merge itself


def order(plan: Plan, space: Space) -> Order:
    here, units = layout(plan, space)
    tiles = here.blocks * column_parts(plan, space)
    merges = -(-here.rows // merge_rows(plan))
    unit_rounds = -(-tiles // ROUND_TILES)
    round_tiles = -(-tiles // unit_rounds)
    merge_lag = -(-plan.ahead // round_tiles)
    lag = unit_rounds + 2 * merge_lag
    is_by_turns = not plan.is_apart and lag * round_tiles <= plan.held and lag < units * unit_rounds
    return Order(units, tiles, merges, -1 if is_by_turns else 0, round_tiles, unit_rounds, merge_lag, lag)


def reciprocal(divisor: int) -> tuple[int, int]:
    """(factor, shift), by which n // divisor is (2 n factor >> 32) >> shift, for every n below 2^31."""
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift


def reciprocals(here: Layout, order: Order) -> tuple[int, ...]:
    """Of what the programs of pattern `column` divide by, in the order in which they do."""
    divisors = (*order.divisors, here.blocks, here.pieces * here.inner, here.inner)
    return tuple(number for divisor in divisors for number in reciprocal(divisor))


def merge_rows(plan: Plan) -> int:
    """Rows of a unit that one program merges."""
    return min(plan.block_rows, 4)


def column(plan: Plan, last: Plan | None, space: Space, has_tasks: bool) -> list[tuple[Plan, Order, int]]:
    """The launches of pattern `column`, and how many programs each has; `last` is the plan of last tasks that have a kernel
    of their own. `has_tasks`: there is more to do than to store results."""
    here = order(plan, space)
    if not has_tasks:
        return [(plan, here, here.units * here.unit_tiles)]
    steps = [(plan, of_launch, programs) for of_launch, programs in here.launches]
    return steps if last is None else [*steps[: 1 if last.tasks == JOINT else 2], *column(last, None, space, False)]


def line_sum(plan: Plan, space: Space, gradient: Operand) -> Sum:
    """Of a gradient of a norm by channel: a sum over the columns of lines, and then over neighbouring axes of lines."""
    sizes = space.row_sizes
    kept = [stride.literal != 0 for stride in gradient.row_strides]
    inner = inner_lines(gradient)
    outer = kept.index(False) if inner < len(kept) else 0
    width, groups = prod(sizes[len(sizes) - inner :]), prod(sizes[:outer])
    parts = column_parts(plan, space) if plan.pattern == COLUMN_PATTERN else 1
    return Sum(groups, space.rows // (groups * width) * parts, width)


def left(plan: Plan, problem: BackwardProblem) -> tuple[int, ...]:
    """Which gradients leave partial sums behind, in the order in which the pattern `column` has them. Where programs wait
    for what they merge, that is as little as it must be: of BatchNorm fp32, by turns, backward would be a tenth slower."""
    return problem.left if plan.tasks != ALL or plan.pattern == HELD else (*problem.left, *problem.merged)


def gradient_sum(plan: Plan, space: Space, problem: BackwardProblem, which: int) -> Sum:
    """Of one of the gradients that are sums."""
    gradient = problem.gradients[which]
    return line_sum(plan, space, gradient) if problem.norm.is_by_channel else partial_sum(plan, space, gradient.axes)


def most_partial_rows(plan: Plan, problem: BackwardProblem) -> int:
    """A power of two: as many at the most do the programs of a plan of long rows leave for each column, unless there are
    more groups of rows."""
    by_cols = -(-problem.width // plan.block_cols) if plan.pattern == LONG_ROW else 1
    return 1 << (max(plan.programs // by_cols, 1) - 1).bit_length()


def partial_sum(plan: Plan, space: Space, axes: str) -> Sum:
    """Of a gradient along `axes`. Every part of the rows leaves one for each column; of a scalar also every part of the
    columns; of a row only the latter do."""
    by_rows, by_cols = _shares(plan, space)
    if axes == ROW:
        return Sum(1, by_cols, space.rows)
    groups = space.groups if axes in (GROUP, GROUP_SCALAR) else 1
    has_cols = axes in (COLUMN, GROUP)
    return Sum(groups, by_rows // groups * (1 if has_cols else by_cols), space.cols if has_cols else 1)
