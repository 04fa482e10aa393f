"""Access pattern `team`: a row is shared by SPLITS programs that run at the same time, each with CHUNKS blocks of its
columns. They exchange the sums over their columns through global memory. They are persistent, as in `row.py`, and have two
rows at hand: a program sends its sums of one, and while they travel it finishes the row before, which it loads once more,
from L2, or has kept (KEEPS). In registers are what does not vary by row, the sums over rows, and one chunk. The
sums of forward are a mean and M2, which all merge in the same order."""

import triton
import triton.language as tl

from warpnorm.kernels.blocks import compute_row, hold_row, load_columns, load_rows, pack_kept, unpack_kept
from warpnorm.kernels.chain import let_next_begin
from warpnorm.kernels.masks import block_columns, rows_mask
from warpnorm.kernels.messages import (
    TWO_HALVES,
    ask,
    last_message,
    member,
    messages,
    messages_by_warps,
    of_row,
    product,
    send,
    team_number,
    teams,
)
from warpnorm.kernels.statistics import (
    add_terms,
    corrected,
    gradient,
    load_statistics,
    mean_and_squares,
    mean_of,
    merge_moments,
    normalize,
    reciprocal_sqrt,
    row_deviations,
    row_mean,
    row_total,
    start_walk,
    store_statistics,
    sum_terms,
)
from warpnorm.kernels.sums import sums_of


@triton.jit
def receive(mailbox, number, asked, SPLITS: tl.constexpr, IS_CENTERED: tl.constexpr):
    """The sums over the team, added in the same order by all."""
    MOST: tl.constexpr = triton.next_power_of_2(SPLITS)
    if IS_CENTERED:
        found = messages_by_warps(mailbox, number, SPLITS, asked, MOST)
        first, second, _ = found[0]
        if MOST == TWO_HALVES:
            first, second = first + found[1][0], second + found[1][1]
        first, second = sums_of((first, second), 0, 2)
        return of_row(first), of_row(second)
    else:
        return (of_row(tl.sum(messages(mailbox, number, SPLITS, asked, MOST)[0], 0)),)


@triton.jit
def receive_statistics(
    mailbox, number, asked, cols, eps, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_EVEN: tl.constexpr,
    PART: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Of a row, from the means and M2 of its parts, of PART columns each but for the last, or for none (IS_EVEN); or from
    their sums of squares."""
    MOST: tl.constexpr = triton.next_power_of_2(SPLITS)
    HALVES: tl.constexpr = 2 if MOST == TWO_HALVES else 1
    COLS: tl.constexpr = SPLITS * PART if IS_EVEN else 0
    if IS_CENTERED:
        found = messages_by_warps(mailbox, number, SPLITS, asked, MOST, IS_POSITIVE=True)
        if IS_CORRECTED:
            mean, squares = corrected_moments(found, cols, PART, HALVES)
        elif COLS > 0 and SPLITS == MOST and MOST <= TWO_HALVES:
            mean, squares = even_moments(found, PART, SPLITS, HALVES)
        else:
            mean, squares = merged_moments(found, cols, PART, HALVES)
        return mean, reciprocal_sqrt(mean_of(squares, cols, COLS) + eps)
    else:
        squares = of_row(tl.sum(messages(mailbox, number, SPLITS, asked, MOST)[0], 0))
        return (reciprocal_sqrt(mean_of(squares, cols, COLS) + eps),)


@triton.jit
def ask_for(mailbox, number, SPLITS: tl.constexpr, IS_CENTERED: tl.constexpr):
    """What `receive` waits for, as far as it has come by now."""
    return ask(mailbox, number, SPLITS, triton.next_power_of_2(SPLITS), IS_CENTERED)


@triton.jit
def ask_nothing(mailbox, number, SPLITS: tl.constexpr, IS_CENTERED: tl.constexpr):
    return ()


@triton.jit
def part_counts(members, cols, PART: tl.constexpr):
    return tl.minimum(tl.maximum(cols - members * PART, 0), PART).to(tl.float32)


@triton.jit
def corrected_moments(found, cols, PART: tl.constexpr, HALVES: tl.constexpr):
    """(mean, M2), and what the mean is rounded off by put right."""
    total = product(part_counts(found[0][2], cols, PART), found[0][0])
    if HALVES == 2:
        total += product(part_counts(found[1][2], cols, PART), found[1][0])
    mean = mean_of(of_row(tl.sum(total, 0)), cols)
    middle = tl.sum(mean)
    off, squares = tl.zeros_like(total), tl.zeros_like(total)
    for half in tl.static_range(HALVES):
        first, second, members = found[half]
        deviation = first - middle
        weighted = product(part_counts(members, cols, PART), deviation)
        off += weighted
        squares += second + weighted * deviation
    off, squares = sums_of((off, squares), 0, 2)
    return corrected(mean, of_row(squares), of_row(off), cols)


@triton.jit
def merged_moments(found, cols, PART: tl.constexpr, HALVES: tl.constexpr):
    """(mean, M2), where parts may be smaller or empty."""
    count, mean, squares = part_counts(found[0][2], cols, PART), found[0][0], found[0][1]
    if HALVES == 2:
        there = part_counts(found[1][2], cols, PART)
        count, mean, squares = merge_moments(count, mean, squares, there, found[1][0], found[1][1])
    _, mean, squares = tl.reduce((count, mean, squares), 0, merge_moments)
    return of_row(mean), of_row(squares)


@triton.jit
def even_moments(found, PART: tl.constexpr, SPLITS: tl.constexpr, HALVES: tl.constexpr):
    """(mean, M2) where all parts are equal. Two sums take less time than one with a division in each of its rounds:
    LayerNorm at 131072 145.8 microseconds instead of 147.4. Equal means give themselves."""
    total = found[0][0] * (1.0 / SPLITS)
    if HALVES == 2:
        total += found[1][0] * (1.0 / SPLITS)
    mean = tl.sum(total, 0)
    squares = tl.zeros_like(total)
    for half in tl.static_range(HALVES):
        deviation = found[half][0] - mean
        squares += found[half][1] + PART * deviation * deviation
    return of_row(mean), of_row(tl.sum(squares, 0))


@triton.jit
def begin_forward(
    row, operands, columns, mailbox, number, strides, sizes, rows, cols,
    LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, IS_CENTERED: tl.constexpr,
    IS_CORRECTED: tl.constexpr, IS_AT_ONCE: tl.constexpr, RECOMPUTES: tl.constexpr, PACK_ROW: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Loads a part of a row and sends its mean and M2, or its sum of squares. Returns what it keeps of it."""
    FULL_CHUNKS: tl.constexpr = CHUNKS if IS_EXACT else 0
    PART: tl.constexpr = BLOCK_COLS * CHUNKS
    row_offsets = row + tl.arange(0, 1)
    row_mask = rows_mask(row_offsets, rows)
    values, places = load_rows(
        member() * CHUNKS, row_offsets, row_mask, row_offsets, operands, strides, sizes, cols,
        LOAD_ROWS, BLOCK_COLS, CHUNKS, FULL_CHUNKS,
    )  # fmt: skip
    c = compute_row(values, columns, places, PROLOGUE, CHUNKS)
    if IS_CENTERED:
        if IS_AT_ONCE:
            sums = mean_and_squares(c, places, row_mask, CHUNKS, CHUNKS)
        else:
            count = tl.minimum(tl.maximum(cols - member() * PART, 1), PART)  # a part may be empty
            mean = row_mean(c, places, count, True, CHUNKS, False, IS_CORRECTED)
            if RECOMPUTES:
                c = compute_row(hold_row(values, HOLD, CHUNKS), columns, places, PROLOGUE, CHUNKS)
            off, squares = row_deviations(c, mean, places, CHUNKS)
            if IS_CORRECTED:
                off, squares = sums_of((off, squares), 1, 2)
                sums = corrected(mean, squares, off, count)
            else:
                sums = (mean, tl.sum(squares, 1))
        send(sums, mailbox, number, SPLITS, True, IS_POSITIVE=True)
    else:
        send((row_total(c, places, False, CHUNKS, IS_CORRECTED),), mailbox, number, SPLITS, False)
    return keep_row(values, PACK_ROW, KEEPS, CHUNKS)


@triton.jit
def keep_row(values, PACK_ROW: tl.constexpr, KEEPS: tl.constexpr, CHUNKS: tl.constexpr):
    kept = ()
    for chunk in tl.static_range(CHUNKS if KEEPS else 0):
        kept += (PACK_ROW(values[chunk]),)
    return kept


@triton.jit
def finish_forward(
    row, kept, operands, outputs, columns, mailbox, number, asked, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_ROWS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr, IS_CENTERED: tl.constexpr,
    IS_CORRECTED: tl.constexpr, UNPACK_ROW: tl.constexpr, KEEPS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_EVEN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Receives the statistics of a row and writes its results."""
    row_offsets = row + tl.arange(0, 1)
    row_mask = rows_mask(row_offsets, rows)
    statistics = receive_statistics(
        mailbox, number, asked, cols, eps, IS_CENTERED, IS_CORRECTED, IS_EVEN, BLOCK_COLS * CHUNKS, SPLITS
    )
    store_statistics(statistic_ptrs, statistics, row_offsets, row_mask & (member() == 0), IS_CENTERED)
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(member() * CHUNKS + chunk, cols, IS_EXACT, BLOCK_COLS)
        mask = row_mask[:, None] & col_mask[None, :]
        place = (row_offsets, col_offsets, cols, mask)
        if KEEPS:
            values = UNPACK_ROW(kept[chunk])
        else:
            values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        c = PROLOGUE(values, columns[chunk], place)
        results = EPILOGUE(normalize(c, statistics, IS_CENTERED), c, values, columns[chunk], place)
        STORE(outputs, results, strides, sizes, row_offsets, col_offsets, mask)


@triton.jit
def prefetch_part(
    row, end, operands, strides, sizes, cols, PREFETCH: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Has memory bring this program's part of a row to L2 before it is loaded; where there is no such row, of the last."""
    PART: tl.constexpr = BLOCK_COLS * CHUNKS
    PREFETCH(operands, strides, sizes, tl.minimum(row, end - 1) + tl.arange(0, 1), member() * PART, cols, PART)


@triton.jit
def walk_forward(
    operands, outputs, mailbox, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_AT_ONCE: tl.constexpr,
    RECOMPUTES: tl.constexpr, PACK_ROW: tl.constexpr, UNPACK_ROW: tl.constexpr, KEEPS: tl.constexpr, PREFETCH: tl.constexpr,
    ASK: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_EVEN: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, programs = team_number().to(rows.dtype), teams()
    FULL_CHUNKS: tl.constexpr = CHUNKS if IS_EXACT else 0
    first = member() * CHUNKS
    columns = load_columns(first, operands, strides, sizes, cols, LOAD_COLUMNS, BLOCK_COLS, CHUNKS, FULL_CHUNKS)
    number = last_message(mailbox, SPLITS) + 1
    kept = begin_forward(
        row, operands, columns, mailbox, number, strides, sizes, rows, cols, LOAD_ROWS, HOLD, PROLOGUE, IS_CENTERED,
        IS_CORRECTED, IS_AT_ONCE, RECOMPUTES, PACK_ROW, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT, SPLITS,
    )  # fmt: skip
    for next_row in tl.range(row + programs, rows, programs, num_stages=STAGES):
        asked = ASK(mailbox, number, SPLITS, IS_CENTERED)
        prefetch_part(next_row + programs, rows, operands, strides, sizes, cols, PREFETCH, BLOCK_COLS, CHUNKS)
        next_kept = begin_forward(
            next_row, operands, columns, mailbox, number + 1, strides, sizes, rows, cols, LOAD_ROWS, HOLD, PROLOGUE,
            IS_CENTERED, IS_CORRECTED, IS_AT_ONCE, RECOMPUTES, PACK_ROW, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT, SPLITS,
        )  # fmt: skip
        finish_forward(
            next_row - programs, kept, operands, outputs, columns, mailbox, number, asked, statistic_ptrs, strides, sizes,
            rows, cols, eps, LOAD_ROWS, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, UNPACK_ROW, KEEPS, BLOCK_COLS,
            CHUNKS, IS_EXACT, IS_EVEN, SPLITS,
        )  # fmt: skip
        number, kept = number + 1, next_kept
    # Not carried through the loop, whose loads would not be pipelined then
    row += (rows - 1 - row) // programs * programs
    finish_forward(
        row, kept, operands, outputs, columns, mailbox, number, (), statistic_ptrs, strides, sizes, rows, cols, eps,
        LOAD_ROWS, PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, UNPACK_ROW, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT,
        IS_EVEN, SPLITS,
    )  # fmt: skip


@triton.jit
def is_full(cols, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, HAS_COPY: tl.constexpr):
    """Whether all columns of this program's part are there: then it needs no masks, which are a third of the instructions
    where elements are moved alone. Of a row that does not fill its team that is so of most parts. HAS_COPY: whether anybody
    asks, so that there is a second copy of the walk."""
    return IS_EXACT or (HAS_COPY and (member() + 1) * (BLOCK_COLS * CHUNKS) <= cols)


@triton.jit
def team_forward_kernel(
    operands, outputs, mailbox, statistic_ptrs, strides, sizes, rows, cols, eps,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    STORE: tl.constexpr, IS_CENTERED: tl.constexpr, IS_CORRECTED: tl.constexpr, RECOMPUTES: tl.constexpr,
    PACK_ROW: tl.constexpr, UNPACK_ROW: tl.constexpr, KEEPS: tl.constexpr, PREFETCH: tl.constexpr, ASK: tl.constexpr,
    BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, HAS_COPY: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    IS_AT_ONCE: tl.constexpr = IS_EXACT and not IS_CORRECTED
    if is_full(cols, BLOCK_COLS, CHUNKS, IS_EXACT, HAS_COPY):
        walk_forward(
            operands, outputs, mailbox, statistic_ptrs, strides, sizes, rows, cols, eps, LOAD_COLUMNS, LOAD_ROWS, HOLD,
            PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, IS_AT_ONCE, RECOMPUTES, PACK_ROW, UNPACK_ROW, KEEPS,
            PREFETCH, ASK, BLOCK_COLS, CHUNKS, True, IS_EXACT, SPLITS, STAGES,
        )  # fmt: skip
    else:
        walk_forward(
            operands, outputs, mailbox, statistic_ptrs, strides, sizes, rows, cols, eps, LOAD_COLUMNS, LOAD_ROWS, HOLD,
            PROLOGUE, EPILOGUE, STORE, IS_CENTERED, IS_CORRECTED, IS_AT_ONCE, RECOMPUTES, PACK_ROW, UNPACK_ROW, KEEPS,
            PREFETCH, ASK, BLOCK_COLS, CHUNKS, False, False, SPLITS, STAGES,
        )  # fmt: skip


@triton.jit
def begin_row(
    row, operands, columns, mailbox, number, statistic_ptrs, strides, sizes, rows, cols,
    LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, KEEP: tl.constexpr, ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Loads a row and sends its sums; returns its statistics, and what it keeps of its values, or of what was computed of
    them."""
    row_offsets = row + tl.arange(0, 1)
    row_mask = rows_mask(row_offsets, rows)
    numbers = ROW_NUMBERS(row_offsets, sizes, rows)
    statistics = load_statistics(statistic_ptrs, numbers, row_mask, IS_CENTERED)
    state = start_walk(tl.zeros((1, BLOCK_COLS), COMPUTE), IS_CENTERED)
    kept = ()
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(member() * CHUNKS + chunk, cols, IS_EXACT, BLOCK_COLS)
        mask = row_mask[:, None] & col_mask[None, :]
        place = (numbers, col_offsets, cols, mask)
        values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        c = PROLOGUE(values, columns[chunk], place)
        xhat = tl.where(mask, normalize(c, statistics, IS_CENTERED), 0.0)
        grad_xhat = EPILOGUE_VJP(xhat, c, values, columns[chunk], place)[0]
        state = add_terms(state, grad_xhat, xhat, IS_CENTERED)
        computed = pack_kept(KEEP(xhat, c, values, columns[chunk], place))
        kept += ((HOLD(values) if KEEPS else (), computed),)
    send(sum_terms(state, IS_CENTERED), mailbox, number, SPLITS, IS_CENTERED)
    return statistics, kept


@triton.jit
def finish_row(
    row, statistics, kept, accumulators, operands, gradients, partials, columns, mailbox, number, asked, strides, sizes,
    rows, cols,
    LOAD_ROWS: tl.constexpr, ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr,
    PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr, STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr,
    IS_CENTERED: tl.constexpr, KEEPS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_EARLY: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Receives the sums of a row and writes its gradients."""
    # See `row.py`. LayerNorm at 262144, in one block: 265 microseconds instead of 248
    COLS: tl.constexpr = BLOCK_COLS * CHUNKS * SPLITS if IS_EVEN and (CHUNKS > 1 or not KEEPS) else 0
    row_offsets = row + tl.arange(0, 1)
    row_mask = rows_mask(row_offsets, rows)
    numbers = ROW_NUMBERS(row_offsets, sizes, rows)
    again = load_rows(
        member() * CHUNKS, row_offsets, row_mask, numbers, operands, strides, sizes, cols, LOAD_ROWS, BLOCK_COLS,
        CHUNKS if IS_EARLY else 0, CHUNKS if IS_EXACT else 0,
    )[0]  # fmt: skip
    sums = receive(mailbox, number, asked, SPLITS, IS_CENTERED)
    added = ()
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(member() * CHUNKS + chunk, cols, IS_EXACT, BLOCK_COLS)
        mask = row_mask[:, None] & col_mask[None, :]
        place = (numbers, col_offsets, cols, mask)
        if KEEPS:
            values = kept[chunk][0]
        elif IS_EARLY:
            values = again[chunk]
        else:
            values = LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask)
        values += unpack_kept(kept[chunk][1])
        c = PROLOGUE(values, columns[chunk], place)
        xhat = tl.where(mask, normalize(c, statistics, IS_CENTERED), 0.0)
        from_epilogue = EPILOGUE_VJP(xhat, c, values, columns[chunk], place)
        grad_c = gradient(from_epilogue[0], xhat, sums, statistics, cols, IS_CENTERED, COLS)
        results = PROLOGUE_VJP(grad_c, from_epilogue, values, columns[chunk], place)
        STORE(gradients, results, strides, sizes, row_offsets, col_offsets, mask)
        part = member() * CHUNKS + chunk
        STORE_ROW_SUMS(partials, results, strides, sizes, row_offsets, row_mask, mask, part, rows)
        added += (ACCUMULATE(accumulators[chunk], results, mask),)
    return added


@triton.jit
def walk_share(
    share, shares, group_rows, number, operands, columns, gradients, partials, mailbox, statistic_ptrs, strides, sizes,
    rows, cols,
    LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, KEEP: tl.constexpr, ROW_NUMBERS: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr, STORE_ROW_SUMS: tl.constexpr,
    ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr, ACCUMULATORS: tl.constexpr, IS_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr, KEEPS: tl.constexpr, PREFETCH: tl.constexpr, ASK: tl.constexpr, IS_EARLY: tl.constexpr,
    BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_EVEN: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The share of one team in the rows of a group; returns the number of its next message."""
    row = (share // shares) * group_rows + share % shares
    end = (share // shares + 1) * group_rows
    accumulators = ((tl.zeros((1, BLOCK_COLS), COMPUTE),) * ACCUMULATORS,) * CHUNKS
    statistics, kept = begin_row(
        row, operands, columns, mailbox, number, statistic_ptrs, strides, sizes, rows, cols, LOAD_ROWS, HOLD, KEEP,
        ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, IS_CENTERED, COMPUTE, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT, SPLITS,
    )  # fmt: skip
    for next_row in tl.range(row + shares, end, shares, num_stages=STAGES):
        asked = ASK(mailbox, number, SPLITS, IS_CENTERED)
        prefetch_part(next_row + shares, end, operands, strides, sizes, cols, PREFETCH, BLOCK_COLS, CHUNKS)
        next_statistics, next_kept = begin_row(
            next_row, operands, columns, mailbox, number + 1, statistic_ptrs, strides, sizes, rows, cols, LOAD_ROWS, HOLD,
            KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, IS_CENTERED, COMPUTE, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT, SPLITS,
        )  # fmt: skip
        accumulators = finish_row(
            next_row - shares, statistics, kept, accumulators, operands, gradients, partials, columns, mailbox, number,
            asked, strides, sizes, rows, cols, LOAD_ROWS, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
            STORE_ROW_SUMS, ACCUMULATE, IS_CENTERED, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT, IS_EVEN, IS_EARLY, SPLITS,
        )  # fmt: skip
        number, statistics, kept = number + 1, next_statistics, next_kept
    row += (end - 1 - row) // shares * shares  # not carried through the loop, whose loads would not be pipelined then
    accumulators = finish_row(
        row, statistics, kept, accumulators, operands, gradients, partials, columns, mailbox, number, (), strides, sizes,
        rows, cols, LOAD_ROWS, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE, STORE_ROW_SUMS, ACCUMULATE,
        IS_CENTERED, KEEPS, BLOCK_COLS, CHUNKS, IS_EXACT, IS_EVEN, IS_EARLY, SPLITS,
    )  # fmt: skip
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(member() * CHUNKS + chunk, cols, IS_EXACT, BLOCK_COLS)
        slot = (share * SPLITS + member()) * CHUNKS + chunk
        STORE_PARTIALS(partials, accumulators[chunk], share, slot, col_offsets, col_mask, cols)
    return number + 1


@triton.jit
def walk_backward(
    operands, gradients, partials, mailbox, statistic_ptrs, strides, sizes, rows, groups, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, KEEP: tl.constexpr, ROW_NUMBERS: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr, ACCUMULATORS: tl.constexpr,
    IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr, KEEPS: tl.constexpr, PREFETCH: tl.constexpr, ASK: tl.constexpr,
    IS_EARLY: tl.constexpr, HAS_GROUPS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    IS_EXACT: tl.constexpr, IS_EVEN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = team_number(), teams()
    columns = ()
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(member() * CHUNKS + chunk, cols, IS_EXACT, BLOCK_COLS)
        columns += (LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask),)
    number = last_message(mailbox, SPLITS) + 1
    if HAS_GROUPS:  # which may be more than there are teams: each takes several
        shares = tl.maximum(programs // groups, 1)  # teams that share the rows of a group
        for share in tl.range(program, groups * shares, programs):
            number = walk_share(
                share, shares, rows // groups, number, operands, columns, gradients, partials, mailbox, statistic_ptrs,
                strides, sizes, rows, cols, LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
                STORE_ROW_SUMS, ACCUMULATE, STORE_PARTIALS, ACCUMULATORS, IS_CENTERED, COMPUTE, KEEPS, PREFETCH, ASK,
                IS_EARLY, BLOCK_COLS, CHUNKS, IS_EXACT, IS_EVEN, SPLITS, STAGES,
            )  # fmt: skip
    else:
        walk_share(
            program, programs, rows, number, operands, columns, gradients, partials, mailbox, statistic_ptrs, strides,
            sizes, rows, cols, LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE,
            STORE_ROW_SUMS, ACCUMULATE, STORE_PARTIALS, ACCUMULATORS, IS_CENTERED, COMPUTE, KEEPS, PREFETCH, ASK, IS_EARLY,
            BLOCK_COLS, CHUNKS, IS_EXACT, IS_EVEN, SPLITS, STAGES,
        )  # fmt: skip


@triton.jit
def team_backward_kernel(
    operands, gradients, partials, mailbox, statistic_ptrs, strides, sizes, rows, groups, cols,
    LOAD_COLUMNS: tl.constexpr, LOAD_ROWS: tl.constexpr, HOLD: tl.constexpr, KEEP: tl.constexpr, ROW_NUMBERS: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE_VJP: tl.constexpr, PROLOGUE_VJP: tl.constexpr, STORE: tl.constexpr,
    STORE_ROW_SUMS: tl.constexpr, ACCUMULATE: tl.constexpr, STORE_PARTIALS: tl.constexpr, ACCUMULATORS: tl.constexpr,
    IS_CENTERED: tl.constexpr, COMPUTE: tl.constexpr, KEEPS: tl.constexpr, PREFETCH: tl.constexpr, ASK: tl.constexpr,
    IS_EARLY: tl.constexpr, HAS_GROUPS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    IS_EXACT: tl.constexpr, HAS_COPY: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    if is_full(cols, BLOCK_COLS, CHUNKS, IS_EXACT, HAS_COPY):
        walk_backward(
            operands, gradients, partials, mailbox, statistic_ptrs, strides, sizes, rows, groups, cols, LOAD_COLUMNS,
            LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE, STORE_ROW_SUMS, ACCUMULATE,
            STORE_PARTIALS, ACCUMULATORS, IS_CENTERED, COMPUTE, KEEPS, PREFETCH, ASK, IS_EARLY, HAS_GROUPS, BLOCK_COLS,
            CHUNKS, True, IS_EXACT, SPLITS, STAGES,
        )  # fmt: skip
    else:
        walk_backward(
            operands, gradients, partials, mailbox, statistic_ptrs, strides, sizes, rows, groups, cols, LOAD_COLUMNS,
            LOAD_ROWS, HOLD, KEEP, ROW_NUMBERS, PROLOGUE, EPILOGUE_VJP, PROLOGUE_VJP, STORE, STORE_ROW_SUMS, ACCUMULATE,
            STORE_PARTIALS, ACCUMULATORS, IS_CENTERED, COMPUTE, KEEPS, PREFETCH, ASK, IS_EARLY, HAS_GROUPS, BLOCK_COLS,
            CHUNKS, False, False, SPLITS, STAGES,
        )  # fmt: skip
    let_next_begin(HAS_NEXT)
