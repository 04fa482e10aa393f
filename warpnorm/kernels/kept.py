"""Access pattern `kept`: lines side by side, so that memory runs across them, as of pattern `column`, whose tasks these are.
But all programs run at the same time, and each has one tile of a unit at a time, from its first task to its last: the last
SLOTS blocks of its walk stay in shared memory in between (`slots.py`), and are not read again. Between them some programs
merge what all have found, and everybody waits for that. Where a unit has no more blocks than its programs have slots, it is
read once, and there are teams of programs for several units."""

import triton
import triton.language as tl

from warpnorm.kernels.column import line_statistics, line_sums, send_lines, write_gradients, write_tile
from warpnorm.kernels.merge import merge_statistics, merge_sums
from warpnorm.kernels.statistics import load_statistics
from warpnorm.kernels.tasks import tile_place
from warpnorm.kernels.words import for_lines, mask_of_rows


@triton.jit
def kept_forward_kernel(
    operands, outputs, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, statistics, layout, order,
    reciprocals, cols, spans, first_tasks, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, KEEP: tl.constexpr,
    RECALL: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
    STATISTICS: tl.constexpr, HAS_RUNNING: tl.constexpr, COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr,
    HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_CORRECTED: tl.constexpr, AT_ONCE: tl.constexpr,
    WAITS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    for turn in tl.range(0, tl.cdiv(order[0] - tl.program_id(0), tl.num_programs(0))):
        unit = tl.program_id(0) + turn * tl.num_programs(0)
        row_offsets, row_mask, _row_numbers, _part, first, steps, width, is_there = tile_place(
            unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS, HAS_FULL_BLOCKS, True,
        )  # fmt: skip
        if is_there:
            found = line_statistics(
                operands, strides, sizes, row_offsets, row_mask, first, steps, width, cols, spans,
                LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, COMPUTE, BLOCK_ROWS, BLOCK_COLS, True, IS_EXACT,
                IS_CORRECTED, STATISTICS == 3, 1, "evict_last", AT_ONCE, SLOTS, KEEP,
            )  # fmt: skip
            send_lines(piece_ptrs, unit, number, order, found, row_mask, 3 if IS_CORRECTED else 2, BLOCK_ROWS)
        for block in tl.range(0, tl.cdiv(order[2] - number, tl.num_programs(1))):
            merge_statistics(
                piece_ptrs, row_ptrs, statistic_ptrs, running_ptrs, factors, unit, number + block * tl.num_programs(1),
                statistics, first_tasks, layout, cols, eps,
                STATISTICS, HAS_RUNNING, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_ROWS, MERGE_COLS, IS_CORRECTED, True,
            )  # fmt: skip
        write_tile(
            unit, number, operands, outputs, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order,
            reciprocals, cols, spans, first_tasks, eps, running_ptrs, factors,
            LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE, STORE, True, STATISTICS, HAS_RUNNING,
            COMPUTE, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_CORRECTED, True,
            1, WAITS, False, AT_ONCE, SLOTS, RECALL,
        )  # fmt: skip


@triton.jit
def kept_backward_kernel(
    operands, gradients, merged_ptrs, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, statistics,
    layout, order, reciprocals, cols, spans, first_tasks,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, KEEP: tl.constexpr,
    RECALL: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr,
    STORE: tl.constexpr, ADD_FIRST: tl.constexpr, SETTLE: tl.constexpr, STORE_MERGED: tl.constexpr,
    STORE_FIRST: tl.constexpr, ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr,
    FIRST_SUMS: tl.constexpr, LAST_SUMS: tl.constexpr, MERGED: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    AT_ONCE: tl.constexpr, WAITS: tl.constexpr, IS_LINEAR: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    HAS_ONE: tl.constexpr = BLOCK_ROWS == 1
    number = tl.program_id(1)
    for turn in tl.range(0, tl.cdiv(order[0] - tl.program_id(0), tl.num_programs(0))):
        unit = tl.program_id(0) + turn * tl.num_programs(0)
        row_offsets, row_mask, row_numbers, part, first, steps, _width, is_there = tile_place(
            unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS, HAS_FULL_BLOCKS, True,
        )  # fmt: skip
        if is_there:
            is_row = mask_of_rows(row_mask, HAS_ONE)
            pair = for_lines(load_statistics(statistic_ptrs, row_numbers, is_row, True), HAS_ONE)
            terms, merged, left = line_sums(
                operands, strides, sizes, row_offsets, row_mask, pair, first, steps, cols, spans,
                LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, ADD_FIRST, SETTLE, FIRST_SUMS,
                COMPUTE, BLOCK_ROWS, BLOCK_COLS, IS_EXACT, IS_LINEAR, 1, "evict_last", AT_ONCE, SLOTS, KEEP,
            )  # fmt: skip
            send_lines(piece_ptrs, unit, number, order, terms + merged, row_mask, 2 + MERGED, BLOCK_ROWS)
            STORE_FIRST(partials, left, sizes, row_offsets, row_mask, part, order[1] // layout[5], rows)
        for block in tl.range(0, tl.cdiv(order[2] - number, tl.num_programs(1))):
            merge_sums(
                merged_ptrs, piece_ptrs, row_ptrs, unit, number + block * tl.num_programs(1), statistics, first_tasks,
                layout, cols,
                STORE_MERGED, MERGED, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_ROWS, MERGE_COLS, True,
            )  # fmt: skip
        write_gradients(
            unit, number, operands, gradients, merged_ptrs, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes,
            rows, layout, order, reciprocals, cols, spans, first_tasks,
            LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
            STORE_MERGED, ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, MERGED, True, True, COMPUTE, HAS_PIECES,
            BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, HAS_FULL_BLOCKS, IS_EXACT, True, 1, WAITS, IS_LINEAR, False,
            AT_ONCE, SLOTS, RECALL,
        )  # fmt: skip
