"""Access pattern `row`: a tile of whole rows in the registers of one program, each element read once and written
once. Backward programs are persistent, and forward ones where the plan says so: they walk rows, the loads of the next
ones in flight (STAGES deep) while this one is reduced, and backward keeps the sums over rows in registers. Where
those would not fit, SPLITS programs share a row: each reads it whole for its sums (HBM serves it once, L2 the others)
and writes the gradients of its own BLOCK_COLS columns. A team of them (`team.py`) exchanges the sums instead."""

import triton
import triton.language as tl

from warpnorm.kernels.masks import column_mask, rows_mask
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
from warpnorm.kernels.team import exchange, last_exchange


@triton.jit
def forward_tile(
    block, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, col_offsets, col_mask,
    LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
    IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row_offsets = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows_mask(row_offsets, rows)
    mask = row_mask[:, None] & col_mask[None, :]
    place = (row_offsets, col_offsets, cols, mask)
    values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
    c = PROLOGUE(values, columns, place)  # (BLOCK_ROWS, BLOCK_COLS)
    statistics = row_statistics(c, mask, cols, eps, IS_CENTERED, IS_CORRECTED)
    store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED)
    results = EPILOGUE(normalize(c, statistics, IS_CENTERED), c, values, columns, place)
    STORE(outputs, results, strides, sizes, row_offsets, col_offsets, mask)


@triton.jit
def row_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr,
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
                block, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, col_offsets, col_mask,
                LOAD_ROWS, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, BLOCK_ROWS,
            )  # fmt: skip
    else:
        forward_tile(
            program, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, col_offsets, col_mask,
            LOAD_ROWS, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit
def row_backward_kernel(
    operands, gradients, partials, mailbox, statistic_ptrs, strides, sizes, rows, groups, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, ROW_NUMBERS: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_SUMS: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, IS_EXACT: tl.constexpr, SPLITS: tl.constexpr,
    IS_TEAM: tl.constexpr, RECOMPUTES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    shares = tl.num_programs(0) // groups  # programs that share the rows of a group
    group_rows = rows // groups
    first_row = (program // shares) * group_rows
    col_offsets = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * ACCUMULATORS
    if IS_TEAM:
        exchanges = last_exchange(mailbox, SPLITS)
    for block in tl.range(program % shares, tl.cdiv(group_rows, BLOCK_ROWS), shares, num_stages=STAGES):
        row_in_group = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows_mask(row_in_group, group_rows)
        row_offsets = first_row + row_in_group
        mask = row_mask[:, None] & col_mask[None, :]
        numbers = ROW_NUMBERS(row_offsets, sizes, rows)
        place = (numbers, col_offsets, cols, mask)
        statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
        state = start_walk(tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE), IS_CENTERED)
        if NEEDS_SUMS:  # the columns of others first: nothing of them is kept but their terms
            for other in tl.static_range(1, 1 if IS_TEAM else SPLITS):
                other_cols = ((tl.program_id(1) + other) % SPLITS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                other_col_mask = column_mask(other_cols, cols, IS_EXACT)
                other_mask = row_mask[:, None] & other_col_mask[None, :]
                other_place = (numbers, other_cols, cols, other_mask)
                other_columns = LOAD_COLUMNS(operands, strides, sizes, other_cols, other_col_mask)
                other_values = LOAD_ROWS(operands, strides, sizes, row_offsets, other_cols, row_mask, other_mask)
                other_c = PROLOGUE(other_values, other_columns, other_place)
                other_xhat = tl.where(other_mask, normalize(other_c, statistics, IS_CENTERED), 0.0)
                other_grads = EPILOGUE_VJP(other_xhat, other_c, other_values, other_columns, other_place)
                state = add_terms(state, other_grads[0], other_xhat, IS_CENTERED)
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        c = PROLOGUE(values, columns, place)
        xhat = tl.where(mask, normalize(c, statistics, IS_CENTERED), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
        grad_c = xhat
        if NEEDS_SUMS:
            state = add_terms(state, from_epilogue[0], xhat, IS_CENTERED)
            sums = sum_terms(state, IS_CENTERED)
            if IS_TEAM:
                number = exchanges + 1 + (block // shares).to(tl.int32)
                sums = exchange(sums, mailbox, number, SPLITS, IS_CENTERED)
            if RECOMPUTES:
                values = HOLD(values)
                from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
            grad_c = gradient(from_epilogue[0], xhat, sums, statistics, cols, IS_CENTERED)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns, place)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        STORE_ROW_SUMS(partials, results, strides, sizes, row_offsets, row_mask, mask, tl.program_id(1), rows)
        accumulators = ACCUMULATE(accumulators, results, mask)
    slot = program * SPLITS + tl.program_id(1)
    STORE_PARTIALS(partials, accumulators, program, slot, col_offsets, col_mask, cols)
