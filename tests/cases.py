"""Named inputs, each with the reason why it is here. They serve the interpreter and the GPU alike, so they are small;
what needs size is in tests/gpu."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """An input of `shape`, normalized over the last `col_dims` dimensions, seen through `view`."""

    name: str
    shape: tuple[int, ...]
    why: str
    col_dims: int = 1
    view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def make(self, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.view(torch.randn(self.shape, generator=generator, dtype=torch.float64).to(device, dtype))

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("one_row", (1, 64), why="the row axis vanishes"),
    Case("one_column", (5, 1), why="the variance is zero and every mask is at its edge"),
    Case("one_element", (1, 1), why="both axes vanish"),
    Case("vector", (48,), why="an input with no row dimension at all"),
    Case("power_of_two", (9, 64), why="no column is masked"),
    Case("row_tail", (19, 16), why="the last block of rows is not full"),
    Case("odd_width", (7, 37), why="rows are not 16-byte aligned"),
    Case("multiple_of_8", (6, 40), why="rows are 16-byte aligned, the last block of columns is not full"),
    Case("two_dims", (2, 3, 4, 6), col_dims=2, why="normalized_shape of several dimensions collapses to one axis"),
    Case("wide", (3, 1030), why="several warps reduce one row"),
    Case("in_blocks", (3, 1280), why="five blocks of columns, all full"),
    Case("in_blocks_with_a_tail", (3, 1448), why="three blocks of columns, of which the last is not full"),
    Case("widest_tile", (2, 8200), why="past 8192 columns: registers hold them as they lie in memory"),
    Case("long_row", (2, 9_001), why="unaligned and past 8192: a row that is walked by blocks, with a tail"),
    Case("past_65536", (2, 65_544), why="the width where others stop"),
    Case("qkv_heads", (2, 3, 3, 4, 16), view=lambda t: t[:, :, 1], why="q of packed QKV: two row axes, no copy"),
    Case("qkv_flat", (5, 3, 32), view=lambda t: t[:, 2], why="v of packed QKV: rows with a gap between them"),
    Case("transposed_batch", (4, 6, 16), view=lambda t: t.transpose(0, 1), why="rows in another order than memory"),
    Case("columns_apart", (4, 16, 6), view=lambda t: t.transpose(1, 2), why="neighbouring columns lie apart"),
    Case("two_col_axes", (3, 8, 5, 6), col_dims=2, view=lambda t: t[:, :, :, 1:5].transpose(2, 3),
         why="column axes that do not collapse"),
    Case("unaligned", (9, 33), view=lambda t: t[:, 1:], why="the storage offset is not a multiple of 16 bytes"),
    Case("every_other", (5, 64), view=lambda t: t[:, ::2], why="a column stride of two"),
    Case("expanded_rows", (1, 24), view=lambda t: t.expand(5, 24), why="a row stride of zero in a full operand"),
    Case("expanded_cols", (5, 1), view=lambda t: t.expand(5, 24), why="a column stride of zero in a full operand"),
)  # fmt: skip
