"""Access pattern `row`: a tile of whole rows in the registers of one program, each element read once and written
once. Backward programs are persistent, and forward ones where the plan says so: they walk rows, the loads of the next
ones in flight (STAGES deep) while this one is reduced, and backward keeps the sums over rows in registers. Where
those would not fit, SPLITS programs share a row: each reads it whole for its sums (HBM serves it once, L2 the others)
and writes the gradients of its own BLOCK_COLS columns."""

import triton
import triton.language as tl

from warpnorm.kernels.statistics import (
    add_terms,
    gradient,
    load_statistics,
    normalize,
    row_statistics,
    start_walk,
    store_statistics,
    sum_terms,
)


@triton.jit
def row_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, IS_PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_COLS)
    col_mask = col_offsets < cols
    if IS_PERSISTENT:
        columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
        for block in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
            row_offsets = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            row_mask = row_offsets < rows
            mask = row_mask[:, None] & col_mask[None, :]
            values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
            c = PROLOGUE(values, columns)  # (BLOCK_ROWS, BLOCK_COLS)
            statistics = row_statistics(c, mask, cols, eps, IS_CENTERED, IS_CORRECTED)
            store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED)
            results = EPILOGUE(normalize(c, statistics, IS_CENTERED), values, columns)
            STORE(outputs, results, strides, sizes, row_offsets, col_offsets, mask)
    else:
        row_offsets = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = row_offsets < rows
        mask = row_mask[:, None] & col_mask[None, :]
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
        c = PROLOGUE(values, columns)
        statistics = row_statistics(c, mask, cols, eps, IS_CENTERED, IS_CORRECTED)
        store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED)
        results = EPILOGUE(normalize(c, statistics, IS_CENTERED), values, columns)
        STORE(outputs, results, strides, sizes, row_offsets, col_offsets, mask)


@triton.jit
def row_backward_kernel(
    operands, gradients, partials, statistic_ptrs, strides, sizes, rows, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr,
    PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_GRAD_C: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col_offsets = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = col_offsets < cols
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * ACCUMULATORS
    for block in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row_offsets = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = row_offsets < rows
        mask = row_mask[:, None] & col_mask[None, :]
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        statistics = load_statistics(statistic_ptrs, row_offsets, row_mask, IS_CENTERED)
        xhat = tl.where(mask, normalize(PROLOGUE(values, columns), statistics, IS_CENTERED), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, values, columns)
        grad_c = xhat
        if NEEDS_GRAD_C:
            state = add_terms(start_walk(xhat, IS_CENTERED), from_epilogue[0], xhat, IS_CENTERED)
            for other in tl.static_range(1, SPLITS):
                other_cols = ((tl.program_id(1) + other) % SPLITS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                other_mask = row_mask[:, None] & (other_cols < cols)[None, :]
                other_columns = LOAD_COLUMNS(operands, strides, sizes, other_cols, other_cols < cols)
                other_values = LOAD_ROWS(operands, strides, sizes, row_offsets, other_cols, row_mask, other_mask)
                other_c = PROLOGUE(other_values, other_columns)
                other_xhat = tl.where(other_mask, normalize(other_c, statistics, IS_CENTERED), 0.0)
                other_grads = EPILOGUE_VJP(other_xhat, other_values, other_columns)
                state = add_terms(state, other_grads[0], other_xhat, IS_CENTERED)
            grad_c = gradient(from_epilogue[0], xhat, sum_terms(state, IS_CENTERED), statistics, cols, IS_CENTERED)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        accumulators = ACCUMULATE(accumulators, results, mask)
    slot = program * SPLITS + tl.program_id(1)
    STORE_PARTIALS(partials, accumulators, program, slot, col_offsets, col_mask, cols)
