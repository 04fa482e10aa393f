"""Access pattern `row`: a tile of whole rows in the registers of one program, each element read once and written
once. Backward programs are persistent, and forward ones where the plan says so: they walk rows, the loads of the next
ones in flight (STAGES deep) while this one is reduced, and backward keeps the sums over rows in registers."""

import triton
import triton.language as tl

from warpnorm.kernels.masks import column_mask, rows_mask
from warpnorm.kernels.statistics import (
    average_statistics,
    gradient,
    load_statistics,
    normalize,
    row_statistics,
    store_statistics,
    sum_terms,
    terms,
)


@triton.jit
def forward_tile(
    block, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
    col_offsets, col_mask,
    LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
    IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, KEEPS_VARIANCE: tl.constexpr, HAS_RUNNING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row_offsets = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows_mask(row_offsets, rows)
    mask = row_mask[:, None] & col_mask[None, :]
    place = (row_offsets, col_offsets, cols, mask)
    values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
    c = PROLOGUE(values, columns, place)  # (BLOCK_ROWS, BLOCK_COLS)
    statistics = row_statistics(c, mask, cols, eps, IS_CENTERED, IS_CORRECTED)
    store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED, KEEPS_VARIANCE)
    if HAS_RUNNING:
        average_statistics(running_ptrs, statistics, row_offsets, row_mask, factors)
    results = EPILOGUE(normalize(c, statistics, IS_CENTERED), c, values, columns, place)
    STORE(outputs, results, strides, sizes, row_offsets, col_offsets, mask)


@triton.jit
def row_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, KEEPS_VARIANCE: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, IS_EXACT: tl.constexpr, IS_PERSISTENT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_COLS)
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    if IS_PERSISTENT:
        for block in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
            forward_tile(
                block, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
                col_offsets, col_mask, LOAD_ROWS, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, KEEPS_VARIANCE,
                HAS_RUNNING, BLOCK_ROWS,
            )  # fmt: skip
    else:
        forward_tile(
            program, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
            col_offsets, col_mask, LOAD_ROWS, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, KEEPS_VARIANCE,
            HAS_RUNNING, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit
def row_backward_kernel(
    operands, gradients, partials, statistic_ptrs, strides, sizes, rows, groups, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, ROW_NUMBERS: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_SUMS: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, IS_EXACT: tl.constexpr,
    RECOMPUTES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if HAS_GROUPS:
        shares = tl.num_programs(0) // groups  # programs that share the rows of a group
        group_rows = rows // groups
        first_row = (program // shares) * group_rows
    else:  # and the compiler knows what divides a block's first row
        shares = tl.num_programs(0)
        group_rows = rows
        first_row = 0
    col_offsets = tl.arange(0, BLOCK_COLS)
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * ACCUMULATORS
    for block in tl.range(program % shares, tl.cdiv(group_rows, BLOCK_ROWS), shares, num_stages=STAGES):
        row_in_group = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows_mask(row_in_group, group_rows)
        row_offsets = first_row + row_in_group
        mask = row_mask[:, None] & col_mask[None, :]
        numbers = ROW_NUMBERS(row_offsets, sizes, rows)
        place = (numbers, col_offsets, cols, mask)
        statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        c = PROLOGUE(values, columns, place)
        xhat = tl.where(mask, normalize(c, statistics, IS_CENTERED), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
        grad_c = xhat
        if NEEDS_SUMS:
            sums = sum_terms(terms(from_epilogue[0], xhat, IS_CENTERED), IS_CENTERED)
            if RECOMPUTES:
                values = HOLD(values)
                from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
            grad_c = gradient(from_epilogue[0], xhat, sums, statistics, cols, IS_CENTERED)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns, place)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        STORE_ROW_SUMS(partials, results, strides, sizes, row_offsets, row_mask, mask, 0, rows)
        accumulators = ACCUMULATE(accumulators, results, mask)
    STORE_PARTIALS(partials, accumulators, program, program, col_offsets, col_mask, cols)
