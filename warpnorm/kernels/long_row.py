"""Access pattern `long_row`: rows of any width, walked by blocks of columns, once for their sums and once for their
results; the second walk of forward finds the row in L2. Backward takes two launches: the sums, one program a row;
then the gradients, one program for a block of columns and a share of the rows, so that sums over rows stay in
registers."""

import triton
import triton.language as tl

from warpnorm.kernels.chain import let_next_begin
from warpnorm.kernels.masks import column_mask, rows_mask
from warpnorm.kernels.statistics import (
    add_terms,
    end_walk,
    gradient,
    load_statistics,
    normalize,
    start_walk,
    step_walk,
    store_statistics,
    sum_terms,
)


@triton.jit
def load_block(
    operands, strides, sizes, row_offsets, numbers, row_mask, col_offsets, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """c, and all that the pointwise functions are called with, for one block of columns."""
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    mask = row_mask[:, None] & col_mask[None, :]
    place = (numbers, col_offsets, cols, mask)
    values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    return PROLOGUE(values, columns, place), values, columns, place


@triton.jit
def long_row_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr, IS_EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets = tl.program_id(0).to(rows.dtype) + tl.arange(0, 1)
    row_mask = row_offsets < rows  # always, but as a constant it makes ptxas spill 16 bytes on sm_80
    lanes = tl.arange(0, BLOCK_COLS)
    state = start_walk(tl.zeros((1, BLOCK_COLS), COMPUTE), IS_CENTERED)
    for step in tl.range(0, tl.cdiv(cols, BLOCK_COLS), num_stages=STAGES):
        c, values, columns, place = load_block(
            operands, strides, sizes, row_offsets, row_offsets, row_mask, step * BLOCK_COLS + lanes, cols,
            LOAD_COLUMNS, LOAD_ROWS, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        state = step_walk(state, c, place[3], step, IS_CENTERED)
    statistics = end_walk(state, lanes, cols, eps, IS_CENTERED, BLOCK_COLS)
    store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED)
    for step in tl.range(0, tl.cdiv(cols, BLOCK_COLS), num_stages=STAGES):
        col_offsets = step * BLOCK_COLS + lanes
        c, values, columns, place = load_block(
            operands, strides, sizes, row_offsets, row_offsets, row_mask, col_offsets, cols,
            LOAD_COLUMNS, LOAD_ROWS, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        results = EPILOGUE(normalize(c, statistics, IS_CENTERED), c, values, columns, place)
        STORE(outputs, results, strides, sizes, row_offsets, col_offsets, place[3])


@triton.jit
def long_row_sums_kernel(
    operands, sum_ptrs, statistic_ptrs, strides, sizes, rows, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr,
    IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets = tl.program_id(0).to(rows.dtype) + tl.arange(0, 1)
    row_mask = rows_mask(row_offsets, rows)
    numbers = ROW_NUMBERS(row_offsets, sizes, rows)
    lanes = tl.arange(0, BLOCK_COLS)
    statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
    state = start_walk(tl.zeros((1, BLOCK_COLS), COMPUTE), IS_CENTERED)
    for step in tl.range(0, tl.cdiv(cols, BLOCK_COLS), num_stages=STAGES):
        c, values, columns, place = load_block(
            operands, strides, sizes, row_offsets, numbers, row_mask, step * BLOCK_COLS + lanes, cols,
            LOAD_COLUMNS, LOAD_ROWS, PROLOGUE, IS_EXACT,
        )  # fmt: skip
        xhat = tl.where(place[3], normalize(c, statistics, IS_CENTERED), 0.0)
        state = add_terms(state, EPILOGUE_VJP(xhat, c, values, columns, place)[0], xhat, IS_CENTERED)
    store_statistics(sum_ptrs, sum_terms(state, IS_CENTERED), row_offsets, row_mask, IS_CENTERED)


@triton.jit
def long_row_backward_kernel(
    operands, gradients, partials, sum_ptrs, statistic_ptrs, strides, sizes, rows, groups, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr, STORE_ROW_SUMS: tl.constexpr,
    ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_SUMS: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr, IS_EXACT: tl.constexpr, STAGES: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    shares = tl.num_programs(1) // groups  # programs that share the rows of a group
    group_rows = rows // groups
    first_row = (program // shares) * group_rows
    col_offsets = tl.program_id(0).to(cols.dtype) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    accumulators = (tl.zeros((1, BLOCK_COLS), COMPUTE),) * ACCUMULATORS
    for row in tl.range(program % shares, group_rows, shares, num_stages=STAGES):
        row_offsets = first_row + row + tl.arange(0, 1)
        row_mask = rows_mask(row_offsets, rows)
        mask = row_mask[:, None] & col_mask[None, :]
        numbers = ROW_NUMBERS(row_offsets, sizes, rows)
        place = (numbers, col_offsets, cols, mask)
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
        c = PROLOGUE(values, columns, place)
        xhat = tl.where(mask, normalize(c, statistics, IS_CENTERED), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
        grad_c = xhat
        if NEEDS_SUMS:
            sums = load_statistics(sum_ptrs, row_offsets, row_mask, IS_CENTERED)
            grad_c = gradient(from_epilogue[0], xhat, sums, statistics, cols, IS_CENTERED)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns, place)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        STORE_ROW_SUMS(partials, results, strides, sizes, row_offsets, row_mask, mask, tl.program_id(0), rows)
        accumulators = ACCUMULATE(accumulators, results, mask)
    let_next_begin(HAS_NEXT)
    slot = program * tl.num_programs(0) + tl.program_id(0)
    STORE_PARTIALS(partials, accumulators, program, slot, col_offsets, col_mask, cols)
