"""What pattern `held` does with a row that lies in pieces: which lines a program has, how they lie in registers, are carried
to the next round of its loop and summed, and how the sums of a team's programs are merged."""

import triton
import triton.language as tl

from warpnorm.kernels.blocks import load_rows
from warpnorm.kernels.masks import block_columns
from warpnorm.kernels.messages import member, messages, of_row, product, send, with_last_digit
from warpnorm.kernels.statistics import in_row, mean_of
from warpnorm.kernels.sums import sums_of


@triton.jit
def my_pieces(pieces, BLOCK_ROWS: tl.constexpr):
    """The numbers of the pieces that this program has, and which of them are there. Where there is none, the last is loaded
    once more, and left out of sums: a mask for every element would cost more."""
    my = member() * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
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
    mailbox, number, splits, pieces, cols,
    BLOCK_ROWS: tl.constexpr, MOST: tl.constexpr, IS_CORRECTED: tl.constexpr, A_THREAD: tl.constexpr,
):  # fmt: skip
    """(mean, M2) of a row. IS_CORRECTED: a second word has what the mean of a part is rounded off by, and the digit of M2
    that the first has no room for; M2 is float64 then."""
    WORDS: tl.constexpr = 2 if IS_CORRECTED else 1
    found = messages(mailbox, number, splits, (), MOST, 0, WORDS, True, WORDS, A_THREAD)
    means, squares = found[0], found[1]
    counts = counts_of(found[2], pieces, cols, BLOCK_ROWS)
    if IS_CORRECTED:
        squares = with_last_digit(squares, found[4])
        wide = means.to(tl.float64) + found[3]
        mean = tl.sum(product(counts.to(tl.float64), wide)) / tl.sum(counts.to(tl.float64))
        deviations = wide - mean
        merged = tl.sum(squares.to(tl.float64) + counts.to(tl.float64) * deviations * deviations)
        return of_row(mean.to(tl.float32)), tl.zeros((1,), tl.float64) + merged
    else:  # in two steps, which take less time than one with a division in each of its rounds
        mean = mean_of(of_row(tl.sum(product(counts, means))), pieces.to(tl.float32) * cols)
        deviations = means - tl.sum(mean)
        return mean, of_row(tl.sum(squares + counts * deviations * deviations))


@triton.jit
def is_first():
    return member() + tl.arange(0, 1) == 0


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
def places_of(
    numbers, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr, FULL_CHUNKS: tl.constexpr,
):  # fmt: skip
    """As `load_lines` gives them."""
    all_rows = tl.full((BLOCK_ROWS,), True, tl.int1)
    places = ()
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(chunk, cols, chunk < FULL_CHUNKS, BLOCK_COLS)
        places += ((numbers, col_offsets, cols, all_rows[:, None] & col_mask[None, :]),)
    return places


@triton.jit
def pack_row(values, PACK: tl.constexpr, CHUNKS: tl.constexpr):
    """What is carried to the next round of the loop."""
    words = ()
    for chunk in tl.static_range(CHUNKS):
        words += (PACK(values[chunk]),)
    return words


@triton.jit
def unpack_row(words, lines, UNPACK: tl.constexpr, CHUNKS: tl.constexpr):
    values = ()
    for chunk in tl.static_range(CHUNKS):
        values += (UNPACK(words[chunk], lines),)
    return values


@triton.jit
def kept_row(
    words, row, my, pieces, inner, operands, strides, sizes, row_mask,
    LOAD_LINES: tl.constexpr, UNPACK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The numbers of the lines of a row that was carried, and its values."""
    lines = lines_of(row, my, pieces, inner)
    return lines, unpack_row(words, LOAD_LINES(operands, strides, sizes, lines, row_mask), UNPACK, CHUNKS)


@triton.jit
def no_row(NOTHING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr):
    words = ()
    for _chunk in tl.static_range(CHUNKS):
        words += (NOTHING(BLOCK_ROWS, BLOCK_COLS),)
    return words


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
def receive_sums(
    mailbox, number, splits, COUNT: tl.constexpr, A_WORD: tl.constexpr, MOST: tl.constexpr, A_THREAD: tl.constexpr
):
    """COUNT sums of a row, (1,) each, from those of every program's part of it."""
    WORDS: tl.constexpr = (COUNT + A_WORD - 1) // A_WORD
    told = ()
    for pair in tl.static_range((WORDS + 1) // 2):
        AT_ONCE: tl.constexpr = 2 if 2 * pair + 1 < WORDS else 1
        found = messages(mailbox, number, splits, (), MOST, 2 * pair, WORDS, False, AT_ONCE, A_THREAD)
        told = told + (found[0], found[1])[:A_WORD]
        if AT_ONCE == 2:
            told = told + (found[3], found[4])[:A_WORD]
    return of_rows(sums_of(told[:COUNT], 0, COUNT), COUNT)


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
