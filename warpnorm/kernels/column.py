"""Access pattern `column`: rows that lie in pieces, or side by side, so that memory runs across them: the norms by channel.
A line is a piece of a row, or all of it. A tile is BLOCK_ROWS lines and a part of their columns, one block of them or many
(IS_WALKED), side by side or as far apart as there are parts. A unit is some rows, whole, and the tiles that these lie in.

There are three tasks. The first, for each tile: the statistics of its lines, in backward their sums. The second, for some
rows of a unit: to merge those of their pieces. The third, for each tile: its results. See `plan/grid.py`, `order`.

Where L2 holds a unit, all are in one launch, by turns: the third task of a tile comes soon after the first of its unit,
while its values are still there. Who needs a number waits for it (`words.py`), and has a higher program number than whom it
waits for: NVIDIA's GPUs start programs in the order of their numbers, so the latter is running or done.

Elsewhere each task has a launch of its own, and nobody waits: programs that do take memory from those they wait for. The
third tasks come back to front. Where rows have few pieces, they merge for themselves (MERGES) and save the second launch."""

import triton
import triton.language as tl

from warpnorm.kernels.chain import begin
from warpnorm.kernels.masks import column_mask
from warpnorm.kernels.merge import (
    is_first_piece,
    keep_statistics,
    merge_statistics,
    merge_sums,
    merged_statistics,
    merged_sums,
    rows_of_tile,
)
from warpnorm.kernels.statistics import (
    gradient,
    lane_counts,
    load_statistics,
    mean_of,
    merge_lanes,
    merge_parts,
    move_of,
    normalize,
    quick_step,
    rounded_off,
    start_walk,
    tile_squares,
)
from warpnorm.kernels.tasks import FIRST, LAST, MERGE, task_of, tile_of, tile_place
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
def send_lines(pieces_ptrs, unit, number, order, values, row_mask, COUNT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """COUNT numbers for each line of a tile."""
    offsets = (unit.to(tl.int64) * order[1] + number) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    for k in tl.static_range(COUNT):
        send(pieces_ptrs[k] + offsets, values[k], row_mask)


@triton.jit
def line_statistics(
    operands, strides, sizes, row_offsets, row_mask, first, steps, width, cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_WALKED: tl.constexpr, IS_EXACT: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_RESULT: tl.constexpr,
    STAGES: tl.constexpr, POLICY: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """(mean, M2) of the lines of a tile, and where the mean is corrected what it is rounded off by. IS_RESULT: the mean is
    one itself, so that it is rounded once."""
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    lanes = tl.arange(0, BLOCK_COLS)
    if IS_WALKED and TOGETHER > 1 and not IS_CORRECTED:
        LANES: tl.constexpr = BLOCK_COLS // TOGETHER
        state = start_walk(tl.zeros((BLOCK_ROWS, LANES), COMPUTE), True)
        for step in tl.range(0, steps, num_stages=STAGES):
            parts = ()
            for k in tl.static_range(TOGETHER):
                parts += (load_tile(
                    operands, strides, sizes, row_offsets, row_mask, lines,
                    first + step * spans[1] + k * LANES + tl.arange(0, LANES), cols,
                    LOAD_COLUMNS, LOAD_TILES, PROLOGUE, True, POLICY,
                )[0],)  # fmt: skip
            state = merge_parts(state, parts, step, TOGETHER)
        return merge_lanes(state, lane_counts(tl.arange(0, LANES), width, LANES, COMPUTE), width, False)
    elif IS_WALKED:
        state = start_walk(tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE), True)
        counts = lane_counts(lanes, width, BLOCK_COLS, COMPUTE)
        START: tl.constexpr = 1 if IS_CORRECTED else 0
        IS_WIDE: tl.constexpr = IS_CORRECTED and IS_RESULT and COMPUTE == tl.float32
        if IS_CORRECTED:
            # The means of lanes are rounded as often as they are moved: those of deviations from the lane's first value
            block = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, first + lanes, cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
            )[0]  # fmt: skip
            low = tl.zeros_like(block)
        for step in tl.range(START, steps, num_stages=STAGES):
            col_offsets = first + step * spans[1] + lanes
            c, _values, _columns, _place = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines, col_offsets, cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
            )  # fmt: skip
            mask = column_mask(col_offsets, cols, IS_EXACT)[None, :]
            if IS_CORRECTED:
                c -= block
            before = state[0]
            state = quick_step(state, c, mask, step)  # lines that are not there are not sent either
            if IS_WIDE:  # what the mean lacks is less of it with every value, and is rounded anew
                move = move_of(tl.where(mask, c - before, 0.0), step)
                low += rounded_off(before, move, state[0]) - move_of(tl.where(mask, low, 0.0), step)
        if IS_WIDE:
            lane = block.to(tl.float64) + (state[0].to(tl.float64) + low.to(tl.float64))
            wide = tl.sum(tl.where(counts > 0.0, counts.to(tl.float64) * lane, 0.0), 1) / width
            mean = wide.to(tl.float32)
            means = state[0] + tl.where(counts > 0.0, block - mean[:, None], 0.0)
            squares = merge_lanes((means, state[1]), counts, width, True)[1]
            return mean, squares, (wide - mean.to(tl.float64)).to(tl.float32)
        elif IS_CORRECTED:
            # and all of them from the mean of these, as one far from it would cost digits
            there = tl.where((first + lanes < cols)[None, :], block, 0.0)
            pivot = mean_of(tl.sum(there, 1), tl.minimum(cols - first, BLOCK_COLS))
            means = state[0] + tl.where(counts > 0.0, block - pivot[:, None], 0.0)
            mean, squares = merge_lanes((means, state[1]), counts, width, True)
            moved = mean + pivot
            return moved, squares, rounded_off(pivot, mean, moved)
        else:
            return merge_lanes(state, counts, width, False)
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
    unit, number, operands, outputs, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order, reciprocals,
    cols, spans, first_tasks, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, HAS_STATISTIC: tl.constexpr, STATISTICS: tl.constexpr,
    HAS_RUNNING: tl.constexpr, COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_CORRECTED: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """The last task of forward. With MERGES, every program merges the statistics of its rows itself."""
    HAS_ONE: tl.constexpr = BLOCK_ROWS == 1
    row_offsets, row_mask, row_numbers, part, first, steps, _width, is_there = tile_place(
        unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
        HAS_FULL_BLOCKS, IS_WALKED,
    )  # fmt: skip
    if is_there:
        is_row = mask_of_rows(row_mask, HAS_ONE)
        pair = (row_mask,)
        if HAS_STATISTIC and not MERGES:
            words = ask(row_ptrs, row_numbers, is_row, WAITS)
        lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
        if IS_WALKED:
            if MERGES:
                mine, numbers = rows_of_tile(unit, row_numbers, layout, BLOCK_ROWS)
                found = merged_statistics(
                    piece_ptrs, unit, mine, row_mask, first_tasks, layout, cols, eps,
                    COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_CORRECTED, IS_WALKED, True,
                )  # fmt: skip
                pair = found[0], found[1]
                if part == 0:
                    is_kept = row_mask & is_first_piece(number, layout, BLOCK_ROWS)
                    keep_statistics(
                        statistic_ptrs, running_ptrs, found, numbers, is_kept, factors, STATISTICS, HAS_RUNNING
                    )
            elif HAS_STATISTIC:
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
    reciprocals, cols, spans, first_tasks, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr, STORE: tl.constexpr, HAS_STATISTIC: tl.constexpr, STATISTICS: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_CORRECTED: tl.constexpr, IS_WALKED: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, MERGES: tl.constexpr,
    IS_CHAINED: tl.constexpr, TOGETHER: tl.constexpr, BY_UNITS: tl.constexpr,
):  # fmt: skip
    """IS_CORRECTED: a line also sends what its mean is rounded off by, which of many short lines, far from zero, would be a
    variance of its own."""
    begin(IS_CHAINED)
    if HAS_FIRST:
        task, unit, number = task_of(order, reciprocals, BY_UNITS)
        if task == MERGE:
            merge_statistics(
                piece_ptrs, row_ptrs, statistic_ptrs, running_ptrs, factors, unit, number, statistics, first_tasks, layout,
                cols, eps,
                STATISTICS, HAS_RUNNING, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_ROWS, MERGE_COLS, IS_CORRECTED,
                IS_WALKED,
            )  # fmt: skip
        elif task == FIRST:
            row_offsets, row_mask, _row_numbers, _part, first, steps, width, is_there = tile_place(
                unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
                HAS_FULL_BLOCKS, IS_WALKED,
            )  # fmt: skip
            if is_there:
                found = line_statistics(
                    operands, strides, sizes, row_offsets, row_mask, first, steps, width, cols, spans,
                    LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, COMPUTE, BLOCK_ROWS, BLOCK_COLS, IS_WALKED, IS_EXACT,
                    IS_CORRECTED, STATISTICS == 3, STAGES, "evict_last", TOGETHER,
                )  # fmt: skip
                send_lines(piece_ptrs, unit, number, order, found, row_mask, 3 if IS_CORRECTED else 2, BLOCK_ROWS)
        elif HAS_LAST and task == LAST:
            write_tile(
                unit, number, operands, outputs, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order,
                reciprocals, cols, spans, first_tasks, eps, running_ptrs, factors,
                LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE, STORE, HAS_STATISTIC, STATISTICS, HAS_RUNNING,
                COMPUTE, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_CORRECTED, IS_WALKED,
                STAGES, WAITS, MERGES,
            )  # fmt: skip
    else:
        unit, number = tile_of(order, BY_UNITS)
        write_tile(
            unit, number, operands, outputs, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, layout, order,
            reciprocals, cols, spans, first_tasks, eps, running_ptrs, factors,
            LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE, STORE, HAS_STATISTIC, STATISTICS, HAS_RUNNING,
            COMPUTE, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_CORRECTED, IS_WALKED,
            STAGES, WAITS, MERGES,
        )  # fmt: skip


@triton.jit
def line_sums(
    operands, strides, sizes, row_offsets, row_mask, statistics, first, steps, cols, spans,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    ADD_FIRST: tl.constexpr, SETTLE: tl.constexpr, FIRST_SUMS: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_EXACT: tl.constexpr, IS_LINEAR: tl.constexpr, STAGES: tl.constexpr, POLICY: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """What must be summed over the lines of a tile before there is a gradient, and gradients that are such sums."""
    lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
    LANES: tl.constexpr = BLOCK_COLS // TOGETHER
    nothing = (tl.zeros((BLOCK_ROWS, LANES), COMPUTE),) * FIRST_SUMS
    sums = nothing
    for step in tl.range(0, steps, num_stages=STAGES):
        more = nothing if TOGETHER > 1 else sums
        for k in tl.static_range(TOGETHER):
            c, values, columns, place = load_tile(
                operands, strides, sizes, row_offsets, row_mask, lines,
                first + step * spans[1] + k * LANES + tl.arange(0, LANES), cols,
                LOAD_COLUMNS, LOAD_TILES, PROLOGUE, IS_EXACT, POLICY,
            )  # fmt: skip
            xhat = normalize(c, statistics, True)
            if not IS_LINEAR:
                xhat = tl.where(place[3], xhat, 0.0)
            more = ADD_FIRST(more, xhat, c, values, columns, place)
        sums = added(sums, more, FIRST_SUMS) if TOGETHER > 1 else more
    return SETTLE(sums, lines)


@triton.jit
def added(sums, more, COUNT: tl.constexpr):
    both = ()
    for k in tl.static_range(COUNT):
        both = both + (sums[k] + more[k],)  # noqa: RUF005
    return both


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
    unit, number, operands, gradients, merged_ptrs, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes,
    rows, layout, order, reciprocals, cols, spans, first_tasks,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_MERGED: tl.constexpr, ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr, LAST_SUMS: tl.constexpr,
    MERGED: tl.constexpr, NEEDS_SUMS: tl.constexpr, HAS_STATISTIC: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_WALKED: tl.constexpr,
    STAGES: tl.constexpr, WAITS: tl.constexpr, IS_LINEAR: tl.constexpr, MERGES: tl.constexpr,
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
            if NEEDS_SUMS and not MERGES:
                words = ask(row_ptrs, row_numbers, is_row, WAITS)
        lines = LOAD_LINES(operands, strides, sizes, row_offsets, row_mask)
        accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * LAST_SUMS
        count = cols.to(tl.int64) * layout[6]
        if IS_WALKED:
            if MERGES:
                mine, numbers = rows_of_tile(unit, row_numbers, layout, BLOCK_ROWS)
                sums = merged_sums(
                    piece_ptrs, unit, mine, row_mask, first_tasks, layout, cols,
                    2, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_WALKED,
                )  # fmt: skip
                if MERGED > 0 and part == 0:
                    more = merged_sums(
                        piece_ptrs[2:], unit, mine, row_mask, first_tasks, layout, cols,
                        MERGED, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_WALKED,
                    )  # fmt: skip
                    STORE_MERGED(merged_ptrs, more, numbers, row_mask & is_first_piece(number, layout, BLOCK_ROWS))
            elif HAS_STATISTIC and NEEDS_SUMS:
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
    operands, gradients, merged_ptrs, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes, rows, statistics,
    layout, order, reciprocals, cols, spans, first_tasks,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_TILES: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    ADD_FIRST: tl.constexpr, SETTLE: tl.constexpr, STORE_MERGED: tl.constexpr, STORE_FIRST: tl.constexpr,
    STORE_UNMERGED: tl.constexpr,
    ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr,
    FIRST_SUMS: tl.constexpr, LAST_SUMS: tl.constexpr, MERGED: tl.constexpr, NEEDS_SUMS: tl.constexpr,
    HAS_STATISTIC: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr, HAS_FULL_BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_WALKED: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr,
    IS_LINEAR: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
    MERGES: tl.constexpr, IS_CHAINED: tl.constexpr, TOGETHER: tl.constexpr, BY_UNITS: tl.constexpr,
):  # fmt: skip
    begin(IS_CHAINED)
    HAS_ONE: tl.constexpr = BLOCK_ROWS == 1
    if HAS_FIRST:
        task, unit, number = task_of(order, reciprocals, BY_UNITS)
        if task == MERGE:
            merge_sums(
                merged_ptrs, piece_ptrs, row_ptrs, unit, number, statistics, first_tasks, layout, cols,
                STORE_MERGED, MERGED, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_ROWS, MERGE_COLS, IS_WALKED,
            )  # fmt: skip
        elif task == FIRST:
            row_offsets, row_mask, row_numbers, part, first, steps, _width, is_there = tile_place(
                unit, number, rows, layout, reciprocals, cols, spans, HAS_PIECES, BLOCK_ROWS, BLOCK_COLS,
                HAS_FULL_BLOCKS, IS_WALKED,
            )  # fmt: skip
            if is_there:
                is_row = mask_of_rows(row_mask, HAS_ONE)
                pair = for_lines(load_statistics(statistic_ptrs, row_numbers, is_row, True), HAS_ONE)
                terms, merged, left = line_sums(
                    operands, strides, sizes, row_offsets, row_mask, pair, first, steps, cols, spans,
                    LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, ADD_FIRST, SETTLE, FIRST_SUMS,
                    COMPUTE, BLOCK_ROWS, BLOCK_COLS, IS_EXACT, IS_LINEAR, STAGES, "evict_last", TOGETHER,
                )  # fmt: skip
                if MERGED > 0:
                    send_lines(piece_ptrs, unit, number, order, terms + merged, row_mask, 2 + MERGED, BLOCK_ROWS)
                else:
                    send_lines(piece_ptrs, unit, number, order, terms, row_mask, 2, BLOCK_ROWS)
                    STORE_UNMERGED(partials, merged, sizes, row_offsets, row_mask, part, order[1] // layout[5], rows)
                STORE_FIRST(partials, left, sizes, row_offsets, row_mask, part, order[1] // layout[5], rows)
        elif HAS_LAST and task == LAST:
            write_gradients(
                unit, number, operands, gradients, merged_ptrs, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides,
                sizes, rows, layout, order, reciprocals, cols, spans, first_tasks,
                LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
                STORE_MERGED, ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, MERGED, NEEDS_SUMS, HAS_STATISTIC, COMPUTE, HAS_PIECES,
                BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_WALKED, STAGES, WAITS, IS_LINEAR, MERGES,
            )  # fmt: skip
    else:
        unit, number = tile_of(order, BY_UNITS)
        write_gradients(
            unit, number, operands, gradients, merged_ptrs, partials, piece_ptrs, row_ptrs, statistic_ptrs, strides, sizes,
            rows, layout, order, reciprocals, cols, spans, first_tasks,
            LOAD_COLUMNS, LOAD_LINES, LOAD_TILES, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
            STORE_MERGED, ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, MERGED, NEEDS_SUMS, HAS_STATISTIC, COMPUTE, HAS_PIECES,
            BLOCK_ROWS, BLOCK_COLS, MERGE_COLS, HAS_FULL_BLOCKS, IS_EXACT, IS_WALKED, STAGES, WAITS, IS_LINEAR, MERGES,
        )  # fmt: skip
