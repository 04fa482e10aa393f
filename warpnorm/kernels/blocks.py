"""A row, or a part of it, in registers: CHUNKS blocks of columns, of which `first` is the first one's number. A tuple has an
entry for each block."""

import triton
import triton.language as tl

from warpnorm.kernels.masks import block_columns
from warpnorm.kernels.pointwise import packed, unpacked


@triton.jit
def load_columns(
    first, operands, strides, sizes, cols,
    LOAD_COLUMNS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
):  # fmt: skip
    """What does not vary by row, for each block of columns."""
    columns = ()
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(first + chunk, cols, chunk < FULL_CHUNKS, BLOCK_COLS)
        columns += (LOAD_COLUMNS(operands, strides, sizes, col_offsets, col_mask),)
    return columns


@triton.jit
def load_rows(
    first, row_offsets, row_mask, numbers, operands, strides, sizes, cols,
    LOAD_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of each block of columns: the values, and where they lie. All are loaded before any is used."""
    values, places = (), ()
    for chunk in tl.static_range(CHUNKS):
        col_offsets, col_mask = block_columns(first + chunk, cols, chunk < FULL_CHUNKS, BLOCK_COLS)
        mask = row_mask[:, None] & col_mask[None, :]
        values += (LOAD_ROWS(operands, strides, sizes, row_offsets, col_offsets, row_mask, mask),)
        places += ((numbers, col_offsets, cols, mask),)
    return values, places


@triton.jit
def compute_row(values, columns, places, PROLOGUE: tl.constexpr, CHUNKS: tl.constexpr):
    """c of each block of columns, (rows, cols)."""
    row = ()
    for chunk in tl.static_range(CHUNKS):
        row += (PROLOGUE(values[chunk], columns[chunk], places[chunk]),)
    return row


@triton.jit
def hold_row(values, HOLD: tl.constexpr, CHUNKS: tl.constexpr):
    held = ()
    for chunk in tl.static_range(CHUNKS):
        held += (HOLD(values[chunk]),)
    return held


@triton.jit
def pack_kept(values):
    """What is kept of a block, halves, as it goes on to the next round of a loop."""
    words = ()
    for k in tl.static_range(len(values)):
        words += (packed(values[k]),)
    return words


@triton.jit
def unpack_kept(words):
    values = ()
    for k in tl.static_range(len(words)):
        values += (unpacked(words[k], tl.float16),)
    return values


@triton.jit
def prefetch_nothing(operands, strides, sizes, row_offsets, first, cols, COLS: tl.constexpr):
    pass


@triton.jit
def keep_nothing(xhat, c, values, columns, place):
    return ()
