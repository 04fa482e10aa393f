"""The partial sums that programs leave behind, added in a fixed order and rounded once. One launch serves every gradient
that is a sum: each is (groups, height, width), and is summed over its height."""

import triton
import triton.language as tl

from warpnorm.kernels.chain import begin
from warpnorm.kernels.statistics import as_stored


@triton.jit
def column_sum_kernel(
    partials, sums, groups, heights, widths, blocks, COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    begin(IS_CHAINED)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    for i in tl.static_range(COUNT):
        if (tl.program_id(1) == i) & (group < groups[i]):
            height = heights[i]
            width = widths[i]
            col_offsets = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            col_mask = col_offsets < width
            total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
            for start in tl.range(0, height, BLOCK_ROWS):
                row_offsets = start + tl.arange(0, BLOCK_ROWS)
                mask = (row_offsets < height)[:, None] & col_mask[None, :]
                offsets = (group * height + row_offsets)[:, None] * width + col_offsets[None, :]
                total += tl.load(partials[i] + offsets, mask=mask, other=0.0)
            tl.store(sums[i] + group * width + col_offsets, as_stored(tl.sum(total, 0), sums[i]), mask=col_mask)
