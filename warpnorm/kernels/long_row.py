"""Access pattern `long_row`: rows of any width, walked by blocks of columns, once for their sums and once for their
results; the second walk of forward finds the row in L2. Backward takes two launches: the sums, one program a row;
then the gradients, one program for a block of columns and a share of the rows, so that sums over rows stay in
registers."""

import triton
import triton.language as tl

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
def long_row_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    row_mask = row_offsets < rows
    lanes = tl.arange(0, BLOCK_COLS)
    state = start_walk(tl.zeros((1, BLOCK_COLS), COMPUTE), IS_CENTERED)
    for step in tl.range(0, tl.cdiv(cols, BLOCK_COLS), num_stages=STAGES):
        col_offsets = step * BLOCK_COLS + lanes
        col_mask = col_offsets < cols
        mask = row_mask[:, None] & col_mask[None, :]
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
        state = step_walk(state, PROLOGUE(values, columns), mask, step, IS_CENTERED)
    statistics = end_walk(state, lanes, cols, eps, IS_CENTERED, BLOCK_COLS)
    store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED)
    for step in tl.range(0, tl.cdiv(cols, BLOCK_COLS), num_stages=STAGES):
        col_offsets = step * BLOCK_COLS + lanes
        col_mask = col_offsets < cols
        mask = row_mask[:, None] & col_mask[None, :]
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
        xhat = normalize(PROLOGUE(values, columns), statistics, IS_CENTERED)
        STORE(outputs, EPILOGUE(xhat, values, columns), strides, sizes, row_offsets, col_offsets, mask)


@triton.jit
def long_row_sums_kernel(
    operands, sum_ptrs, statistic_ptrs, strides, sizes, rows, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr,
    IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_offsets = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    row_mask = row_offsets < rows
    lanes = tl.arange(0, BLOCK_COLS)
    statistics = load_statistics(statistic_ptrs, row_offsets, row_mask, IS_CENTERED)
    state = start_walk(tl.zeros((1, BLOCK_COLS), COMPUTE), IS_CENTERED)
    for step in tl.range(0, tl.cdiv(cols, BLOCK_COLS), num_stages=STAGES):
        col_offsets = step * BLOCK_COLS + lanes
        col_mask = col_offsets < cols
        mask = row_mask[:, None] & col_mask[None, :]
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
        xhat = tl.where(mask, normalize(PROLOGUE(values, columns), statistics, IS_CENTERED), 0.0)
        state = add_terms(state, EPILOGUE_VJP(xhat, values, columns)[0], xhat, IS_CENTERED)
    store_statistics(sum_ptrs, sum_terms(state, IS_CENTERED), row_offsets, row_mask, IS_CENTERED)


@triton.jit
def long_row_backward_kernel(
    operands, gradients, partials, sum_ptrs, statistic_ptrs, strides, sizes, rows, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr,
    PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_GRAD_C: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    col_offsets = tl.program_id(0).to(cols.dtype) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = col_offsets < cols
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    accumulators = (tl.zeros((1, BLOCK_COLS), COMPUTE),) * ACCUMULATORS
    for row in tl.range(share, rows, tl.num_programs(1), num_stages=STAGES):
        row_offsets = row + tl.arange(0, 1)
        row_mask = row_offsets < rows
        mask = row_mask[:, None] & col_mask[None, :]
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        statistics = load_statistics(statistic_ptrs, row_offsets, row_mask, IS_CENTERED)
        xhat = tl.where(mask, normalize(PROLOGUE(values, columns), statistics, IS_CENTERED), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, values, columns)
        grad_c = xhat
        if NEEDS_GRAD_C:
            sums = load_statistics(sum_ptrs, row_offsets, row_mask, IS_CENTERED)
            grad_c = gradient(from_epilogue[0], xhat, sums, statistics, cols, IS_CENTERED)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        accumulators = ACCUMULATE(accumulators, results, mask)
    slot = share * tl.num_programs(0) + tl.program_id(0)
    STORE_PARTIALS(partials, accumulators, share, slot, col_offsets, col_mask, cols)
