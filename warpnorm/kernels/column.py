"""Access pattern `column`: rows that lie in pieces, or side by side, so that memory runs across them: the norms by channel.
A line is a piece of a row, or all of it. A program has a tile: BLOCK_ROWS lines and `part_cols` of their columns, one block
of columns or many (IS_WALKED). The statistics of lines, then those of rows, then the results: three launches forward; the
sums, their sums over pieces, then the gradients backward. The last launch takes the tiles in the opposite order: what the
first one has read last is still in L2.

`pieces` lines make a row, every `inner_rows` lines one. What is summed next lies together: see `plan/grid.py`, `pieces`."""

import triton
import triton.language as tl

from warpnorm.kernels.masks import column_mask
from warpnorm.kernels.statistics import (
    add_terms,
    gradient,
    lane_counts,
    load_statistics,
    mean_of,
    merge_lanes,
    normalize,
    quick_step,
    reciprocal_sqrt,
    start_walk,
    sum_terms,
    tile_squares,
)


@triton.jit
def tile_place(tile, rows, cols, part_cols, BLOCK_ROWS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr):
    """Lines and part of their columns, neighbouring tiles side by side: line offsets, their mask, the part, its first column
    and the number of its columns."""
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    row_offsets = (tile % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tile // blocks
    first = (part * part_cols).to(cols.dtype)
    width = tl.minimum(cols - first, part_cols.to(cols.dtype))
    return row_offsets, column_mask(row_offsets, rows, HAS_FULL_BLOCKS), part, first, width


@triton.jit
def steps_of(width, BLOCK_COLS: tl.constexpr, IS_WALKED: tl.constexpr):
    """How many blocks of columns a tile has; the compiler should know where there is one, and need no loop."""
    if IS_WALKED:
        return tl.cdiv(width, BLOCK_COLS)
    else:
        return tl.minimum(tl.cdiv(width, BLOCK_COLS), 1)


@triton.jit
def last_tile(rows, cols, part_cols, BLOCK_ROWS: tl.constexpr):
    return tl.cdiv(rows, BLOCK_ROWS) * tl.cdiv(cols, part_cols) - 1


@triton.jit
def load_tile(
    operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """c, and all that the pointwise functions are called with."""
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    mask = row_mask[:, None] & col_mask[None, :]
    place = (row_offsets, col_offsets, cols, mask)
    values = LOAD_TILES(operands, strides, sizes, row_offsets, col_offsets, mask, lines)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    return PROLOGUE(values, columns, place), values, columns, place


@triton.jit
def row_of(lines, pieces, inner_rows, HAS_PIECES: tl.constexpr):
    """The row that each line is a piece of."""
    if HAS_PIECES:
        return lines // (pieces * inner_rows) * inner_rows + lines % inner_rows
    else:
        return lines


@triton.jit
def piece_offsets(lines, part, parts, inner_rows, HAS_PIECES: tl.constexpr):
    """Where the number of each line's part goes, beside those of the same row."""
    if HAS_PIECES:
        return (lines // inner_rows * parts + part) * inner_rows + lines % inner_rows
    else:  # inner_rows are all of them
        return part * inner_rows + lines


@triton.jit
def column_statistics_kernel(
    operands, piece_ptrs, strides, sizes, rows, inner_rows, cols, part_cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_WALKED: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_CORRECTED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets, row_mask, part, first, width = tile_place(
        tl.program_id(0).to(tl.int64), rows, cols, part_cols, BLOCK_ROWS, HAS_FULL_BLOCKS
    )
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    lanes = tl.arange(0, BLOCK_COLS)
    if IS_WALKED:
        # Deviations from a value of the line: the means of lanes are rounded as often as they are moved
        pivot = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines, first + tl.arange(0, 1), cols,
            LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT,
        )[0]  # fmt: skip
        state = start_walk(tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE), True)
        for step in tl.range(0, tl.cdiv(width, BLOCK_COLS), num_stages=STAGES):
            col_offsets = first + step * BLOCK_COLS + lanes
            c, _values, _columns, _place = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT,
            )  # fmt: skip
            # lines that are not there are not stored either
            state = quick_step(state, c - pivot, column_mask(col_offsets, cols, IS_EXACT)[None, :], step)
        mean, squares = merge_lanes(state, lane_counts(lanes, width, BLOCK_COLS, COMPUTE), width)
        mean += tl.sum(pivot, 1)
    else:
        c, _values, _columns, place = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines, first + lanes, cols,
            LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        mean, squares = tile_squares(c, place[3], width, IS_CORRECTED)
    offsets = piece_offsets(row_offsets, part, tl.cdiv(cols, part_cols), inner_rows, HAS_PIECES)
    tl.store(piece_ptrs[0] + offsets, mean, mask=row_mask)
    tl.store(piece_ptrs[1] + offsets, squares, mask=row_mask)


@triton.jit
def column_merge_kernel(
    piece_ptrs, statistic_ptrs, rows, pieces, inner_rows, cols, part_cols, eps,
    COMPUTE: tl.constexpr, STATISTICS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The statistics of rows from those of their pieces, by Chan's formula: block by block in lanes, then the lanes."""
    row_offsets = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row_offsets < rows
    parts = tl.cdiv(cols, part_cols).to(tl.int32)
    height = pieces.to(tl.int32) * parts
    start = row_offsets // inner_rows * height * inner_rows + row_offsets % inner_rows
    mean = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    total = tl.zeros((1, BLOCK_COLS), COMPUTE)
    for first in tl.range(0, height, BLOCK_COLS):
        items = first + tl.arange(0, BLOCK_COLS)
        is_there = items < height
        mask = row_mask[:, None] & is_there[None, :]
        offsets = start[:, None] + (items * inner_rows)[None, :]
        widths = tl.minimum(cols - (items % parts) * part_cols, part_cols)  # of the part of a piece that an item is
        count = tl.where(is_there, widths, 0).to(COMPUTE)[None, :]
        total += count
        ratio = tl.where(is_there[None, :], count / tl.where(is_there[None, :], total, 1.0), 0.0)
        delta = tl.load(piece_ptrs[0] + offsets, mask=mask, other=0.0) - mean
        squares += tl.load(piece_ptrs[1] + offsets, mask=mask, other=0.0)
        squares += tl.where(mask, delta * delta * ((total - count) * ratio), 0.0)
        mean += tl.where(mask, delta * ratio, 0.0)
    merged, merged_squares = merge_lanes((mean, squares), total, cols * pieces)
    variance = mean_of(merged_squares, cols * pieces)
    tl.store(statistic_ptrs[0] + row_offsets, merged, mask=row_mask)
    tl.store(statistic_ptrs[1] + row_offsets, reciprocal_sqrt(variance + eps), mask=row_mask)
    if STATISTICS > 2:
        tl.store(statistic_ptrs[2] + row_offsets, variance, mask=row_mask)


@triton.jit
def column_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, pieces, inner_rows, cols, part_cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, HAS_STATISTIC: tl.constexpr,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets, row_mask, _part, first, width = tile_place(
        last_tile(rows, cols, part_cols, BLOCK_ROWS) - tl.program_id(0),
        rows,
        cols,
        part_cols,
        BLOCK_ROWS,
        HAS_FULL_BLOCKS,
    )
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    if HAS_STATISTIC:
        statistics = load_statistics(
            statistic_ptrs, row_of(row_offsets, pieces, inner_rows, HAS_PIECES), row_mask, True
        )
    for step in tl.range(0, steps_of(width, BLOCK_COLS, IS_WALKED), num_stages=STAGES):
        col_offsets = first + step * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        c, values, columns, place = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
            LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        xhat = c
        if HAS_STATISTIC:
            xhat = normalize(c, statistics, True)
        results = EPILOGUE(xhat, c, values, columns, place)
        STORE(outputs, results, strides, sizes, row_offsets, col_offsets, place[3])


@triton.jit
def column_sums_kernel(
    operands, piece_ptrs, statistic_ptrs, strides, sizes, rows, pieces, inner_rows, cols, part_cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets, row_mask, part, first, width = tile_place(
        tl.program_id(0).to(tl.int64), rows, cols, part_cols, BLOCK_ROWS, HAS_FULL_BLOCKS
    )
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    statistics = load_statistics(statistic_ptrs, row_of(row_offsets, pieces, inner_rows, HAS_PIECES), row_mask, True)
    state = start_walk(tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE), True)
    for step in tl.range(0, steps_of(width, BLOCK_COLS, IS_WALKED), num_stages=STAGES):
        c, values, columns, place = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines,
            first + step * BLOCK_COLS + tl.arange(0, BLOCK_COLS), cols, LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        xhat = tl.where(place[3], normalize(c, statistics, True), 0.0)
        state = add_terms(state, EPILOGUE_VJP(xhat, c, values, columns, place)[0], xhat, True)
    sums = sum_terms(state, True)
    offsets = piece_offsets(row_offsets, part, tl.cdiv(cols, part_cols), inner_rows, HAS_PIECES)
    tl.store(piece_ptrs[0] + offsets, sums[0], mask=row_mask)
    tl.store(piece_ptrs[1] + offsets, sums[1], mask=row_mask)


@triton.jit
def column_backward_kernel(
    operands, gradients, partials, sum_ptrs, statistic_ptrs, strides, sizes, rows, pieces, inner_rows, cols, part_cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    ACCUMULATE_LINES: tl.constexpr, STORE_LINES: tl.constexpr,
    REDUCED: tl.constexpr, NEEDS_SUMS: tl.constexpr, HAS_STATISTIC: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets, row_mask, part, first, width = tile_place(
        last_tile(rows, cols, part_cols, BLOCK_ROWS) - tl.program_id(0),
        rows,
        cols,
        part_cols,
        BLOCK_ROWS,
        HAS_FULL_BLOCKS,
    )
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    row_numbers = row_of(row_offsets, pieces, inner_rows, HAS_PIECES)
    if HAS_STATISTIC:
        statistics = load_statistics(statistic_ptrs, row_numbers, row_mask, True)
        if NEEDS_SUMS:
            sums = load_statistics(sum_ptrs, row_numbers, row_mask, True)
    accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * REDUCED
    for step in tl.range(0, steps_of(width, BLOCK_COLS, IS_WALKED), num_stages=STAGES):
        col_offsets = first + step * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        c, values, columns, place = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
            LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        mask = place[3]
        xhat = c
        if HAS_STATISTIC:
            xhat = normalize(c, statistics, True)
        xhat = tl.where(mask, xhat, 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
        grad_c = xhat
        if NEEDS_SUMS:
            grad_c = from_epilogue[0]
            if HAS_STATISTIC:
                grad_c = gradient(grad_c, xhat, sums, statistics, pieces * cols, True)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns, place)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        accumulators = ACCUMULATE_LINES(accumulators, results, mask)
    STORE_LINES(partials, accumulators, sizes, row_offsets, row_mask, part, tl.cdiv(cols, part_cols), rows)
