"""Kernels of `odd_rows.py`: pattern `team` for rows that begin at any element. A team takes every so many-th row, and if
that is a multiple of eight, all its rows begin at the same place in a vector of eight halves. So it reads and writes whole
vectors, as they lie in memory: tiles of words, (vectors, 4), with two halves in each. Statistics of forward are of columns,
not of vectors, so that a row's bits do not depend on where it begins: there vectors are shifted, beside the next ones."""

import triton
import triton.language as tl

from warpnorm.kernels.messages import last_message, messages, of_row, product, send
from warpnorm.kernels.statistics import mean_of, reciprocal_sqrt
from warpnorm.kernels.sums import sums_of

FUNNEL = tl.constexpr("shf.r.wrap.b32 $0, $1, $2, $3;")
PACK = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@triton.jit
def low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def packed(first, second, HAS_ASM: tl.constexpr):
    """Two tiles of float32, rounded, as one of words."""
    if HAS_ASM:
        return tl.inline_asm_elementwise(PACK, "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    else:
        below = first.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        above = second.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        return (below | (above << 16)).to(tl.int32, bitcast=True)


@triton.jit
def funnel(below, above, shift, HAS_ASM: tl.constexpr):
    """The 32 bits from `shift`, 0 or 16, on."""
    if HAS_ASM:
        return tl.inline_asm_elementwise(
            FUNNEL, "=r,r,r,r", [below, above, below * 0 + shift], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        apart = ((below >> 16) & 0xFFFF) | (above << 16)
        return tl.where(shift > 0, apart, below)


@triton.jit
def four(words):
    """(n, 4) as four of (n,)."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def shifted(here, there, shift, HAS_ASM: tl.constexpr):
    """Eight halves from `shift` of them on, of one vector and the next: four of (n,) words."""
    a, b, c, d = four(here)
    e, f, g, h = four(there)
    by_four, by_two, by_one = (shift & 4) != 0, (shift & 2) != 0, (shift & 1) * 16
    a, b, c = tl.where(by_four, c, a), tl.where(by_four, d, b), tl.where(by_four, e, c)
    d, e, f = tl.where(by_four, f, d), tl.where(by_four, g, e), tl.where(by_four, h, f)
    a, b, c = tl.where(by_two, b, a), tl.where(by_two, c, b), tl.where(by_two, d, c)
    d, e = tl.where(by_two, e, d), tl.where(by_two, f, e)
    return (
        funnel(a, b, by_one, HAS_ASM), funnel(b, c, by_one, HAS_ASM), funnel(c, d, by_one, HAS_ASM),
        funnel(d, e, by_one, HAS_ASM),
    )  # fmt: skip


@triton.jit
def vectors_of(row, cols, shift, VECTORS: tl.constexpr):
    """This program's in that row, the first of which begins `shift` halves before it does."""
    return (row * cols - shift) // 8 + (tl.program_id(1) * VECTORS + tl.arange(0, VECTORS))


@triton.jit
def words_of(vectors):
    return (vectors * 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def load_words(ptr, vectors, limit, IS_FULL: tl.constexpr):
    """Of vectors, of which the tensor has `limit`."""
    if IS_FULL:
        return tl.load(ptr + words_of(vectors))
    else:
        return tl.load(ptr + words_of(vectors), mask=(vectors < limit)[:, None], other=0)


@triton.jit
def columns_of(shift, VECTORS: tl.constexpr):
    """Those of the lower halves."""
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    return (vector * 8 - shift)[:, None] + 2 * tl.arange(0, 4)[None, :]


@triton.jit
def load_halves(ptr, columns, cols):
    """Of a parameter, as they stand beside the vectors: lower and upper ones."""
    below = tl.load(ptr + columns, mask=(columns >= 0) & (columns < cols), other=0.0).to(tl.float32)
    above = tl.load(ptr + columns + 1, mask=(columns >= -1) & (columns + 1 < cols), other=0.0).to(tl.float32)
    return below, above


@triton.jit
def store_edges(
    words, halves, vectors, row, below, above, columns, cols, shift, VECTORS: tl.constexpr, HAS_ASM: tl.constexpr
):
    """Whole vectors at once; of those that other rows have a part in, one by one what is this row's."""
    start = (tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)) * 8 - shift
    is_whole = ((start >= 0) & (start + 7 < cols))[:, None]
    tl.store(words + words_of(vectors), packed(below, above, HAS_ASM), mask=is_whole)
    place = row * cols + columns
    tl.store(halves + place, below.to(tl.bfloat16), mask=(columns >= 0) & (columns < cols) & ~is_whole)
    tl.store(halves + place + 1, above.to(tl.bfloat16), mask=(columns >= -1) & (columns + 1 < cols) & ~is_whole)


@triton.jit
def begin_forward(
    row, x_words, mailbox, number, cols, shift, limit, IS_FULL: tl.constexpr, IS_CENTERED: tl.constexpr,
    VECTORS: tl.constexpr, SPLITS: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    vectors = vectors_of(row, cols, shift, VECTORS)
    here = load_words(x_words, vectors, limit, IS_FULL)
    there = load_words(x_words, vectors + 1, limit, IS_FULL)
    words = shifted(here, there, shift, HAS_ASM)
    left = cols - (tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)) * 8  # columns, from each vector's first on
    PART: tl.constexpr = VECTORS * 8
    total = tl.zeros((VECTORS,), tl.float32)
    for k in tl.static_range(4):
        below, above = low(words[k]), high(words[k])
        if not IS_FULL:
            below, above = tl.where(left > 2 * k, below, 0.0), tl.where(left > 2 * k + 1, above, 0.0)
        total += below + above if IS_CENTERED else below * below + above * above
    if IS_CENTERED:
        count = tl.minimum(tl.maximum(cols - tl.program_id(1) * PART, 1), PART)
        mean = mean_of(of_row(tl.sum(total)), count, PART if IS_FULL else 0)
        middle = tl.sum(mean)
        squares = tl.zeros((VECTORS,), tl.float32)
        for k in tl.static_range(4):
            below, above = low(words[k]) - middle, high(words[k]) - middle
            if not IS_FULL:
                below, above = tl.where(left > 2 * k, below, 0.0), tl.where(left > 2 * k + 1, above, 0.0)
            squares += below * below + above * above
        send((mean, of_row(tl.sum(squares))), mailbox, number, SPLITS, True, IS_POSITIVE=True)
    else:
        send((of_row(tl.sum(total)),), mailbox, number, SPLITS, False)


@triton.jit
def finish_forward(
    row, x_words, y_words, y_halves, weight, bias, columns, mailbox, number, cols, eps, shift, limit,
    IS_FULL: tl.constexpr, IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """IS_FULL: every vector is this row's alone."""
    MOST: tl.constexpr = triton.next_power_of_2(SPLITS)
    PART: tl.constexpr = VECTORS * 8
    first, second, members = messages(mailbox, number, SPLITS, MOST, IS_POSITIVE=IS_CENTERED)[0]
    middle = 0.0
    if IS_CENTERED:
        count = tl.minimum(tl.maximum(cols - members * PART, 0), PART).to(tl.float32)
        base = tl.sum(tl.where(members == 0, first, 0.0), 0)
        middle = base + tl.sum(mean_of(of_row(tl.sum(product(count, first - base), 0)), cols))
        deviation = first - middle
        squares = of_row(tl.sum(second + product(count, deviation) * deviation, 0))
    else:
        squares = of_row(tl.sum(first, 0))
    rstd = tl.sum(reciprocal_sqrt(mean_of(squares, cols) + eps))
    vectors = vectors_of(row, cols, shift, VECTORS)
    offsets = words_of(vectors)
    words = load_words(x_words, vectors, limit, IS_FULL)
    below = (low(words) - middle) * rstd * weight[0] + bias[0]
    above = (high(words) - middle) * rstd * weight[1] + bias[1]
    if IS_FULL:
        tl.store(y_words + offsets, packed(below, above, HAS_ASM))
    else:
        store_edges(y_words, y_halves, vectors, row, below, above, columns, cols, shift, VECTORS, HAS_ASM)


@triton.jit
def walk_forward(
    x_words, y_words, y_halves, weight_ptr, bias_ptr, mailbox, rows, cols, eps, limit,
    IS_FULL: tl.constexpr, IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    HAS_ASM: tl.constexpr,
):  # fmt: skip
    row, teams = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    shift = ((row * cols) % 8).to(tl.int32)
    columns = columns_of(shift, VECTORS)
    weight, bias = load_halves(weight_ptr, columns, cols), (0.0, 0.0)
    if IS_CENTERED:
        bias = load_halves(bias_ptr, columns, cols)
    number = last_message(mailbox, SPLITS) + 1
    begin_forward(row, x_words, mailbox, number, cols, shift, limit, IS_FULL, IS_CENTERED, VECTORS, SPLITS, HAS_ASM)
    for next_row in tl.range(row + teams, rows, teams, num_stages=STAGES):
        begin_forward(
            next_row, x_words, mailbox, number + 1, cols, shift, limit, IS_FULL, IS_CENTERED, VECTORS, SPLITS, HAS_ASM
        )
        finish_forward(
            next_row - teams, x_words, y_words, y_halves, weight, bias, columns, mailbox, number, cols, eps, shift, limit,
            IS_FULL, IS_CENTERED, VECTORS, SPLITS, HAS_ASM,
        )  # fmt: skip
        number += 1
    row += (rows - 1 - row) // teams * teams
    finish_forward(
        row, x_words, y_words, y_halves, weight, bias, columns, mailbox, number, cols, eps, shift, limit,
        IS_FULL, IS_CENTERED, VECTORS, SPLITS, HAS_ASM,
    )  # fmt: skip


@triton.jit
def team_odd_forward_kernel(
    x_words, y_words, y_halves, weight_ptr, bias_ptr, mailbox, rows, cols, eps, limit,
    IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """The first program of a team shares its first vector with the row before; the last has fewer columns than the others,
    by at least eight."""
    part = tl.program_id(1)
    if (part > 0) & ((part + 1) * (VECTORS * 8) <= cols):
        walk_forward(
            x_words, y_words, y_halves, weight_ptr, bias_ptr, mailbox, rows, cols, eps, limit,
            True, IS_CENTERED, VECTORS, SPLITS, STAGES, HAS_ASM,
        )  # fmt: skip
    else:
        walk_forward(
            x_words, y_words, y_halves, weight_ptr, bias_ptr, mailbox, rows, cols, eps, limit,
            False, IS_CENTERED, VECTORS, SPLITS, STAGES, HAS_ASM,
        )  # fmt: skip


@triton.jit
def normalized(words, middle, rstd, columns, cols, IS_FULL: tl.constexpr):
    below, above = (low(words) - middle) * rstd, (high(words) - middle) * rstd
    if not IS_FULL:
        below = tl.where((columns >= 0) & (columns < cols), below, 0.0)
        above = tl.where((columns >= -1) & (columns + 1 < cols), above, 0.0)
    return below, above


@triton.jit
def halves_in_row(words, columns, cols, IS_FULL: tl.constexpr):
    below, above = low(words), high(words)
    if not IS_FULL:
        below = tl.where((columns >= 0) & (columns < cols), below, 0.0)
        above = tl.where((columns >= -1) & (columns + 1 < cols), above, 0.0)
    return below, above


@triton.jit
def begin_backward(
    row, x_words, dy_words, mean_ptr, rstd_ptr, weight, columns, mailbox, number, cols, shift, limit,
    IS_FULL: tl.constexpr, IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """In the order of vectors: backward need not give the same bits wherever a row begins."""
    vectors = vectors_of(row, cols, shift, VECTORS)
    x, dy = load_words(x_words, vectors, limit, IS_FULL), load_words(dy_words, vectors, limit, IS_FULL)
    rstd, middle = tl.load(rstd_ptr + row), 0.0
    if IS_CENTERED:
        middle = tl.load(mean_ptr + row)
    below, above = normalized(x, middle, rstd, columns, cols, IS_FULL)
    of_below, of_above = halves_in_row(dy, columns, cols, IS_FULL)
    of_below, of_above = of_below * weight[0], of_above * weight[1]
    slope = of_below * below + of_above * above
    if IS_CENTERED:
        slope, offset = sums_of((tl.sum(slope, 1), tl.sum(of_below + of_above, 1)), 0, 2)
        send((of_row(slope), of_row(offset)), mailbox, number, SPLITS, True)
    else:
        send((of_row(tl.sum(slope)),), mailbox, number, SPLITS, False)


@triton.jit
def finish_backward(
    row, x_words, dy_words, dx_words, dx_halves, mean_ptr, rstd_ptr, weight, sums, columns, mailbox, number, cols, shift,
    limit, IS_FULL: tl.constexpr, IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_ASM: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = triton.next_power_of_2(SPLITS)
    slope, offset = added(messages(mailbox, number, SPLITS, MOST), MOST)
    if IS_CENTERED:
        slope, offset = sums_of((slope, offset), 0, 2)
        offset = tl.sum(mean_of(of_row(offset), cols))
    else:
        slope, offset = tl.sum(slope), 0.0
    slope = tl.sum(mean_of(of_row(slope), cols))
    vectors = vectors_of(row, cols, shift, VECTORS)
    offsets = words_of(vectors)
    x, dy = load_words(x_words, vectors, limit, IS_FULL), load_words(dy_words, vectors, limit, IS_FULL)
    rstd, middle = tl.load(rstd_ptr + row), 0.0
    if IS_CENTERED:
        middle = tl.load(mean_ptr + row)
    below, above = normalized(x, middle, rstd, columns, cols, IS_FULL)
    of_below, of_above = halves_in_row(dy, columns, cols, IS_FULL)
    dx_below = (of_below * weight[0] - offset - below * slope) * rstd
    dx_above = (of_above * weight[1] - offset - above * slope) * rstd
    if IS_FULL:
        tl.store(dx_words + offsets, packed(dx_below, dx_above, HAS_ASM))
    else:
        store_edges(dx_words, dx_halves, vectors, row, dx_below, dx_above, columns, cols, shift, VECTORS, HAS_ASM)
    dw_below, dw_above, db_below, db_above = sums
    dw_below, dw_above = dw_below + of_below * below, dw_above + of_above * above
    if IS_CENTERED:
        db_below, db_above = db_below + of_below, db_above + of_above
    return dw_below, dw_above, db_below, db_above


@triton.jit
def walk_backward(
    x_words, dy_words, dx_words, dx_halves, weight_ptr, dw_ptr, db_ptr, mean_ptr, rstd_ptr, mailbox, rows, cols, limit,
    IS_FULL: tl.constexpr, IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    HAS_ASM: tl.constexpr,
):  # fmt: skip
    team, teams = tl.program_id(0), tl.num_programs(0)
    row = team.to(tl.int64)
    shift = ((row * cols) % 8).to(tl.int32)
    columns = columns_of(shift, VECTORS)
    weight = load_halves(weight_ptr, columns, cols)
    zeros = tl.zeros((VECTORS, 4), tl.float32)
    sums = (zeros, zeros, zeros, zeros)
    number = last_message(mailbox, SPLITS) + 1
    begin_backward(
        row, x_words, dy_words, mean_ptr, rstd_ptr, weight, columns, mailbox, number, cols, shift, limit,
        IS_FULL, IS_CENTERED, VECTORS, SPLITS,
    )  # fmt: skip
    for next_row in tl.range(row + teams, rows, teams, num_stages=STAGES):
        begin_backward(
            next_row, x_words, dy_words, mean_ptr, rstd_ptr, weight, columns, mailbox, number + 1, cols, shift, limit,
            IS_FULL, IS_CENTERED, VECTORS, SPLITS,
        )  # fmt: skip
        sums = finish_backward(
            next_row - teams, x_words, dy_words, dx_words, dx_halves, mean_ptr, rstd_ptr, weight, sums, columns, mailbox,
            number, cols, shift, limit, IS_FULL, IS_CENTERED, VECTORS, SPLITS, HAS_ASM,
        )  # fmt: skip
        number += 1
    row += (rows - 1 - row) // teams * teams
    sums = finish_backward(
        row, x_words, dy_words, dx_words, dx_halves, mean_ptr, rstd_ptr, weight, sums, columns, mailbox, number, cols,
        shift, limit, IS_FULL, IS_CENTERED, VECTORS, SPLITS, HAS_ASM,
    )  # fmt: skip
    partial = team * cols + columns
    is_below, is_above = (columns >= 0) & (columns < cols), (columns >= -1) & (columns + 1 < cols)
    tl.store(dw_ptr + partial, sums[0], mask=is_below)
    tl.store(dw_ptr + partial + 1, sums[1], mask=is_above)
    if IS_CENTERED:
        tl.store(db_ptr + partial, sums[2], mask=is_below)
        tl.store(db_ptr + partial + 1, sums[3], mask=is_above)


@triton.jit
def team_odd_backward_kernel(
    x_words, dy_words, dx_words, dx_halves, weight_ptr, dw_ptr, db_ptr, mean_ptr, rstd_ptr, mailbox, rows, cols, limit,
    IS_CENTERED: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    if (part > 0) & ((part + 1) * (VECTORS * 8) <= cols):
        walk_backward(
            x_words, dy_words, dx_words, dx_halves, weight_ptr, dw_ptr, db_ptr, mean_ptr, rstd_ptr, mailbox, rows, cols,
            limit, True, IS_CENTERED, VECTORS, SPLITS, STAGES, HAS_ASM,
        )  # fmt: skip
    else:
        walk_backward(
            x_words, dy_words, dx_words, dx_halves, weight_ptr, dw_ptr, db_ptr, mean_ptr, rstd_ptr, mailbox, rows, cols,
            limit, False, IS_CENTERED, VECTORS, SPLITS, STAGES, HAS_ASM,
        )  # fmt: skip
