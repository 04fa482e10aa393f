"""Of pattern `column`: the statistics of rows from those of their pieces, which the first tasks have left behind, and in
backward their sums. Either tasks of their own merge them, for all who ask; or, where few programs have the last tasks, each
of these for itself."""

import triton
import triton.language as tl

from warpnorm.kernels.statistics import (
    average_statistics,
    mean_of,
    merge_lanes,
    reciprocal_sqrt,
    rounded_off,
    store_statistics,
)
from warpnorm.kernels.tasks import part_of
from warpnorm.kernels.words import ask, ask_one, receive, receive_one, send


@triton.jit
def rows_to_merge(unit, number, layout, statistics, MERGE_ROWS: tl.constexpr):
    """Rows of a unit, and their numbers among all."""
    rows = number * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    unit_rows = layout[8]
    row_numbers = unit.to(tl.int64) * unit_rows + rows
    return rows, row_numbers, (rows < unit_rows) & (row_numbers < statistics)


@triton.jit
def rows_of_tile(unit, row_numbers, layout, BLOCK_ROWS: tl.constexpr):
    """Rows of a unit, one for each line of a tile, and their numbers among all."""
    row_numbers += tl.zeros((BLOCK_ROWS,), row_numbers.dtype)
    return (row_numbers - unit.to(row_numbers.dtype) * layout[8]).to(tl.int32), row_numbers


@triton.jit
def is_first_piece(number, layout, BLOCK_ROWS: tl.constexpr):
    """Of the lines of a tile: whether they are the first of their rows."""
    blocks, pieces, inner = layout[5], layout[6], layout[7]
    return (number % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)) // inner % pieces == 0


@triton.jit
def items_of(
    unit, rows, row_mask, first, first_tasks, layout, cols,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr,
    IS_WALKED: tl.constexpr,
):  # fmt: skip
    """Parts of pieces of rows: where the numbers of some of them are, which are there, and how many columns each has."""
    blocks, pieces, inner = layout[5], layout[6], layout[7]
    parts = first_tasks[0] // blocks
    items = first + tl.arange(0, MERGE_COLS)
    is_there = items < pieces * parts
    part = items
    line = rows[:, None]
    if HAS_PIECES:
        part = items // pieces
        line = (rows // inner * (pieces * inner) + rows % inner)[:, None] + (items % pieces * inner)[None, :]
    offsets = (
        unit.to(tl.int64) * first_tasks[0] * BLOCK_ROWS + (part.to(tl.int64) * blocks * BLOCK_ROWS)[None, :] + line
    )
    _first, _steps, widths = part_of(part, cols, first_tasks[2:], first_tasks[1], IS_WALKED)
    return offsets, row_mask[:, None] & is_there[None, :], tl.where(is_there, widths, 0)[None, :]


@triton.jit
def receive_lines(
    piece_ptrs, offsets, mask, COMPUTE: tl.constexpr, WAITS: tl.constexpr, IS_CORRECTED: tl.constexpr
):  # fmt: skip
    """(mean, M2) of lines, and what the mean is rounded off by, if it is told: that of float32 is one number in float64."""
    words = ask(piece_ptrs, offsets, mask, WAITS)
    if IS_CORRECTED:
        word = ask_one(piece_ptrs[2] + offsets, mask, WAITS)
        mean, squares = receive(words, piece_ptrs, offsets, mask, COMPUTE, WAITS)
        low = receive_one(word, piece_ptrs[2] + offsets, mask, COMPUTE, WAITS)
        if COMPUTE == tl.float64:
            return mean, squares, low
        else:
            return mean.to(tl.float64) + low.to(tl.float64), squares, 0.0
    else:
        mean, squares = receive(words, piece_ptrs, offsets, mask, COMPUTE, WAITS)
        return mean, squares, 0.0


@triton.jit
def merged_statistics(
    piece_ptrs, unit, rows, row_mask, first_tasks, layout, cols, eps,
    COMPUTE: tl.constexpr, WAITS: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    MERGE_COLS: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_WALKED: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """Of rows of a unit, from those of their pieces. Where these are more than one block of lanes (not IS_ONE), lanes merge
    one after another by Chan's formula. Then the lanes are merged. Means in two parts (IS_CORRECTED) are float64, and those
    of float64 in two parts."""
    IS_PAIR: tl.constexpr = IS_CORRECTED and COMPUTE == tl.float64
    if IS_ONE:
        offsets, mask, widths = items_of(
            unit, rows, row_mask, 0, first_tasks, layout, cols,
            HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_WALKED,
        )  # fmt: skip
        total = widths.to(COMPUTE)
        mean, squares, low = receive_lines(piece_ptrs, offsets, mask, COMPUTE, WAITS, IS_CORRECTED)
    else:
        mean = tl.zeros((rows.shape[0], MERGE_COLS), tl.float64 if IS_CORRECTED else COMPUTE)
        low = tl.zeros_like(mean)
        squares = tl.zeros((rows.shape[0], MERGE_COLS), COMPUTE)
        total = tl.zeros((1, MERGE_COLS), COMPUTE)
        for first in tl.range(0, first_tasks[0] // layout[5] * layout[6], MERGE_COLS):
            offsets, mask, widths = items_of(
                unit, rows, row_mask, first, first_tasks, layout, cols,
                HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_WALKED,
            )  # fmt: skip
            count = widths.to(COMPUTE)
            total += count
            ratio = tl.where(count > 0, mean_of(count, tl.where(count > 0, total, 1.0)), 0.0)
            their_mean, their_squares, their_low = receive_lines(
                piece_ptrs, offsets, mask, COMPUTE, WAITS, IS_CORRECTED
            )
            away = their_mean - mean
            if IS_PAIR:
                is_first = mask & (total == count)  # of its lane, and keeps both parts
                away = tl.where(is_first, 0.0, away + (their_low - low))
            delta = away.to(COMPUTE)
            squares += their_squares + tl.where(mask, delta * delta * ((total - count) * ratio), 0.0)
            move = tl.where(mask, away * ratio, 0.0)
            moved = mean + move
            if IS_PAIR:
                low = tl.where(is_first, their_low, low + rounded_off(mean, move, moved))
                mean = tl.where(is_first, their_mean, moved)
            else:
                mean = moved
    count_of_row = cols.to(tl.int64) * layout[6]
    if COMPUTE == tl.float64:
        if IS_PAIR:
            around = mean_of(tl.sum(total * mean, 1), count_of_row)
            merged, merged_squares = merge_lanes(((mean - around[:, None]) + low, squares), total, count_of_row, True)
            merged += around
        else:
            merged, merged_squares = merge_lanes((mean, squares), total, count_of_row, True)
        variance = mean_of(merged_squares, count_of_row)
        return merged, reciprocal_sqrt(variance + eps), variance
    # There may be many lanes, each of few values, whose means are larger than the mean of all
    wide = tl.sum(total.to(tl.float64) * mean.to(tl.float64), 1) / count_of_row
    merged = wide.to(COMPUTE)
    if IS_CORRECTED:
        deviation = (mean - wide[:, None]).to(COMPUTE)
        variance = mean_of(tl.sum(squares + total * deviation * deviation, 1), count_of_row)
    else:
        deviation = mean - merged[:, None]
        shift = (wide - merged.to(tl.float64)).to(COMPUTE)
        variance = mean_of(tl.sum(squares + total * deviation * deviation, 1), count_of_row) - shift * shift
        variance = tl.where(variance < 0.0, 0.0, variance)  # unlike a maximum, this keeps NaN
    return merged, reciprocal_sqrt(variance + eps), variance


@triton.jit
def keep_statistics(
    statistic_ptrs, running_ptrs, found, row_numbers, row_mask, factors,
    STATISTICS: tl.constexpr, HAS_RUNNING: tl.constexpr,
):  # fmt: skip
    store_statistics(statistic_ptrs, found, row_numbers, row_mask, True, STATISTICS > 2)
    if HAS_RUNNING:
        average_statistics(running_ptrs, found, row_numbers, row_mask, factors)


@triton.jit
def merge_statistics(
    piece_ptrs, row_ptrs, statistic_ptrs, running_ptrs, factors, unit, number, statistics, first_tasks, layout, cols,
    eps,
    STATISTICS: tl.constexpr, HAS_RUNNING: tl.constexpr, COMPUTE: tl.constexpr, WAITS: tl.constexpr,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_COLS: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_WALKED: tl.constexpr,
):  # fmt: skip
    """The second task of forward."""
    rows, row_numbers, row_mask = rows_to_merge(unit, number, layout, statistics, MERGE_ROWS)
    found = merged_statistics(
        piece_ptrs, unit, rows, row_mask, first_tasks, layout, cols, eps,
        COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_CORRECTED, IS_WALKED, False,
    )  # fmt: skip
    send(row_ptrs[0] + row_numbers, found[0], row_mask)
    send(row_ptrs[1] + row_numbers, found[1], row_mask)
    keep_statistics(statistic_ptrs, running_ptrs, found, row_numbers, row_mask, factors, STATISTICS, HAS_RUNNING)


@triton.jit
def merged_sums(
    piece_ptrs, unit, rows, row_mask, first_tasks, layout, cols,
    COUNT: tl.constexpr, COMPUTE: tl.constexpr, WAITS: tl.constexpr, HAS_PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, MERGE_COLS: tl.constexpr, IS_WALKED: tl.constexpr,
):  # fmt: skip
    """COUNT sums of rows of a unit, from those of their pieces."""
    sums = (tl.zeros((rows.shape[0], MERGE_COLS), COMPUTE),) * COUNT
    for first in tl.range(0, first_tasks[0] // layout[5] * layout[6], MERGE_COLS):
        offsets, mask, _widths = items_of(
            unit, rows, row_mask, first, first_tasks, layout, cols,
            HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_WALKED,
        )  # fmt: skip
        words = ()
        for k in tl.static_range(COUNT):
            words = words + (ask_one(piece_ptrs[k] + offsets, mask, WAITS),)  # noqa: RUF005
        added = ()
        for k in tl.static_range(COUNT):
            more = receive_one(words[k], piece_ptrs[k] + offsets, mask, COMPUTE, WAITS)
            added = added + (sums[k] + more,)  # noqa: RUF005
        sums = added
    totals = ()
    for k in tl.static_range(COUNT):
        totals = totals + (tl.sum(sums[k], 1),)  # noqa: RUF005
    return totals


@triton.jit
def merge_sums(
    merged_ptrs, piece_ptrs, row_ptrs, unit, number, statistics, first_tasks, layout, cols,
    STORE_MERGED: tl.constexpr, MERGED: tl.constexpr, COMPUTE: tl.constexpr, WAITS: tl.constexpr,
    HAS_PIECES: tl.constexpr, BLOCK_ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_COLS: tl.constexpr, IS_WALKED: tl.constexpr,
):  # fmt: skip
    """The second task of backward."""
    rows, row_numbers, row_mask = rows_to_merge(unit, number, layout, statistics, MERGE_ROWS)
    sums = merged_sums(
        piece_ptrs, unit, rows, row_mask, first_tasks, layout, cols,
        2 + MERGED, COMPUTE, WAITS, HAS_PIECES, BLOCK_ROWS, MERGE_COLS, IS_WALKED,
    )  # fmt: skip
    send(row_ptrs[0] + row_numbers, sums[0], row_mask)
    send(row_ptrs[1] + row_numbers, sums[1], row_mask)
    if MERGED > 0:
        STORE_MERGED(merged_ptrs, sums[2:], row_numbers, row_mask)
