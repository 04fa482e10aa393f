"""Access pattern `held`: a row that lies in pieces, each a line in memory, stays in registers from its statistic to its
result: it is read once and written once. The programs of a team run at the same time and have BLOCK_ROWS lines of it each,
in CHUNKS blocks of columns; they exchange means and M2, or in backward sums, through global memory (`messages.py`), and all
merge them in the same order. A lone program needs no exchange. They are persistent: while one waits, the next rows are on
their way (STAGES), and the others that its multiprocessor has compute and store."""

import triton
import triton.language as tl

from warpnorm.kernels.blocks import compute_row, hold_row, load_columns, load_rows
from warpnorm.kernels.merge import keep_statistics
from warpnorm.kernels.messages import last_message, messages, of_row, product, send
from warpnorm.kernels.statistics import (
    coarse_offsets,
    corrected,
    gradient,
    in_row,
    load_statistics,
    mean_and_squares,
    mean_of,
    normalize,
    recentered,
    reciprocal_sqrt,
    rounded_off,
    row_deviations,
    wide_sum,
)
from warpnorm.kernels.sums import sums_of

# Values of a lane from which it pays to merge mean and M2 of lanes, which takes as long for few. Percent of copy speed on an
# H200, fp16: BatchNorm of 32 x 64 x 112 x 112, 13 values, 71, and 65 by a mean and then M2; of 64 x 256 x 56 x 56, 7 values,
# residual + BatchNorm + ReLU 72 and 81
MANY_CHUNKS = tl.constexpr(8)


@triton.jit
def my_pieces(pieces, BLOCK_ROWS: tl.constexpr):
    """The numbers of the pieces that this program has, and which of them are there. Where there is none, the last is loaded
    once more, and left out of sums: a mask for every element would cost more."""
    my = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return tl.minimum(my, pieces - 1), my < pieces


@triton.jit
def lines_of(row, my, pieces, inner):
    """The numbers of lines. Those of a row are `inner` lines apart, and so many rows lie side by side."""
    return row // inner * (inner * pieces) + row % inner + my * inner


@triton.jit
def load_lines(
    lines, operands, strides, sizes, cols,
    LOAD_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
):  # fmt: skip
    all_rows = tl.full((BLOCK_ROWS,), True, tl.int1)
    return load_rows(
        0, lines, all_rows, lines, operands, strides, sizes, cols, LOAD_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS
    )


@triton.jit
def counts_of(members, pieces, cols, BLOCK_ROWS: tl.constexpr):
    """How many values the programs with these numbers have of a row."""
    lines = tl.minimum(tl.maximum(pieces - members * BLOCK_ROWS, 0), BLOCK_ROWS)
    return lines.to(tl.float32) * cols


@triton.jit
def flat(tile, row_mask):
    """A tile as one row, (1, all): zero in lines that are not there."""
    return tl.reshape(tl.where(row_mask[:, None], tile, 0.0), (1, tile.shape[0] * tile.shape[1]))


@triton.jit
def total_of(tile, row_mask):
    """The sum of a tile, (1,)."""
    return of_row(tl.sum(tl.where(row_mask[:, None], tile, 0.0)))


@triton.jit
def added_up(row, places, CHUNKS: tl.constexpr):
    total = in_row(row[0], places[0])
    for chunk in tl.static_range(1, CHUNKS):
        total += in_row(row[chunk], places[chunk])
    return total


@triton.jit
def merge_messages(
    mailbox, number, splits, pieces, cols, BLOCK_ROWS: tl.constexpr, MOST: tl.constexpr, IS_CORRECTED: tl.constexpr
):
    """(mean, M2) of a row. IS_CORRECTED: a second word has what the mean of a part is rounded off by."""
    WORDS: tl.constexpr = 2 if IS_CORRECTED else 1
    means, squares, members = messages(mailbox, number, splits, MOST, 0, WORDS, IS_POSITIVE=True)
    counts = counts_of(members, pieces, cols, BLOCK_ROWS)
    if IS_CORRECTED:
        wide = means.to(tl.float64) + messages(mailbox, number, splits, MOST, 1, WORDS)[0]
        mean = tl.sum(product(counts.to(tl.float64), wide)) / tl.sum(counts.to(tl.float64))
        deviations = (wide - mean).to(tl.float32)
        return of_row(mean.to(tl.float32)), of_row(tl.sum(squares + counts * deviations * deviations))
    else:  # in two steps, which take less time than one with a division in each of its rounds
        mean = mean_of(of_row(tl.sum(product(counts, means))), pieces.to(tl.float32) * cols)
        deviations = means - tl.sum(mean)
        return mean, of_row(tl.sum(squares + counts * deviations * deviations))


@triton.jit
def is_first():
    return tl.program_id(1) + tl.arange(0, 1) == 0


@triton.jit
def of_rows(numbers, COUNT: tl.constexpr):
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (of_row(numbers[k]),)  # noqa: RUF005
    return rows


@triton.jit
def let_loose(sums, COUNT: tl.constexpr):
    """COUNT sums, (1,) each, that were numbers in between, which lie in no registers in particular. Where nothing is sent,
    tiles would be laid out as what they are summed to, and each element computed by up to eight threads: backward of 8 x 64
    x 16 x 16 in bfloat16 would have 2,784 bytes of every thread in memory."""
    return of_rows(sums_of(sums, 0, COUNT), COUNT)


@triton.jit
def held_forward_kernel(
    operands, outputs, mailbox, statistic_ptrs, strides, sizes, statistics, pieces, inner, cols, eps, running_ptrs, factors,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, STATISTICS: tl.constexpr, HAS_RUNNING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    RECOMPUTES: tl.constexpr, IS_CORRECTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    splits = tl.num_programs(1)
    my, row_mask = my_pieces(pieces, BLOCK_ROWS)
    columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    count = of_row(counts_of(tl.program_id(1), pieces, cols, BLOCK_ROWS))
    WORDS: tl.constexpr = 2 if IS_CORRECTED else 1
    IS_WIDE: tl.constexpr = IS_CORRECTED and STATISTICS == 3  # the mean is a result itself
    HAS_LANES: tl.constexpr = not IS_CORRECTED and FULL_CHUNKS > 0 and CHUNKS >= MANY_CHUNKS
    number = 0
    if MOST > 1:
        number = last_message(mailbox, splits, WORDS) + 1
    for row in tl.range(tl.program_id(0), statistics, tl.num_programs(0), num_stages=STAGES):
        lines = lines_of(row, my, pieces, inner)
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
                off, total = sums_of((flat(off, row_mask), flat(squares, row_mask)), 1, 2)
                mean, total = corrected(rounded, total, off, count)
                low = rounded_off(rounded, mean_of(off, count), mean)
            else:
                total = total_of(squares, row_mask)
            if IS_CORRECTED and MOST > 1:
                send((low,), mailbox, number, splits, False, 1, WORDS)
        if RECOMPUTES:
            values = hold_row(values, HOLD, CHUNKS)
        if MOST > 1:
            send((mean, total), mailbox, number, splits, True, 0, WORDS, IS_POSITIVE=True)
            mean, total = merge_messages(mailbox, number, splits, pieces, cols, BLOCK_ROWS, MOST, IS_CORRECTED)
            number += 1
        else:
            mean, total = let_loose((mean, total), 2)
        variance = mean_of(total, pieces.to(tl.float32) * cols)
        found = (mean, reciprocal_sqrt(variance + eps, True), variance)
        keep_statistics(
            statistic_ptrs, running_ptrs, found, row + tl.arange(0, 1), is_first(), factors, STATISTICS, HAS_RUNNING
        )
        for chunk in tl.static_range(CHUNKS):
            place = places[chunk]
            of_chunk = PROLOGUE(values[chunk], columns[chunk], place) if RECOMPUTES else c[chunk]
            results = EPILOGUE(normalize(of_chunk, found, True), of_chunk, values[chunk], columns[chunk], place)
            STORE(outputs, results, strides, sizes, lines, place[1], row_mask[:, None] & place[3])


@triton.jit
def send_sums(sums, mailbox, number, splits, COUNT: tl.constexpr, A_WORD: tl.constexpr):
    """COUNT sums, (1,) each, A_WORD of them in each word: the second of two loses bits."""
    WORDS: tl.constexpr = (COUNT + A_WORD - 1) // A_WORD
    for word in tl.static_range(WORDS):
        if A_WORD == 2 and 2 * word + 1 < COUNT:
            send(sums[2 * word : 2 * word + 2], mailbox, number, splits, True, word, WORDS)
        else:
            send(sums[A_WORD * word : A_WORD * word + 1], mailbox, number, splits, False, word, WORDS)


@triton.jit
def receive_sums(mailbox, number, splits, COUNT: tl.constexpr, A_WORD: tl.constexpr, MOST: tl.constexpr):
    """COUNT sums of a row, (1,) each, from those of every program's part of it."""
    WORDS: tl.constexpr = (COUNT + A_WORD - 1) // A_WORD
    told = ()
    for word in tl.static_range(WORDS):
        first, second, _ = messages(mailbox, number, splits, MOST, word, WORDS)
        told = told + (first,)  # noqa: RUF005
        if A_WORD == 2 and 2 * word + 1 < COUNT:
            told = told + (second,)  # noqa: RUF005
    return of_rows(sums_of(told, 0, COUNT), COUNT)


@triton.jit
def sum_tiles(tiles, row_mask, COUNT: tl.constexpr):
    """COUNT sums, (1,) each."""
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (flat(tiles[k], row_mask),)  # noqa: RUF005
    return sums_of(rows, 1, COUNT)


@triton.jit
def sum_lines(lines, row_mask, COUNT: tl.constexpr):
    """The same of numbers of which each line has one."""
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (tl.where(row_mask, lines[k], 0.0),)  # noqa: RUF005
    return of_rows(sums_of(rows, 0, COUNT), COUNT)


@triton.jit
def as_tiles(sums, COUNT: tl.constexpr):
    """(1, 1) each."""
    tiles = ()
    for k in tl.static_range(COUNT):
        tiles = tiles + (sums[k][:, None],)  # noqa: RUF005
    return tiles


@triton.jit
def held_backward_kernel(
    operands, gradients, merged_ptrs, partials, mailbox, statistic_ptrs, strides, sizes, rows, statistics, pieces, inner,
    cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_LINES: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    ADD_FIRST: tl.constexpr, SETTLE: tl.constexpr, STORE_MERGED: tl.constexpr, STORE_FIRST: tl.constexpr,
    ACCUMULATE_LAST: tl.constexpr, STORE_LAST: tl.constexpr,
    FIRST_SUMS: tl.constexpr, LAST_SUMS: tl.constexpr, MERGED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr, MOST: tl.constexpr,
    RECOMPUTES: tl.constexpr, STAGES: tl.constexpr, IS_ALIKE: tl.constexpr, SENT: tl.constexpr, A_WORD: tl.constexpr,
):  # fmt: skip
    """IS_ALIKE: what the sums along lines are multiplied by is the same for all lines of a row, and so it is for the row's
    sums, which are fewer than their multiples. SENT: how many sums a program sends."""
    splits = tl.num_programs(1)
    my, row_mask = my_pieces(pieces, BLOCK_ROWS)
    columns = load_columns(0, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    count = of_row(pieces.to(tl.float32) * cols)
    number = 0
    if MOST > 1:
        number = last_message(mailbox, splits, (SENT + A_WORD - 1) // A_WORD) + 1
    for row in tl.range(tl.program_id(0), statistics, tl.num_programs(0), num_stages=STAGES):
        lines = lines_of(row, my, pieces, inner)
        one = row + tl.arange(0, 1)
        pair = load_statistics(statistic_ptrs, one, one >= 0, True)
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
        if RECOMPUTES:
            values = hold_row(values, HOLD, CHUNKS)
        if MOST > 1:
            send_sums(mine, mailbox, number, splits, SENT, A_WORD)
            mine = receive_sums(mailbox, number, splits, SENT, A_WORD, MOST)
            number += 1
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
