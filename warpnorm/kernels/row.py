"""Access pattern `row`: a tile of whole rows in the registers of one program, each element read once and written
once; a row is CHUNKS blocks of columns, for widths that are not a power of two. Backward programs are persistent, and
forward ones where the plan says so: they walk rows, the loads of the next ones in flight (STAGES deep) while this one is
reduced, and backward keeps the sums over rows in registers."""

import triton
import triton.language as tl

from warpnorm.kernels.blocks import compute_row, hold_row, load_columns, load_rows
from warpnorm.kernels.chain import begin, let_next_begin
from warpnorm.kernels.few_rows import sum_columns
from warpnorm.kernels.masks import block_columns, rows_mask
from warpnorm.kernels.statistics import (
    add_terms,
    average_statistics,
    centered_statistics,
    gradient,
    load_statistics,
    mean_and_squares,
    mean_of,
    normalize,
    reciprocal_sqrt,
    row_mean,
    store_statistics,
    sum_terms,
    terms,
)

MOST_MIXED = tl.constexpr(2048)  # columns


@triton.jit
def forward_tile(
    block, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, KEEPS_VARIANCE: tl.constexpr,
    HAS_RUNNING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_LATE: tl.constexpr, RECOMPUTES: tl.constexpr,
    IS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    row_offsets = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows_mask(row_offsets, rows)
    values, places = load_rows(
        0, row_offsets, row_mask, row_offsets, operands, strides, sizes, cols, LOAD_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS,
    )  # fmt: skip
    row = compute_row(values, columns, places, PROLOGUE, CHUNKS)
    if IS_AT_ONCE:
        mean, squares = mean_and_squares(row, places, row_mask, CHUNKS, CHUNKS)
        variance = mean_of(squares, cols, BLOCK_COLS * CHUNKS)
        statistics = (mean, reciprocal_sqrt(variance + eps), variance)
    elif IS_CENTERED:
        mean = row_mean(row, places, cols, True, CHUNKS, IS_EXACT, IS_CORRECTED)
        if RECOMPUTES:
            values = hold_row(values, HOLD, CHUNKS)
            row = compute_row(values, columns, places, PROLOGUE, CHUNKS)
        statistics = centered_statistics(row, mean, places, cols, eps, IS_CORRECTED, CHUNKS, IS_EXACT, KEEPS_VARIANCE)
    else:
        statistics = (reciprocal_sqrt(row_mean(row, places, cols, False, CHUNKS, IS_EXACT, IS_CORRECTED) + eps),)
    store_statistics(statistic_ptrs, statistics, row_offsets, row_mask, IS_CENTERED, KEEPS_VARIANCE)
    if HAS_RUNNING:
        average_statistics(running_ptrs, statistics, row_offsets, row_mask, factors)
    if IS_LATE:  # what the prologue does not read has not been in registers until now
        if not RECOMPUTES:
            columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
        else:  # nor is it all at once
            coming = LOAD_COLUMNS(operands, strides, sizes, *block_columns(0, cols, FULL_CHUNKS > 0, BLOCK_COLS))
    if RECOMPUTES:
        values = hold_row(values, HOLD, CHUNKS)
    for chunk in tl.static_range(CHUNKS):
        place, of_columns = places[chunk], columns[chunk]
        if IS_LATE and RECOMPUTES:
            of_columns = coming
            if chunk + 1 < CHUNKS:
                coming = LOAD_COLUMNS(
                    operands, strides, sizes, *block_columns(chunk + 1, cols, chunk + 1 < FULL_CHUNKS, BLOCK_COLS)
                )
        c = PROLOGUE(values[chunk], of_columns, place) if RECOMPUTES else row[chunk]
        results = EPILOGUE(normalize(c, statistics, IS_CENTERED), c, values[chunk], of_columns, place)
        STORE(outputs, results, strides, sizes, row_offsets, place[1], place[3])


@triton.jit
def row_forward_kernel(
    operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, KEEPS_VARIANCE: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr,
    IS_EXACT: tl.constexpr, IS_PERSISTENT: tl.constexpr, IS_LATE: tl.constexpr, RECOMPUTES: tl.constexpr,
    IS_AT_ONCE: tl.constexpr, STAGES: tl.constexpr, IS_CHAINED: tl.constexpr, FEW_ROWS: tl.constexpr,
):  # fmt: skip
    """FEW_ROWS: as many has each program, instead of BLOCK_ROWS, where there are programs enough. No row's bits change."""
    begin(IS_CHAINED)
    program = tl.program_id(0).to(rows.dtype)
    columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    if IS_PERSISTENT:
        for block in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
            forward_tile(
                block, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
                LOAD_COLUMNS, LOAD_ROWS, HOLD, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, KEEPS_VARIANCE,
                HAS_RUNNING, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, IS_EXACT, False, RECOMPUTES, IS_AT_ONCE,
            )  # fmt: skip
    elif FEW_ROWS == BLOCK_ROWS:
        forward_tile(
            program, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
            LOAD_COLUMNS, LOAD_ROWS, HOLD, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, KEEPS_VARIANCE,
            HAS_RUNNING, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, IS_EXACT, IS_LATE, RECOMPUTES, IS_AT_ONCE,
        )  # fmt: skip
    elif tl.num_programs(0) * FEW_ROWS >= rows:
        forward_tile(
            program, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
            LOAD_COLUMNS, LOAD_ROWS, HOLD, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, KEEPS_VARIANCE,
            HAS_RUNNING, FEW_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, IS_EXACT, IS_LATE, RECOMPUTES, IS_AT_ONCE,
        )  # fmt: skip
    else:
        forward_tile(
            program, columns, operands, outputs, statistic_ptrs, strides, sizes, rows, cols, eps, running_ptrs, factors,
            LOAD_COLUMNS, LOAD_ROWS, HOLD, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, KEEPS_VARIANCE,
            HAS_RUNNING, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, IS_EXACT, IS_LATE, RECOMPUTES, IS_AT_ONCE,
        )  # fmt: skip


@triton.jit
def backward_rows(
    program, programs, operands, gradients, partials, statistic_ptrs, strides, sizes, rows, groups, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, KEEP: tl.constexpr,
    ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, ROUND: tl.constexpr,
    PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_SUMS: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr, IS_LIGHT: tl.constexpr, RECOMPUTES: tl.constexpr,
    STAGES: tl.constexpr, HAS_NEXT: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Of one of `programs`, the first of the launch. HAS_SUMS: nobody else sums over rows."""
    if HAS_GROUPS:
        shares = programs // groups  # programs that share the rows of a group
        group_rows = rows // groups
        first_row = (program // shares) * group_rows
    else:  # and the compiler knows what divides a block's first row
        shares = programs
        group_rows = rows
        first_row = 0
    # By a number that the compiler knows nothing is divided. A division has a branch, and on either side of it stays what is
    # there; without, both need registers at a time. Backward of gelu(x + b) -> RMSNorm at 2048 takes 214 microseconds, and
    # 225 otherwise; but of silu(x) * r -> LayerNorm at 8192 629, and 348 otherwise
    COLS: tl.constexpr = BLOCK_COLS if FULL_CHUNKS == CHUNKS and CHUNKS == 1 and BLOCK_COLS <= MOST_MIXED else 0
    columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    accumulators = ((tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * ACCUMULATORS,) * CHUNKS
    for block in tl.range(program % shares, tl.cdiv(group_rows, BLOCK_ROWS), shares, num_stages=STAGES):
        row_in_group = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows_mask(row_in_group, group_rows)
        row_offsets = first_row + row_in_group
        numbers = ROW_NUMBERS(row_offsets, sizes, rows)
        statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
        values, places = load_rows(
            0, row_offsets, row_mask, numbers, operands, strides, sizes, cols, LOAD_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS,
        )  # fmt: skip
        row, normalized, from_epilogue, kept = (), (), (), ()
        for chunk in tl.static_range(CHUNKS):
            place = places[chunk]
            c = PROLOGUE(values[chunk], columns[chunk], place)
            xhat = tl.where(place[3], normalize(c, statistics, IS_CENTERED), 0.0)
            given = EPILOGUE_VJP(xhat, c, values[chunk], columns[chunk], place)
            row += (c,)
            normalized += (xhat,)
            from_epilogue += (given,)
            if RECOMPUTES:
                kept += (KEEP(xhat, c, values[chunk], columns[chunk], place),)
            if NEEDS_SUMS and chunk == 0:
                state = terms(ROUND(given[0]), xhat, IS_CENTERED)
            elif NEEDS_SUMS:
                state = add_terms(state, ROUND(given[0]), xhat, IS_CENTERED)
        if NEEDS_SUMS:
            sums = sum_terms(state, IS_CENTERED)
        added = ()
        for chunk in tl.static_range(CHUNKS):
            xhat, place = normalized[chunk], places[chunk]
            of_chunk, given = values[chunk], from_epilogue[chunk]
            grad_c = xhat
            if NEEDS_SUMS:
                if RECOMPUTES:
                    of_chunk = HOLD(of_chunk) + kept[chunk]
                    c = row[chunk]
                    if IS_LIGHT:
                        c = PROLOGUE(of_chunk, columns[chunk], place)
                        xhat = tl.where(place[3], normalize(c, statistics, IS_CENTERED), 0.0)
                    given = EPILOGUE_VJP(xhat, c, of_chunk, columns[chunk], place)
                grad_c = gradient(ROUND(given[0]), xhat, sums, statistics, cols, IS_CENTERED, COLS)
            results = PROLOGUE_VJP(grad_c, given, of_chunk, columns[chunk], place)
            STORE(gradients, results, strides, sizes, row_offsets, place[1], place[3])
            STORE_ROW_SUMS(partials, results, strides, sizes, row_offsets, row_mask, place[3], chunk, rows)
            if HAS_SUMS:
                added += (ACCUMULATE(accumulators[chunk], results, place[3]),)
        if HAS_SUMS:
            accumulators = added
    let_next_begin(HAS_NEXT)
    if HAS_SUMS:
        for chunk in tl.static_range(CHUNKS):
            col_offsets, col_mask = block_columns(chunk, cols, chunk < FULL_CHUNKS, BLOCK_COLS)
            STORE_PARTIALS(
                partials, accumulators[chunk], program, program * CHUNKS + chunk, col_offsets, col_mask, cols
            )


@triton.jit
def row_backward_kernel(
    operands, gradients, partials, totals, statistic_ptrs, strides, sizes, rows, groups, cols, row_programs,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, KEEP: tl.constexpr,
    ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, ROUND: tl.constexpr,
    PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    ACCUMULATORS: tl.constexpr, NEEDS_SUMS: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr, IS_LIGHT: tl.constexpr, RECOMPUTES: tl.constexpr,
    STAGES: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr, FEW_ROWS: tl.constexpr,
    IS_CHAINED: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    """SUM_COLS: if it is not 0, and there are more than `row_programs`, the others sum over rows, of so many columns. Those
    of rows then have FEW_ROWS each, and none after these."""
    begin(IS_CHAINED)
    program = tl.program_id(0)
    if SUM_COLS == 0:
        backward_rows(
            program, tl.num_programs(0), operands, gradients, partials, statistic_ptrs, strides, sizes, rows, groups, cols,
            LOAD_COLUMNS, LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, ROUND, PROLOGUE_VJP, STORE,
            STORE_ROW_SUMS, ACCUMULATE, STORE_PARTIALS, ACCUMULATORS, NEEDS_SUMS, IS_CENTERED, COMPUTE, HAS_GROUPS,
            BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, IS_LIGHT, RECOMPUTES, STAGES, HAS_NEXT, True,
        )  # fmt: skip
    elif tl.num_programs(0) == row_programs:
        backward_rows(
            program, row_programs, operands, gradients, partials, statistic_ptrs, strides, sizes, rows, groups, cols,
            LOAD_COLUMNS, LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, ROUND, PROLOGUE_VJP, STORE,
            STORE_ROW_SUMS, ACCUMULATE, STORE_PARTIALS, ACCUMULATORS, NEEDS_SUMS, IS_CENTERED, COMPUTE, HAS_GROUPS,
            BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, IS_LIGHT, RECOMPUTES, STAGES, HAS_NEXT, True,
        )  # fmt: skip
    elif program < row_programs:
        backward_rows(
            program, row_programs, operands, gradients, partials, statistic_ptrs, strides, sizes, rows, groups, cols,
            LOAD_COLUMNS, LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, ROUND, PROLOGUE_VJP, STORE,
            STORE_ROW_SUMS, ACCUMULATE, STORE_PARTIALS, 0, NEEDS_SUMS, IS_CENTERED, COMPUTE, False, FEW_ROWS, BLOCK_COLS,
            CHUNKS, FULL_CHUNKS, IS_LIGHT, RECOMPUTES, 1, False, False,
        )  # fmt: skip
    else:
        sum_columns(
            program - row_programs, operands, totals, statistic_ptrs, strides, sizes, rows, cols,
            LOAD_COLUMNS, LOAD_ROWS, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, ACCUMULATE, ACCUMULATORS,
            IS_CENTERED, COMPUTE, SUM_ROWS, SUM_COLS,
        )  # fmt: skip
