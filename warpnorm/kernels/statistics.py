"""The statistic of a row, on registers or along a walk, and its gradient. Never E[x^2] - E[x]^2: the variance is the
mean square of deviations from the mean, and walks merge (count, mean, M2) by Chan's formula.
Statistics are tuples with one number a row: (mean, rstd) if IS_CENTERED, and where it is at hand the variance, else (rstd,).
See docs/derivations.md."""

import triton
import triton.language as tl
from triton.language.extra import libdevice as library

from warpnorm.kernels.sums import sums_of

WIDE_BLOCK = tl.constexpr(1024)  # columns of one block, of which a thread may have 32


@triton.jit
def reciprocal_sqrt(value, IS_TIGHT: tl.constexpr = False):
    """IS_TIGHT: there are no registers to spare."""
    # tl.sqrt and tl.rsqrt are approximate and flush subnormals in float32; one exact division a row costs nothing. The root
    # comes last: it halves the error of the division, which would else be added to its own
    if value.dtype == tl.float64:
        return 1.0 / tl.sqrt(value)
    elif IS_TIGHT:
        return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), tl.sqrt_rn(value))
    else:
        is_tiny = value < 1e-30  # and the reciprocal would overflow
        value = tl.where(is_tiny, value * 2.0**64, value)
        root = tl.sqrt_rn(tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value))
        return tl.where(is_tiny, root * 2.0**32, root)


@triton.jit
def precise_reciprocal_sqrt(value):
    """In float32, of a value that may be float64, without the errors of two roundings: by a step of Newton's in float64,
    which takes few instructions."""
    root = reciprocal_sqrt(value.to(tl.float32), True)
    wide = root.to(tl.float64)
    better = (wide + wide * 0.5 * (1.0 - value.to(tl.float64) * wide * wide)).to(tl.float32)
    return tl.where((root > 0.0) & (root < float("inf")), better, root)


@triton.jit
def mean_of(total, count, COUNT: tl.constexpr = 0):
    """COUNT: the same, if the compiler knows it, else 0. By a power of two a division is a multiplication."""
    IS_POWER: tl.constexpr = COUNT > 0 and triton.next_power_of_2(COUNT) == COUNT
    if IS_POWER:
        return total * (1.0 / COUNT)
    elif total.dtype == tl.float64:
        return total / count
    else:
        return tl.div_rn(total, tl.zeros_like(total) + count)


@triton.jit
def merge_moments(count, mean, squares, other_count, other_mean, other_squares):
    """(count, mean, M2) of both, by Chan's formula."""
    total = count + other_count
    delta = other_mean - mean
    share = library.fast_dividef(other_count, tl.maximum(total, 1.0))
    return total, mean + delta * share, squares + other_squares + delta * delta * (count * share)


@triton.jit
def neighbours(tile):
    """(rows, cols) as (rows, cols // 8, 8): eight values of two bytes are one thread's, where it loads them at once."""
    COUNT: tl.constexpr = min(tile.shape[1], 8)
    return tl.reshape(tile, (tile.shape[0], tile.shape[1] // COUNT, COUNT))


@triton.jit
def moments(row, places, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr):
    """(count, mean, M2) of each eight lanes of some blocks of columns, of which all but the last are full. One visit:
    deviations are from the middle between the largest and the least of the first eight values, which is the mean where all
    are equal, whatever the rounding. It lies among them, so that of M2 no more digits are lost than their number has. For
    values with fewer of their own. From the largest, all sums would have one sign, and what a quotient is off by would add
    up: means of 6,272 values were off by 4.4e-8 of their deviation, and are by 2.5e-9."""
    first = neighbours(row[0])
    pivot = tl.max(first, 2) * 0.5 + tl.min(first, 2) * 0.5
    deviation = first - pivot[:, :, None]
    total = deviation
    squares = deviation * deviation
    count = tl.full(pivot.shape, FULL_CHUNKS * first.shape[2], pivot.dtype)
    for chunk in tl.static_range(1, CHUNKS):
        deviation = neighbours(row[chunk]) - pivot[:, :, None]
        if chunk >= FULL_CHUNKS:
            ones = neighbours(tl.where(places[chunk][3], 1.0, 0.0))
            deviation = tl.where(ones > 0.0, deviation, 0.0)
            count += tl.sum(ones, 2)
        total += deviation
        squares += deviation * deviation
    off, merged = sums_of((total, squares), 2, 2)
    shift = library.fast_dividef(off, count)
    merged -= off * shift
    return count, pivot + shift, tl.where(merged < 0.0, 0.0, merged)  # unlike a maximum, this keeps NaN


@triton.jit
def mean_and_squares(row, places, row_mask, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr):
    """(mean, M2), (1,) each, of all lines together, by one reduction to numbers without a layout: what they are used for has
    that of what was loaded."""
    count, mean, squares = moments(row, places, CHUNKS, FULL_CHUNKS)
    LANES: tl.constexpr = count.shape[0] * count.shape[1]
    if count.shape[0] > 1:
        count = tl.where(row_mask[:, None], count, 0.0)
        mean = tl.where(row_mask[:, None], mean, 0.0)
        squares = tl.where(row_mask[:, None], squares, 0.0)
    tiles = (tl.reshape(count, (LANES,)), tl.reshape(mean, (LANES,)), tl.reshape(squares, (LANES,)))
    _, mean, squares = tl.reduce(tiles, 0, merge_moments)
    return tl.zeros((1,), tl.float32) + mean, tl.zeros((1,), tl.float32) + squares


@triton.jit
def mean_and_rstd(
    mean,
    deviation,
    squares,
    cols,
    eps,
    IS_CORRECTED: tl.constexpr,
    COLS: tl.constexpr = 0,
):
    """From deviations from the mean, weighted by their count, and their squares. The mean is rounded, and the mean of
    the deviations is what it is off by: without it a row of equal values would not give zeros."""
    variance = mean_of(tl.sum(squares, 1), cols, COLS)
    if IS_CORRECTED:
        shift = mean_of(tl.sum(deviation, 1), cols, COLS)
        mean += shift
        variance -= shift * shift
        variance = tl.where(variance < 0.0, 0.0, variance)  # unlike a maximum, this keeps NaN
    return mean, reciprocal_sqrt(variance + eps), variance


@triton.jit
def in_halves(terms, CHUNKS: tl.constexpr):
    """(rows, cols), or (rows, cols / 2) of the same sum: a row in one wide block is folded, of which a thread may have 32
    numbers that it would add up one after another. Where they are equal, so is what most of those roundings are off by: of
    20,000 numbers in float32 every fifth has an rms further off than PyTorch's and half a rounding, and none where there are
    half as many."""
    if CHUNKS == 1 and terms.shape[1] >= WIDE_BLOCK:
        HALF: tl.constexpr = terms.shape[1] // 2
        return tl.sum(tl.reshape(terms, (terms.shape[0], 2, HALF)), 1)
    else:
        return terms


@triton.jit
def row_total(row, places, IS_CENTERED: tl.constexpr, CHUNKS: tl.constexpr, IS_LONG: tl.constexpr):
    """The sum of rows held in registers, or that of their squares: `row` is c, of each block of columns, (rows, cols).
    IS_LONG: results have mantissas long enough to show that equal squares are all rounded the same way."""
    total = in_row(row[0], places[0])
    if not IS_CENTERED:
        total = total * total
    for chunk in tl.static_range(1, CHUNKS):
        c = in_row(row[chunk], places[chunk])
        total += c if IS_CENTERED else c * c
    if IS_LONG and not IS_CENTERED:
        total = in_halves(total, CHUNKS)
    return tl.sum(total, 1)


@triton.jit
def row_mean(
    row, places, cols, IS_CENTERED: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr, IS_LONG: tl.constexpr
):
    COLS: tl.constexpr = row[0].shape[1] * CHUNKS if IS_EXACT else 0
    return mean_of(row_total(row, places, IS_CENTERED, CHUNKS, IS_LONG), cols, COLS)


@triton.jit
def row_deviations(row, mean, places, CHUNKS: tl.constexpr):
    """The second step, from the mean: deviations from it and their squares, each added up over the blocks."""
    off = in_row(row[0] - mean[:, None], places[0])
    squares = off * off
    for chunk in tl.static_range(1, CHUNKS):
        deviation = in_row(row[chunk] - mean[:, None], places[chunk])
        off += deviation
        squares += deviation * deviation
    return off, squares


@triton.jit
def centered_statistics(
    row, mean, places, cols, eps, IS_CORRECTED: tl.constexpr, CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_WIDE: tl.constexpr,
):  # fmt: skip
    """IS_WIDE: the mean is a result itself."""
    COLS: tl.constexpr = row[0].shape[1] * CHUNKS if IS_EXACT else 0
    off, squares = row_deviations(row, mean, places, CHUNKS)
    if IS_CORRECTED and IS_WIDE:
        high, _, squares = recentered(
            mean, tl.sum(squares, 1), wide_sum(coarse_offsets(row, mean, places, CHUNKS)), cols
        )
        variance = mean_of(squares, cols, COLS)
        return high, reciprocal_sqrt(variance + eps), variance
    else:
        return mean_and_rstd(mean, off, squares, cols, eps, IS_CORRECTED, COLS)


@triton.jit
def in_row(c, place):
    """Zero where there is no column."""
    return tl.where(place[3], c, 0.0)


@triton.jit
def normalize(c, statistics, IS_CENTERED: tl.constexpr):
    if IS_CENTERED:
        return (c - statistics[0][:, None]) * statistics[1][:, None]
    else:
        return c * statistics[0][:, None]


@triton.jit
def store_statistics(
    statistic_ptrs, statistics, rows, row_mask, IS_CENTERED: tl.constexpr, KEEPS_VARIANCE: tl.constexpr = False
):
    tl.store(statistic_ptrs[0] + rows, statistics[0], mask=row_mask)
    if IS_CENTERED:
        tl.store(statistic_ptrs[1] + rows, statistics[1], mask=row_mask)
    if KEEPS_VARIANCE:
        tl.store(statistic_ptrs[2] + rows, statistics[2], mask=row_mask)


@triton.jit
def average_statistics(running_ptrs, statistics, rows, row_mask, factors):
    """Into running ones, of the mean and of the variance."""
    average(running_ptrs[0] + rows, statistics[0], row_mask, factors[0], factors[1])
    average(running_ptrs[1] + rows, statistics[2], row_mask, factors[0], factors[2])


@triton.jit
def average(pointers, new, mask, kept, gained):
    """In float64, where what is averaged into is: it loses nothing to a momentum that is small, or zero."""
    old = tl.load(pointers, mask=mask, other=0.0)
    if old.dtype != tl.float64:
        old = old.to(new.dtype)
    tl.store(pointers, as_stored(old * kept + new.to(old.dtype) * gained, pointers), mask=mask)


@triton.jit
def as_stored(value, pointers):
    """In the dtype of what lies there; the halves by way of float32, also from float64."""
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    return value.to(pointers.dtype.element_ty)


@triton.jit
def load_statistics(statistic_ptrs, rows, row_mask, IS_CENTERED: tl.constexpr):
    first = tl.load(statistic_ptrs[0] + rows, mask=row_mask, other=0.0)
    if IS_CENTERED:
        return first, tl.load(statistic_ptrs[1] + rows, mask=row_mask, other=0.0)
    else:
        return (first,)


@triton.jit
def start_walk(like, IS_CENTERED: tl.constexpr):
    """State of a walk over a row by blocks: each lane of the block keeps its own mean and M2, or sum of squares; and
    in backward its own sums of gradient terms."""
    if IS_CENTERED:
        return tl.zeros_like(like), tl.zeros_like(like)
    else:
        return (tl.zeros_like(like),)


@triton.jit
def step_walk(state, c, mask, step, IS_CENTERED: tl.constexpr):
    """Welford's update of every lane with the block number `step`, counted from 0."""
    if IS_CENTERED:
        delta = tl.where(mask, c - state[0], 0.0)
        return move_means(state, c, mask, delta, delta / (step + 1))
    else:
        return (state[0] + tl.where(mask, c * c, 0.0),)


@triton.jit
def quick_step(state, c, mask, step):
    """The same of a mean and M2, with one division for all lanes; it takes more registers."""
    delta = tl.where(mask, c - state[0], 0.0)
    return move_means(state, c, mask, delta, move_of(delta, step))


@triton.jit
def move_of(delta, step):
    """By how much a mean is moved."""
    if delta.dtype == tl.float64:
        return delta / (step + 1)
    else:
        return delta * (1.0 / (step + 1))


@triton.jit
def move_means(state, c, mask, delta, move):
    mean = state[0] + move
    return mean, state[1] + tl.where(mask, delta * (c - mean), 0.0)


@triton.jit
def merge_parts(state, parts, step, COUNT: tl.constexpr):
    """The same by COUNT values of every lane at once: fewer instructions for each, and fewer lanes. The first step's are
    seen from one of them, later ones from the mean before: M2 is then never much less than what it is the difference of."""
    mean = tl.where(step == 0, parts[0], state[0])
    deviation = parts[0] - mean
    total = deviation
    squares = deviation * deviation
    for k in tl.static_range(1, COUNT):
        deviation = parts[k] - mean
        total += deviation
        squares += deviation * deviation
    move = move_of(total * (1.0 / COUNT), step)
    return mean + move, state[1] + (squares - total * move)


@triton.jit
def lane_counts(lanes, cols, BLOCK_COLS: tl.constexpr, COMPUTE: tl.constexpr):
    """How many columns each lane of a walk has seen: lane i the columns i, i + BLOCK_COLS, ... below cols."""
    return ((cols - lanes + BLOCK_COLS - 1) // BLOCK_COLS).to(COMPUTE)[None, :]


@triton.jit
def end_walk(state, lanes, cols, eps, IS_CENTERED: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Merge the lanes of a walk."""
    if IS_CENTERED:
        count = lane_counts(lanes, cols, BLOCK_COLS, state[0].dtype)
        mean = mean_of(tl.sum(count * state[0], 1), cols)
        deviation = state[0] - mean[:, None]
        weighted = count * deviation
        return mean_and_rstd(mean, weighted, state[1] + weighted * deviation, cols, eps, True)
    else:
        return (reciprocal_sqrt(mean_of(tl.sum(state[0], 1), cols) + eps),)


@triton.jit
def tile_squares(c, mask, cols, IS_CORRECTED: tl.constexpr):
    """(mean, M2) of lines held in registers, in two steps; if corrected also what the mean is rounded off by."""
    mean = mean_of(tl.sum(tl.where(mask, c, 0.0), 1), cols)
    deviation = tl.where(mask, c - mean[:, None], 0.0)
    squares = tl.sum(deviation * deviation, 1)
    if IS_CORRECTED:
        off = wide_sum(tl.where(mask, c - coarse(mean)[:, None], 0.0))
        high, low, squares = recentered(mean, squares, off, cols)
        return high, squares, low
    else:
        return mean, squares


@triton.jit
def coarse(mean):
    """With its first digits alone. Values of one size differ from a number with more by numbers that are rounded, and all in
    the same way: their sum may be off by more than the mean that it should correct."""
    if mean.dtype == tl.float64:
        return (mean.to(tl.int64, bitcast=True) & -(1 << 30)).to(tl.float64, bitcast=True)
    else:
        return (mean.to(tl.int32, bitcast=True) & -(1 << 14)).to(tl.float32, bitcast=True)


@triton.jit
def coarse_offsets(row, mean, places, CHUNKS: tl.constexpr):
    """How far the values of rows are from their coarse mean, added up over the blocks."""
    off = in_row(row[0] - coarse(mean)[:, None], places[0])
    for chunk in tl.static_range(1, CHUNKS):
        off += in_row(row[chunk] - coarse(mean)[:, None], places[chunk])
    return off


@triton.jit
def recentered(mean, squares, off, cols):
    """(mean, what it is rounded off by, M2), where values differ from the coarse mean by `off`, float64, altogether, and
    `squares` are those of their deviations from the mean."""
    pivot, move = coarse(mean).to(tl.float64), off / cols
    wide = pivot + move
    high = wide.to(mean.dtype)
    if mean.dtype == tl.float64:
        low = rounded_off(pivot, move, wide)
    else:
        low = (wide - high.to(tl.float64)).to(mean.dtype)
    shift = (wide - mean.to(tl.float64)).to(mean.dtype)
    squares -= cols * shift * shift
    return high, low, tl.where(squares < 0.0, 0.0, squares)  # unlike a maximum, this keeps NaN


@triton.jit
def wide_sum(tile):
    """In float64 but for the sums of four neighbours: these are a thread's own, and it takes long to widen a number."""
    if tile.dtype == tl.float32 and tile.shape[1] >= 4:
        tile = tl.sum(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 4, 4)), 2)
    return tl.sum(tile.to(tl.float64), 1)


@triton.jit
def rounded_off(a, b, total):
    """What `total`, which is a + b rounded, lacks of it: a number of the same dtype (Knuth's two-sum)."""
    added = total - a
    return (a - (total - added)) + (b - added)


@triton.jit
def corrected(mean, squares, off, count):
    """(mean, M2), where the mean is rounded, and the sum of deviations from it is `off`."""
    shift = mean_of(off, count)
    squares -= off * shift
    return mean + shift, tl.where(squares < 0.0, 0.0, squares)  # unlike a maximum, this keeps NaN


@triton.jit
def merge_lanes(state, count, total, IS_CORRECTED: tl.constexpr):
    """(mean, M2) of lanes with a count each, a mean and an M2."""
    mean = mean_of(tl.sum(count * state[0], 1), total)
    deviation = state[0] - mean[:, None]
    weighted = count * deviation
    squares = tl.sum(state[1] + weighted * deviation, 1)
    if IS_CORRECTED:
        return corrected(mean, squares, tl.sum(weighted, 1), total)
    return mean, squares


@triton.jit
def terms(grad_xhat, xhat, IS_CENTERED: tl.constexpr):
    """What must be summed over a row before its gradient is known."""
    if IS_CENTERED:
        return grad_xhat * xhat, grad_xhat
    else:
        return (grad_xhat * xhat,)


@triton.jit
def add_terms(state, grad_xhat, xhat, IS_CENTERED: tl.constexpr):
    """The same, added to every lane of a walk."""
    if IS_CENTERED:
        return state[0] + grad_xhat * xhat, state[1] + grad_xhat
    else:
        return (state[0] + grad_xhat * xhat,)


@triton.jit
def sum_terms(state, IS_CENTERED: tl.constexpr):
    if IS_CENTERED:
        return sums_of(state, 1, 2)
    else:
        return (tl.sum(state[0], 1),)


@triton.jit
def gradient(grad_xhat, xhat, sums, statistics, cols, IS_CENTERED: tl.constexpr, COLS: tl.constexpr = 0):
    """The gradient of c, from the row sums of the terms."""
    slope = mean_of(sums[0], cols, COLS)
    if IS_CENTERED:
        shift = mean_of(sums[1], cols, COLS)
        return (grad_xhat - shift[:, None] - xhat * slope[:, None]) * statistics[1][:, None]
    else:
        return (grad_xhat - xhat * slope[:, None]) * statistics[0][:, None]
