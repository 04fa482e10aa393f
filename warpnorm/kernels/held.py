"""Access pattern `held`: a row that lies in pieces, each a line in memory, stays in registers from its statistic to its
result: it is read once and written once. The programs of a team run at the same time and have BLOCK_ROWS lines of it each,
in CHUNKS blocks of columns; they exchange means and M2, or in backward sums, through global memory (`messages.py`), and all
merge them in the same order. A lone program needs no exchange. They are persistent: while one waits, the next rows are on
their way (STAGES), and the others that its multiprocessor has compute and store. IS_AHEAD: a row is begun, and its message
sent, before the one before it is finished, whose messages arrive meanwhile; both are in registers then, and what waits is
carried to the next round of the loop by pairs of halves."""

import triton
import triton.language as tl

from warpnorm.kernels.blocks import compute_row, hold_row, load_columns
from warpnorm.kernels.merge import keep_statistics
from warpnorm.kernels.messages import last_digit, last_message, member, of_row, send, team_number, team_size, teams
from warpnorm.kernels.pieces import (
    added_up,
    as_tiles,
    counts_of,
    flat,
    is_first,
    kept_row,
    let_loose,
    lines_of,
    load_lines,
    merge_messages,
    my_pieces,
    no_row,
    pack_row,
    places_of,
    receive_sums,
    send_sums,
    sum_lines,
    sum_tiles,
    total_of,
)
from warpnorm.kernels.statistics import (
    coarse_offsets,
    corrected,
    gradient,
    load_statistics,
    mean_and_squares,
    mean_of,
    normalize,
    precise_reciprocal_sqrt,
    recentered,
    reciprocal_sqrt,
    rounded_off,
    row_deviations,
    wide_sum,
)

# Values of a lane from which it pays to merge mean and M2 of lanes, which takes as long for few. Percent of copy speed on an
# H200, fp16: BatchNorm of 32 x 64 x 112 x 112, 13 values, 71, and 65 by a mean and then M2; of 64 x 256 x 56 x 56, 7 values,
# residual + BatchNorm + ReLU 72 and 81
MANY_CHUNKS = tl.constexpr(8)


@triton.jit
def begin_forward(
    lines, operands, columns, mailbox, number, strides, sizes, cols, row_mask, count,
    LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, STATISTICS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    RECOMPUTES: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_AHEAD: tl.constexpr,
):  # fmt: skip
    """Loads a row and sends the statistic of this program's part; returns what it loaded, c, mean and M2."""
    WORDS: tl.constexpr = 2 if IS_CORRECTED else 1
    IS_WIDE: tl.constexpr = IS_CORRECTED and STATISTICS == 3  # the mean is a result itself
    HAS_LANES: tl.constexpr = not IS_CORRECTED and FULL_CHUNKS > 0 and CHUNKS >= MANY_CHUNKS
    splits = team_size()
    values, places = load_lines(
        lines, operands, strides, sizes, cols, LOAD_ROWS, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS
    )
    c = compute_row(values, columns, places, PROLOGUE, CHUNKS)
    if HAS_LANES:
        mean, total = mean_and_squares(c, places, row_mask, CHUNKS, FULL_CHUNKS)
    else:
        mean = mean_of(total_of(added_up(c, places, CHUNKS), row_mask), count)
        if RECOMPUTES:
            values = hold_row(values, HOLD, CHUNKS)
            c = compute_row(values, columns, places, PROLOGUE, CHUNKS)
        off, squares = row_deviations(c, mean, places, CHUNKS)
        if IS_WIDE:
            off = wide_sum(flat(coarse_offsets(c, mean, places, CHUNKS), row_mask))
            mean, low, total = recentered(mean, total_of(squares, row_mask), off, count)
        elif IS_CORRECTED:
            rounded = mean
            off = tl.sum(flat(off, row_mask), 1)
            total = wide_sum(flat(squares, row_mask)).to(tl.float32)  # else half of what rstd is off by
            mean, total = corrected(rounded, total, off, count)
            low = rounded_off(rounded, mean_of(off, count), mean)
        else:
            total = total_of(squares, row_mask)
    if RECOMPUTES and not IS_AHEAD:
        values = hold_row(values, HOLD, CHUNKS)
    if MOST > 1:
        told = total
        if IS_CORRECTED:
            told, digit = last_digit(total)
            send((low, digit), mailbox, number, splits, True, 1, WORDS)
        send((mean, told), mailbox, number, splits, True, 0, WORDS, IS_POSITIVE=True)
    return values, c, mean, total


@triton.jit
def finish_forward(
    row, lines, values, c, mean, total, outputs, columns, mailbox, number, statistic_ptrs, strides, sizes, pieces, cols,
    eps, running_ptrs, factors, row_mask,
    PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr, STATISTICS: tl.constexpr,
    HAS_RUNNING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr, A_THREAD: tl.constexpr, RECOMPUTES: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
):  # fmt: skip
    """Receives the statistics of a row's parts and writes its results."""
    if MOST > 1:
        splits = team_size()
        mean, total = merge_messages(mailbox, number, splits, pieces, cols, BLOCK_ROWS, MOST, IS_CORRECTED, A_THREAD)
    else:
        mean, total = let_loose((mean, total), 2)
    variance = mean_of(total, pieces.to(tl.float32) * cols)
    if IS_CORRECTED:
        found = (mean, precise_reciprocal_sqrt(variance + eps), variance.to(tl.float32))
    else:
        found = (mean, reciprocal_sqrt(variance + eps, True), variance)
    keep_statistics(
        statistic_ptrs, running_ptrs, found, row + tl.arange(0, 1), is_first(), factors, STATISTICS, HAS_RUNNING
    )
    places = places_of(lines, cols, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    for chunk in tl.static_range(CHUNKS):
        place = places[chunk]
        of_chunk = PROLOGUE(values[chunk], columns[chunk], place) if RECOMPUTES else c[chunk]
        results = EPILOGUE(normalize(of_chunk, found, True), of_chunk, values[chunk], columns[chunk], place)
        STORE(outputs, results, strides, sizes, lines, place[1], row_mask[:, None] & place[3])


@triton.jit
def held_forward_kernel(
    operands, outputs, mailbox, statistic_ptrs, strides, sizes, statistics, pieces, inner, cols, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PACK: tl.constexpr,
    UNPACK: tl.constexpr, NOTHING: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, STATISTICS: tl.constexpr, HAS_RUNNING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    A_THREAD: tl.constexpr, RECOMPUTES: tl.constexpr, IS_CORRECTED: tl.constexpr, STAGES: tl.constexpr,
    IS_AHEAD: tl.constexpr,
):  # fmt: skip
    """A_THREAD: how many messages a thread asks for at once, of each word."""
    my, row_mask = my_pieces(pieces, BLOCK_ROWS)
    columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    count = of_row(counts_of(member(), pieces, cols, BLOCK_ROWS))
    first, programs = team_number(), teams()
    number = 0
    if MOST > 1:
        number = last_message(mailbox, team_size(), 2 if IS_CORRECTED else 1) + 1
    kept = ()
    if IS_AHEAD:
        kept = no_row(NOTHING, BLOCK_ROWS, BLOCK_COLS, CHUNKS)
    for row in tl.range(first, statistics, programs, num_stages=STAGES):
        lines = lines_of(row, my, pieces, inner)
        values, c, mean, total = begin_forward(
            lines, operands, columns, mailbox, number, strides, sizes, cols, row_mask, count, LOAD_ROWS, HOLD, PROLOGUE,
            STATISTICS, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, RECOMPUTES, IS_CORRECTED,
            IS_AHEAD,
        )  # fmt: skip
        if IS_AHEAD:
            coming = pack_row(values, PACK, CHUNKS)
            if row > first:
                last_lines, last_values = kept_row(
                    kept, row - programs, my, pieces, inner, operands, strides, sizes, row_mask, LOAD_LINES, UNPACK, CHUNKS,
                )  # fmt: skip
                finish_forward(
                    row - programs, last_lines, last_values, (), (), (), outputs, columns, mailbox, number - 1,
                    statistic_ptrs, strides, sizes, pieces, cols, eps, running_ptrs, factors, row_mask, PROLOGUE, EPILOGUE,
                    STORE, STATISTICS, HAS_RUNNING, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, A_THREAD, True,
                    IS_CORRECTED,
                )  # fmt: skip
            kept = coming
        else:
            finish_forward(
                row, lines, values, c, mean, total, outputs, columns, mailbox, number, statistic_ptrs, strides, sizes,
                pieces, cols, eps, running_ptrs, factors, row_mask, PROLOGUE, EPILOGUE, STORE, STATISTICS, HAS_RUNNING,
                BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, A_THREAD, RECOMPUTES, IS_CORRECTED,
            )  # fmt: skip
        number += 1
    if IS_AHEAD:
        row = first + (statistics - 1 - first) // programs * programs
        lines, values = kept_row(
            kept, row, my, pieces, inner, operands, strides, sizes, row_mask, LOAD_LINES, UNPACK, CHUNKS,
        )  # fmt: skip
        finish_forward(
            row, lines, values, (), (), (), outputs, columns, mailbox, number - 1,
            statistic_ptrs, strides, sizes, pieces, cols, eps, running_ptrs, factors, row_mask, PROLOGUE, EPILOGUE, STORE,
            STATISTICS, HAS_RUNNING, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, A_THREAD, True, IS_CORRECTED,
        )  # fmt: skip


@triton.jit
def begin_backward(
    lines, pair, operands, columns, partials, mailbox, number, strides, sizes, rows, cols, row_mask,
    LOAD_LINES: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, SETTLE: tl.constexpr,
    ADD_FIRST: tl.constexpr, STORE_FIRST: tl.constexpr, FIRST_SUMS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    RECOMPUTES: tl.constexpr, IS_AHEAD: tl.constexpr, IS_ALIKE: tl.constexpr, SENT: tl.constexpr, A_WORD: tl.constexpr,
):  # fmt: skip
    """Loads a row and sends the sums of this program's part; returns what it loaded, and the sums."""
    values, places = load_lines(
        lines, operands, strides, sizes, cols, LOAD_ROWS, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS
    )
    sums = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * FIRST_SUMS
    for chunk in tl.static_range(CHUNKS):
        place = places[chunk]
        c = PROLOGUE(values[chunk], columns[chunk], place)
        xhat = tl.where(place[3], normalize(c, pair, True), 0.0)
        sums = ADD_FIRST(sums, xhat, c, values[chunk], columns[chunk], place)
    if IS_ALIKE:
        mine = sum_tiles(sums, row_mask, SENT)
    else:
        terms, merged, left = SETTLE(sums, LOAD_LINES(operands, strides, sizes, lines, row_mask))
        STORE_FIRST(partials, left, sizes, lines, row_mask, 0, 1, rows)
        mine = sum_lines(terms + merged, row_mask, SENT)
    if RECOMPUTES and not IS_AHEAD:
        values = hold_row(values, HOLD, CHUNKS)
    if MOST > 1:
        send_sums(mine, mailbox, number, team_size(), SENT, A_WORD)
    return values, mine


@triton.jit
def finish_backward(
    row, lines, pair, values, mine, operands, gradients, columns, merged_ptrs, partials, mailbox, number, strides, sizes,
    rows, pieces, inner, cols, count, row_mask,
    LOAD_LINES: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr,
    STORE: tl.constexpr, SETTLE: tl.constexpr, STORE_MERGED: tl.constexpr, ACCUMULATE_LAST: tl.constexpr,
    STORE_LAST: tl.constexpr, LAST_SUMS: tl.constexpr, MERGED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    A_THREAD: tl.constexpr, IS_ALIKE: tl.constexpr, SENT: tl.constexpr, A_WORD: tl.constexpr,
):  # fmt: skip
    """Receives the sums of a row's parts and writes its gradients."""
    one = row + tl.arange(0, 1)
    if MOST > 1:
        mine = receive_sums(mailbox, number, team_size(), SENT, A_WORD, MOST, A_THREAD)
    elif IS_ALIKE:
        mine = let_loose(mine, SENT)
    if IS_ALIKE:
        first = lines_of(row, tl.arange(0, 1), pieces, inner)
        terms, merged, _left = SETTLE(
            as_tiles(mine, SENT), LOAD_LINES(operands, strides, sizes, first, one >= 0)
        )  # fmt: skip
        mine = terms + merged
    if MERGED > 0:
        STORE_MERGED(merged_ptrs, mine[2:], one, is_first())
    accumulators = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE),) * LAST_SUMS
    places = places_of(lines, cols, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    for chunk in tl.static_range(CHUNKS):
        place = places[chunk]
        c = PROLOGUE(values[chunk], columns[chunk], place)
        xhat = tl.where(place[3], normalize(c, pair, True), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values[chunk], columns[chunk], place)
        grad_c = gradient(from_epilogue[0], xhat, mine, pair, count, True)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values[chunk], columns[chunk], place)
        STORE(gradients, results, strides, sizes, lines, place[1], row_mask[:, None] & place[3])
        accumulators = ACCUMULATE_LAST(accumulators, results, place[3])
    STORE_LAST(partials, accumulators, sizes, lines, row_mask, 0, 1, rows)


@triton.jit
def held_backward_kernel(
    operands, gradients, merged_ptrs, partials, mailbox, statistic_ptrs, strides, sizes, rows, statistics, pieces, inner,
    cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PACK: tl.constexpr,
    UNPACK: tl.constexpr, NOTHING: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    ADD_FIRST: tl.constexpr, SETTLE: tl.constexpr, STORE_MERGED: tl.constexpr, STORE_FIRST: tl.constexpr,
    ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr,
    FIRST_SUMS: tl.constexpr, LAST_SUMS: tl.constexpr, MERGED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    A_THREAD: tl.constexpr, RECOMPUTES: tl.constexpr, STAGES: tl.constexpr, IS_AHEAD: tl.constexpr, IS_ALIKE: tl.constexpr,
    SENT: tl.constexpr, A_WORD: tl.constexpr,
):  # fmt: skip
    """IS_ALIKE: what the sums along lines are multiplied by is the same for all lines of a row, and so it is for the row's
    sums, which are fewer than their multiples. SENT: how many sums a program sends. The others are as forward."""
    my, row_mask = my_pieces(pieces, BLOCK_ROWS)
    columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    count = of_row(pieces.to(tl.float32) * cols)
    first, programs = team_number(), teams()
    number = 0
    if MOST > 1:
        number = last_message(mailbox, team_size(), (SENT + A_WORD - 1) // A_WORD) + 1
    kept = ()
    if IS_AHEAD:
        kept = no_row(NOTHING, BLOCK_ROWS, BLOCK_COLS, CHUNKS)
    for row in tl.range(first, statistics, programs, num_stages=STAGES):
        lines = lines_of(row, my, pieces, inner)
        one = row + tl.arange(0, 1)
        pair = load_statistics(statistic_ptrs, one, one >= 0, True)
        values, mine = begin_backward(
            lines, pair, operands, columns, partials, mailbox, number, strides, sizes, rows, cols, row_mask, LOAD_LINES,
            LOAD_ROWS, HOLD, PROLOGUE, SETTLE, ADD_FIRST, STORE_FIRST, FIRST_SUMS, COMPUTE, BLOCK_ROWS, BLOCK_COLS, CHUNKS,
            FULL_CHUNKS, MOST, RECOMPUTES, IS_AHEAD, IS_ALIKE, SENT, A_WORD,
        )  # fmt: skip
        if IS_AHEAD:
            coming = pack_row(values, PACK, CHUNKS)
            if row > first:
                last_lines, last_values = kept_row(
                    kept, row - programs, my, pieces, inner, operands, strides, sizes, row_mask, LOAD_LINES, UNPACK, CHUNKS,
                )  # fmt: skip
                last_one = row - programs + tl.arange(0, 1)
                last_pair = load_statistics(statistic_ptrs, last_one, last_one >= 0, True)
                finish_backward(
                    row - programs, last_lines, last_pair, last_values, (), operands, gradients, columns, merged_ptrs,
                    partials, mailbox, number - 1, strides, sizes, rows, pieces, inner, cols, count, row_mask, LOAD_LINES,
                    PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE, SETTLE, STORE_MERGED, ACCUMULATE_LAST, STORE_LAST,
                    LAST_SUMS, MERGED, COMPUTE, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, A_THREAD, IS_ALIKE, SENT,
                    A_WORD,
                )  # fmt: skip
            kept = coming
        else:
            finish_backward(
                row, lines, pair, values, mine, operands, gradients, columns, merged_ptrs, partials, mailbox, number,
                strides, sizes, rows, pieces, inner, cols, count, row_mask, LOAD_LINES, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP,
                STORE, SETTLE, STORE_MERGED, ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, MERGED, COMPUTE, BLOCK_ROWS,
                BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, A_THREAD, IS_ALIKE, SENT, A_WORD,
            )  # fmt: skip
        number += 1
    if IS_AHEAD:
        row = first + (statistics - 1 - first) // programs * programs
        lines, values = kept_row(
            kept, row, my, pieces, inner, operands, strides, sizes, row_mask, LOAD_LINES, UNPACK, CHUNKS,
        )  # fmt: skip
        one = row + tl.arange(0, 1)
        pair = load_statistics(statistic_ptrs, one, one >= 0, True)
        finish_backward(
            row, lines, pair, values, (), operands, gradients, columns, merged_ptrs,
            partials, mailbox, number - 1, strides, sizes, rows, pieces, inner, cols, count, row_mask, LOAD_LINES, PROLOGUE,
            EPILOGUE_VJP, PROLOGUE_VJP, STORE, SETTLE, STORE_MERGED, ACCUMULATE_LAST, STORE_LAST, LAST_SUMS, MERGED,
            COMPUTE, BLOCK_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS, MOST, A_THREAD, IS_ALIKE, SENT, A_WORD,
        )  # fmt: skip
