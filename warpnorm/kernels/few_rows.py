"""Of pattern `row`, backward, where there are few rows: gradients that are sums over rows need not wait for those of the
rows. Programs of their own compute what is summed once more, of all rows and some columns each, in the same launch."""

import triton
import triton.language as tl

from warpnorm.kernels.statistics import as_stored, load_statistics, normalize


@triton.jit
def sum_columns(
    part, operands, totals, statistic_ptrs, strides, sizes, rows, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, ACCUMULATE: tl.constexpr, ACCUMULATORS: tl.constexpr,
    IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """What the prologue gives of these gradients is nothing, so that its own need not be known."""
    col_offsets = part * SUM_COLS + tl.arange(0, SUM_COLS)
    col_mask = col_offsets < cols
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    accumulators = (tl.zeros((SUM_ROWS, SUM_COLS), COMPUTE),) * ACCUMULATORS
    for first in tl.range(0, rows, SUM_ROWS):
        row_offsets = first + tl.arange(0, SUM_ROWS)
        row_mask = row_offsets < rows
        mask = row_mask[:, None] & col_mask[None, :]
        numbers = ROW_NUMBERS(row_offsets, sizes, rows)
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
        place = (numbers, col_offsets, cols, mask)
        c = PROLOGUE(values, columns, place)
        xhat = tl.where(mask, normalize(c, statistics, IS_CENTERED), 0.0)
        given = EPILOGUE_VJP(xhat, c, values, columns, place)
        results = PROLOGUE_VJP(xhat, given, values, columns, place)
        accumulators = ACCUMULATE(accumulators, results, mask)
    for k in tl.static_range(ACCUMULATORS):
        tl.store(totals[k] + col_offsets, as_stored(tl.sum(accumulators[k], 0), totals[k]), mask=col_mask)
