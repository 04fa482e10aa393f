"""Of pattern `column`: which task a program has, and where its tile lies. See `plan/grid.py` for `order` and `layout`."""

import triton
import triton.language as tl

from warpnorm.kernels.masks import column_mask

NOTHING, FIRST, MERGE, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def quotient(number, divisor, factor, shift):
    """number // divisor, by a multiplication where both have 31 bits: see `plan/grid.py`, `reciprocal`."""
    if number.dtype == tl.int64:
        return number // divisor
    else:
        return (tl.umulhi(number.to(tl.uint32) * 2, factor.to(tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def task_of(order, reciprocals, BY_UNITS: tl.constexpr):
    """This program's task, the unit, and which of its tiles, or of its blocks of rows to merge."""
    units, unit_tiles, merges, start, round_tiles, unit_rounds, merge_lag, lag = order
    if start < 0:  # both tasks of tiles by turns
        width = 2 * round_tiles + merges
        turn = quotient(tl.program_id(0), width, reciprocals[0], reciprocals[1])
        place = tl.program_id(0) - turn * width
        is_merge = place >= 2 * round_tiles
        is_last = place % 2 == 1
        round = turn - tl.where(is_merge, merge_lag, tl.where(is_last, lag, 0))
        unit = quotient(round, unit_rounds, reciprocals[2], reciprocals[3])
        step = round - unit * unit_rounds
        number = tl.where(is_merge, place - 2 * round_tiles, step * round_tiles + place // 2)
        is_there = (round >= 0) & (unit < units)
        is_there = is_there & tl.where(is_merge, step == unit_rounds - 1, number < unit_tiles)
    else:  # one after the other, and back to front, side by side
        program = tl.program_id(0) + start
        tiles = units * unit_tiles
        before = tiles + units * merges
        is_last = program >= before
        is_merge = (program >= tiles) & (program < before)
        index = tl.where(is_last, before + tiles - 1 - program, program - tl.where(is_merge, tiles, 0))
        number = quotient(index, units, reciprocals[2], reciprocals[3])
        unit = index - number * units
        if BY_UNITS:
            unit = tl.where(is_merge, unit, index // unit_tiles)
            number = tl.where(is_merge, number, index % unit_tiles)
        is_there = program >= 0
    task = tl.where(is_merge, MERGE, tl.where(is_last, LAST, FIRST))
    return tl.where(is_there, task, NOTHING), unit, number


@triton.jit
def tile_of(order, BY_UNITS: tl.constexpr):
    """The same of a launch of last tasks alone, back to front: what was read last is still in L2."""
    units, unit_tiles = order[0], order[1]
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    if BY_UNITS:
        return index // unit_tiles, index % unit_tiles
    else:
        return index % units, index // units


@triton.jit
def part_of(part, cols, spans, block_cols, IS_WALKED: tl.constexpr):
    """Of parts of the columns: the first column, the number of blocks, and of columns."""
    part_cols, step_cols, span_cols = spans
    first = part * part_cols
    span = tl.minimum(cols - first, span_cols)
    if IS_WALKED:
        steps = tl.cdiv(span, step_cols)
        return first, steps, (steps - 1) * block_cols + tl.minimum(span - (steps - 1) * step_cols, block_cols)
    else:
        return first, 1, span


@triton.jit
def tile_place(
    unit, number, rows, layout, reciprocals, cols, spans,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr,
    IS_WALKED: tl.constexpr,
):  # fmt: skip
    """Of a tile: line offsets and their mask, the rows that these are pieces of, or the only one, the part of the columns,
    the first of them, in how many blocks they are, and their number; and whether there is any line."""
    unit_stride, block_stride, unit_step, block_step, limit, blocks, pieces, inner, unit_rows = layout
    part = quotient(number, blocks.to(tl.int32), reciprocals[4], reciprocals[5])
    block = number.to(rows.dtype) - part * blocks
    unit = unit.to(rows.dtype)
    lanes = tl.arange(0, BLOCK_ROWS)
    row_offsets = unit * unit_stride + block * block_stride + lanes
    inside = unit * unit_step + block * block_step
    line = block * BLOCK_ROWS
    if BLOCK_ROWS > 1:
        line += lanes
    row_numbers = unit * unit_rows + line
    if HAS_PIECES:
        outer = quotient(line, pieces * inner, reciprocals[6], reciprocals[7])
        within = line - quotient(line, inner, reciprocals[8], reciprocals[9]) * inner
        row_numbers = unit * unit_rows + outer * inner + within
    first, steps, width = part_of(part, cols, spans, BLOCK_COLS, IS_WALKED)
    mask = column_mask(inside + lanes, limit, HAS_FULL_BLOCKS)
    return row_offsets, mask, row_numbers, part, first, steps, width, inside < limit
