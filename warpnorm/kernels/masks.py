"""Which elements of a tile are there. What is known when a kernel is compiled is a constant, which the compiler drops."""

import triton
import triton.language as tl


@triton.jit
def column_mask(col_offsets, cols, IS_EXACT: tl.constexpr):
    """All of them where the columns of a row fill their tiles."""
    if IS_EXACT:
        return tl.full(col_offsets.shape, True, tl.int1)
    else:
        return col_offsets < cols


@triton.jit
def block_columns(block, cols, IS_EXACT: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Offsets and mask of one of the blocks of columns that a row is."""
    col_offsets = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    return col_offsets, column_mask(col_offsets, cols, IS_EXACT)


@triton.jit
def rows_mask(row_offsets, rows):
    """A lone row of a tile is always there: no program runs without one."""
    if row_offsets.shape[0] == 1:
        return tl.full(row_offsets.shape, True, tl.int1)
    else:
        return row_offsets < rows
