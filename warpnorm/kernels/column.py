"""Access pattern `column`: rows that lie in pieces, or side by side, so that memory runs across them: the norms by channel.
A line is a piece of a row, or all of it. A tile is BLOCK_ROWS lines and a part of their columns, one block of them or many
(IS_WALKED), side by side or as far apart as there are parts. A unit is some rows, whole, and the tiles that these lie in.

One launch has three tasks. The first, for each tile: the statistics of its lines, in backward their sums. The second, for
some rows of a unit: to merge those of their pieces. The third, for each tile: its results. Programs are numbered so that the
third task of a tile comes soon after the first of its unit, while its values are still in L2; where that does not hold a
unit, after all first tasks, and back to front. See `plan/grid.py`, `order`.

Who needs a number waits for it (`words.py`), and has a higher program number than whom it waits for: NVIDIA's GPUs start
programs in the order of their numbers, so the latter is running or done. Elsewhere each task has a launch of its own."""

import triton
import triton.language as tl

from warpnorm.kernels.masks import column_mask
from warpnorm.kernels.statistics import (
    add_terms,
    average_statistics,
    gradient,
    lane_counts,
    load_statistics,
    mean_of,
    merge_lanes,
    normalize,
    quick_step,
    reciprocal_sqrt,
    start_walk,
    store_statistics,
    sum_terms,
    tile_squares,
)
from warpnorm.kernels.tasks import FIRST, LAST, MERGE, part_of, task_of, tile_of, tile_place
from warpnorm.kernels.words import ask, for_lines, mask_of_rows, receive, send


@triton.jit
def load_tile(
    operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr, IS_EXACT: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """c, and all that the pointwise functions are called with."""
    col_mask = column_mask(col_offsets, cols, IS_EXACT)
    mask = row_mask[:, None] & col_mask[None, :]
    place = (row_offsets, col_offsets, cols, mask)
    values = LOAD_TILES(operands, strides, sizes, row_offsets, col_offsets, mask, lines, POLICY)
    columns = LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask)
    return PROLOGUE(values, columns, place), values, columns, place


@triton.jit
def send_lines(pieces_ptrs, unit, number, order, pair, row_mask, BLOCK_ROWS: tl.constexpr):
    """Two numbers for each line of a tile."""
    offsets = (unit.to(tl.int64) * order[1] + number) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    send(pieces_ptrs[0] + offsets, pair[0], row_mask)
    send(pieces_ptrs[1] + offsets, pair[1], row_mask)


@triton.jit
def rows_to_merge(unit, number, layout, statistics, MERGE_ROWS: tl.constexpr):
    """Rows of a unit, and their numbers among all."""
    rows = number * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    unit_rows = layout[8]
    row_numbers = unit.to(tl.int64) * unit_rows + rows
    return rows, row_numbers, (rows < unit_rows) & (row_numbers < statistics)


@triton.jit
def items_of(
    unit, rows, row_mask, first, order, layout, cols, spans,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MERGE_COLS: tl.constexpr, IS_WALKED: tl.constexpr,
):  # fmt: skip
    """Parts of pieces of rows: where the numbers of some of them are, which are there, and how many columns each has."""
    blocks, pieces, inner = layout[5], layout[6], layout[7]
    parts = order[1] // blocks
    items = first + tl.arange(0, MERGE_COLS)
    is_there = items < pieces * parts
    part = items // pieces
    line = (rows // inner * (pieces * inner) + rows % inner)[:, None] + (items % pieces * inner)[None, :]
    offsets = unit.to(tl.int64) * order[1] * BLOCK_ROWS + (part.to(tl.int64) * blocks * BLOCK_ROWS)[None, :] + line
    _first, _steps, widths = part_of(part, cols, spans, BLOCK_COLS, IS_WALKED)
    return offsets, row_mask[:, None] & is_there[None, :], tl.where(is_there, widths, 0)[None, :]


@triton.jit
def merge_statistics(
    piece_ptrs, row_ptrs, statistic_ptrs, running_ptrs, factors, unit, number, statistics, order, layout, cols,
    spans, eps,
    STATISTICS: tl.constexpr, HAS_RUNNING: tl.constexpr, COMPUTE: tl.constexpr, WAITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr,
    IS_WALKED: tl.constexpr,
):  # fmt: skip
    """Of rows, from those of their pieces, by Chan's formula: block by block in lanes, then the lanes."""
    rows, row_numbers, row_mask = rows_to_merge(unit, number, layout, statistics, MERGE_ROWS)
    mean = tl.zeros((MERGE_ROWS, MERGE_COLS), COMPUTE)
    squares = tl.zeros((MERGE_ROWS, MERGE_COLS), COMPUTE)
    total = tl.zeros((1, MERGE_COLS), COMPUTE)
    pieces = layout[6]
    for first in tl.range(0, order[1] // layout[5] * pieces, MERGE_COLS):
        offsets, mask, widths = items_of(
            unit, rows, row_mask, first, order, layout, cols, spans, BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, IS_WALKED
        )
        count = widths.to(COMPUTE)
        total += count
        ratio = tl.where(count > 0, mean_of(count, tl.where(count > 0, total, 1.0)), 0.0)
        words = ask(piece_ptrs, offsets, mask)
        their_mean, their_squares = receive(words, piece_ptrs, offsets, mask, COMPUTE, WAITS)
        delta = their_mean - mean
        squares += their_squares + tl.where(mask, delta * delta * ((total - count) * ratio), 0.0)
        mean += tl.where(mask, delta * ratio, 0.0)
    count_of_row = cols.to(tl.int64) * pieces
    merged, merged_squares = merge_lanes((mean, squares), total, count_of_row, True)
    variance = mean_of(merged_squares, count_of_row)
    rstd = reciprocal_sqrt(variance + eps)
    send(row_ptrs[0] + row_numbers, merged, row_mask)
    send(row_ptrs[1] + row_numbers, rstd, row_mask)
    found = (merged, rstd, variance)
    store_statistics(statistic_ptrs, found, row_numbers, row_mask, True, STATISTICS > 2)
    if HAS_RUNNING:
        average_statistics(running_ptrs, found, row_numbers, row_mask, factors)


@triton.jit
def merge_sums(
    piece_ptrs, row_ptrs, unit, number, statistics, order, layout, cols, spans,
    COMPUTE: tl.constexpr, WAITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr,
    IS_WALKED: tl.constexpr,
):  # fmt: skip
    rows, row_numbers, row_mask = rows_to_merge(unit, number, layout, statistics, MERGE_ROWS)
    sums = start_walk(tl.zeros((MERGE_ROWS, MERGE_COLS), COMPUTE), True)
    for first in tl.range(0, order[1] // layout[5] * layout[6], MERGE_COLS):
        offsets, mask, _widths = items_of(
            unit, rows, row_mask, first, order, layout, cols, spans, BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, IS_WALKED
        )
        words = ask(piece_ptrs, offsets, mask)
        added = receive(words, piece_ptrs, offsets, mask, COMPUTE, WAITS)
        sums = sums[0] + added[0], sums[1] + added[1]
    send(row_ptrs[0] + row_numbers, tl.sum(sums[0], 1), row_mask)
    send(row_ptrs[1] + row_numbers, tl.sum(sums[1], 1), row_mask)


@triton.jit
def line_statistics(
    operands, strides, sizes, row_offsets, row_mask, first, steps, width, cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_WALKED: tl.constexpr, IS_EXACT: tl.constexpr, IS_CORRECTED: tl.constexpr, STAGES: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """(mean, M2) of the lines of a tile."""
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    lanes = tl.arange(0, BLOCK_COLS)
    if IS_WALKED:
        if IS_CORRECTED:
            # Deviations from the mean of the first block: the means of lanes are rounded as often as they are moved
            block = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, first + lanes, cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
            )[0]  # fmt: skip
            there = tl.where((first + lanes < cols)[None, :], block, 0.0)
            pivot = mean_of(tl.sum(there, 1), tl.minimum(cols - first, BLOCK_COLS))[:, None]
        state = start_walk(tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE), True)
        for step in tl.range(0, steps, num_stages=STAGES):
            col_offsets = first + step * spans[1] + lanes
            c, _values, _columns, _place = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
            )  # fmt: skip
            if IS_CORRECTED:
                c -= pivot
            # lines that are not there are not sent either
            state = quick_step(state, c, column_mask(col_offsets, cols, IS_EXACT)[None, :], step)
        mean, squares = merge_lanes(state, lane_counts(lanes, width, BLOCK_COLS, COMPUTE), width, IS_CORRECTED)
        if IS_CORRECTED:
            mean += tl.sum(pivot, 1)
        return mean, squares
    else:
        c, _values, _columns, place = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines, first + lanes, cols,
            LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
        )  # fmt: skip
        return tile_squares(c, place[3], width, IS_CORRECTED)


@triton.jit
def store_results(
    c, values, columns, place, statistics, outputs, strides, sizes,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, HAS_STATISTIC: tl.constexpr,
):  # fmt: skip
    xhat = c
    if HAS_STATISTIC:
        xhat = normalize(c, statistics, True)
    results = EPILOGUE(xhat, c, values, columns, place)
    STORE(outputs, results, strides, sizes, place[0], place[1], place[3])


@triton.jit
def write_tile(
    unit, number, operands, outputs, row_ptrs, strides, sizes, rows, layout, reciprocals, cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, HAS_STATISTIC: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """The last task of forward."""
    HAS_ONE: tl.constexpr = BLOCK_ROWS == 1
    row_offsets, row_mask, row_numbers, _part, first, steps, _width, is_there = tile_place(
        unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
        HAS_FULL_BLOCKS, IS_WALKED,
    )  # fmt: skip
    if is_there:
        is_row = mask_of_rows(row_mask, HAS_ONE)
        pair = (row_mask,)
        if HAS_STATISTIC:
            words = ask(row_ptrs, row_numbers, is_row)
        lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
        if IS_WALKED:
            if HAS_STATISTIC:
                pair = for_lines(receive(words, row_ptrs, row_numbers, is_row, COMPUTE, WAITS), HAS_ONE)
            for step in tl.range(0, steps, num_stages=STAGES):  # from the end: it was read last
                c, values, columns, place = load_tile(
                    operands, strides, sizes, row_offsets, row_mask, lines,
                    first + (steps - 1 - step) * spans[1] + tl.arange(0, BLOCK_COLS), cols,
                    LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, "evict_first",
                )  # fmt: skip
                store_results(c, values, columns, place, pair, outputs, strides, sizes, EPILOGUE, STORE, HAS_STATISTIC)
        else:
            c, values, columns, place = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, first + tl.arange(0, BLOCK_COLS), cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, "evict_first",
            )  # fmt: skip
            if HAS_STATISTIC:
                pair = for_lines(receive(words, row_ptrs, row_numbers, is_row, COMPUTE, WAITS), HAS_ONE)
            store_results(c, values, columns, place, pair, outputs, strides, sizes, EPILOGUE, STORE, HAS_STATISTIC)


@triton.jit
def column_forward_kernel(
    operands, outputs, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, statistics, layout, order,
    reciprocals, cols, spans, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, HAS_STATISTIC: tl.constexpr, STATISTICS: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_CORRECTED: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    if HAS_FIRST:
        task, unit, number = task_of(order, reciprocals)
        if task == MERGE:
            merge_statistics(
                piece_ptrs, row_ptrs, statistic_ptrs, running_ptrs, factors, unit, number, statistics, order, layout, cols,
                spans, eps,
                STATISTICS, HAS_RUNNING, COMPUTE, WAITS, BLOCK_ROWS, BLOCK_COLS, MERGE_ROWS, MERGE_COLS, IS_WALKED,
            )  # fmt: skip
        elif task == FIRST:
            row_offsets, row_mask, _row_numbers, _part, first, steps, width, is_there = tile_place(
                unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
                HAS_FULL_BLOCKS, IS_WALKED,
            )  # fmt: skip
            if is_there:
                pair = line_statistics(
                    operands, strides, sizes, row_offsets, row_mask, first, steps, width, cols, spans,
                    LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, COMPUTE, BLOCK_ROWS, BLOCK_COLS, IS_WALKED, IS_EXACT,
                    IS_CORRECTED, STAGES, "evict_last",
                )  # fmt: skip
                send_lines(piece_ptrs, unit, number, order, pair, row_mask, BLOCK_ROWS)
        elif HAS_LAST and task == LAST:
            write_tile(
                unit, number, operands, outputs, row_ptrs, strides, sizes, rows, layout, reciprocals, cols, spans,
                LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE, STORE, HAS_STATISTIC, COMPUTE, HAS_PIECES,
                BLOCK_ROWS, BLOCK_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_WALKED, STAGES, WAITS,
            )  # fmt: skip
    else:
        unit, number = tile_of(order)
        write_tile(
            unit, number, operands, outputs, row_ptrs, strides, sizes, rows, layout, reciprocals, cols, spans,
            LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE, STORE, HAS_STATISTIC, COMPUTE, HAS_PIECES,
            BLOCK_ROWS, BLOCK_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_WALKED, STAGES, WAITS,
        )  # fmt: skip


@triton.jit
def line_sums(
    operands, strides, sizes, row_offsets, row_mask, statistics, first, steps, cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, ACCUMULATE_FIRST: tl.constexpr, FIRST_SUMS: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_EXACT: tl.constexpr, IS_LINEAR: tl.constexpr, STAGES: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """What must be summed over the lines of a tile before there is a gradient, and gradients that are such sums."""
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    state = start_walk(tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE), True)
    accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * FIRST_SUMS
    for step in tl.range(0, steps, num_stages=STAGES):
        c, values, columns, place = load_tile(
            operands, strides, sizes, row_offsets, row_mask, lines,
            first + step * spans[1] + tl.arange(0, BLOCK_COLS), cols,
            LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
        )  # fmt: skip
        xhat = normalize(c, statistics, True)
        if not IS_LINEAR:
            xhat = tl.where(place[3], xhat, 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
        state = add_terms(state, from_epilogue[0], xhat, True)
        accumulators = ACCUMULATE_FIRST(accumulators, from_epilogue, place[3])
    return sum_terms(state, True), accumulators


@triton.jit
def store_gradients(
    c, values, columns, place, statistics, sums, count, gradients, strides, sizes,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    NEEDS_SUMS: tl.constexpr, HAS_STATISTIC: tl.constexpr, IS_LINEAR: tl.constexpr,
):  # fmt: skip
    mask = place[3]
    xhat = c
    if HAS_STATISTIC:
        xhat = normalize(c, statistics, True)
    if not IS_LINEAR:
        xhat = tl.where(mask, xhat, 0.0)
    from_epilogue = EPILOGUE_VJP(xhat, c, values, columns, place)
    grad_c = xhat
    if NEEDS_SUMS:
        grad_c = from_epilogue[0]
        if HAS_STATISTIC:
            grad_c = gradient(grad_c, xhat, sums, statistics, count, True)
    results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns, place)
    STORE(gradients, results, strides, sizes, place[0], place[1], mask)
    return results


@triton.jit
def write_gradients(
    unit, number, operands, gradients, partials, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order, reciprocals,
    cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr, LAST_SUMS: tl.constexpr,
    NEEDS_SUMS: tl.constexpr, HAS_STATISTIC: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr, IS_LINEAR: tl.constexpr,
):  # fmt: skip
    """The last task of backward."""
    HAS_ONE: tl.constexpr = BLOCK_ROWS == 1
    row_offsets, row_mask, row_numbers, part, first, steps, _width, is_there = tile_place(
        unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
        HAS_FULL_BLOCKS, IS_WALKED,
    )  # fmt: skip
    if is_there:
        is_row = mask_of_rows(row_mask, HAS_ONE)
        pair = (row_mask,)
        sums = (row_mask,)
        if HAS_STATISTIC:
            pair = for_lines(load_statistics(statistic_ptrs, row_numbers, is_row, True), HAS_ONE)
            if NEEDS_SUMS:
                words = ask(row_ptrs, row_numbers, is_row)
        lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
        accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * LAST_SUMS
        count = cols.to(tl.int64) * layout[6]
        if IS_WALKED:
            if HAS_STATISTIC and NEEDS_SUMS:
                sums = for_lines(receive(words, row_ptrs, row_numbers, is_row, COMPUTE, WAITS), HAS_ONE)
            for step in tl.range(0, steps, num_stages=STAGES):  # from the end: it was read last
                c, values, columns, place = load_tile(
                    operands, strides, sizes, row_offsets, row_mask, lines,
                    first + (steps - 1 - step) * spans[1] + tl.arange(0, BLOCK_COLS), cols,
                    LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, "evict_first",
                )  # fmt: skip
                results = store_gradients(
                    c, values, columns, place, pair, sums, count, gradients, strides, sizes,
                    EPILOGUE_VJP, PROLOGUE_VJP, STORE, NEEDS_SUMS, HAS_STATISTIC, IS_LINEAR,
                )  # fmt: skip
                accumulators = ACCUMULATE_LAST(accumulators, results, place[3])
        else:
            c, values, columns, place = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, first + tl.arange(0, BLOCK_COLS), cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, "evict_first",
            )  # fmt: skip
            if HAS_STATISTIC and NEEDS_SUMS:
                sums = for_lines(receive(words, row_ptrs, row_numbers, is_row, COMPUTE, WAITS), HAS_ONE)
            results = store_gradients(
                c, values, columns, place, pair, sums, count, gradients, strides, sizes,
                EPILOGUE_VJP, PROLOGUE_VJP, STORE, NEEDS_SUMS, HAS_STATISTIC, IS_LINEAR,
            )  # fmt: skip
            accumulators = ACCUMULATE_LAST(accumulators, results, place[3])
        STORE_LAST(partials, accumulators, sizes, row_offsets, row_mask, part, order[1] // layout[5], rows)


@triton.jit
def column_backward_kernel(
    operands, gradients, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, statistics, layout, order,
    reciprocals, cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    ACCUMULATE_FIRST: tl.constexpr, STORE_FIRST: tl.constexpr, ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr,
    FIRST_SUMS: tl.constexpr, LAST_SUMS: tl.constexpr, NEEDS_SUMS: tl.constexpr, HAS_STATISTIC: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_WALKED: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr,
    IS_LINEAR: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    HAS_ONE: tl.constexpr = BLOCK_ROWS == 1
    if HAS_FIRST:
        task, unit, number = task_of(order, reciprocals)
        if task == MERGE:
            merge_sums(
                piece_ptrs, row_ptrs, unit, number, statistics, order, layout, cols, spans,
                COMPUTE, WAITS, BLOCK_ROWS, BLOCK_COLS, MERGE_ROWS, MERGE_COLS, IS_WALKED,
            )  # fmt: skip
        elif task == FIRST:
            row_offsets, row_mask, row_numbers, part, first, steps, _width, is_there = tile_place(
                unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
                HAS_FULL_BLOCKS, IS_WALKED,
            )  # fmt: skip
            if is_there:
                is_row = mask_of_rows(row_mask, HAS_ONE)
                pair = for_lines(load_statistics(statistic_ptrs, row_numbers, is_row, True), HAS_ONE)
                terms, settled = line_sums(
                    operands, strides, sizes, row_offsets, row_mask, pair, first, steps, cols, spans,
                    LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE_VJP, ACCUMULATE_FIRST, FIRST_SUMS,
                    COMPUTE, BLOCK_ROWS, BLOCK_COLS, IS_EXACT, IS_LINEAR, STAGES, "evict_last",
                )  # fmt: skip
                send_lines(piece_ptrs, unit, number, order, terms, row_mask, BLOCK_ROWS)
                STORE_FIRST(partials, settled, sizes, row_offsets, row_mask, part, order[1] // layout[5], rows)
        elif HAS_LAST and task == LAST:
            write_gradients(
                unit, number, operands, gradients, partials, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order,
                reciprocals, cols, spans, LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP,
                STORE, ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, NEEDS_SUMS, HAS_STATISTIC, COMPUTE, HAS_PIECES, BLOCK_ROWS,
                BLOCK_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_WALKED, STAGES, WAITS, IS_LINEAR,
            )  # fmt: skip
    else:
        unit, number = tile_of(order)
        write_gradients(
            unit, number, operands, gradients, partials, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order,
            reciprocals, cols, spans, LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
            ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, NEEDS_SUMS, HAS_STATISTIC, COMPUTE, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
            HAS_FULL_BLOCKS, IS_EXACT, IS_WALKED, STAGES, WAITS, IS_LINEAR,
        )  # fmt: skip
