"""Gradients that are sums: what the parts, groups or lines leave behind, in double precision, and what becomes of it."""

from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from warpnorm.cpu import build
from warpnorm.problem import ALONG, COLUMN, GROUP, NUMBER, SCALAR, Operand
from warpnorm.space import Space

SETTLED = 1 << 16  # numbers that one thread sums
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as pool.c has them


@dataclass(frozen=True)
class Sum:
    """Of one gradient. `shape` of the partial sums, whose first size, where it is 0, is the number of parts; along which
    axes of them they are summed; where the gradient lies: `sizes` and `strides`, or neither for a lone number.
    `is_written`: every partial sum is, so that they need not be zero before. `is_merged`: native code sums them itself."""

    which: int
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    is_written: bool
    is_merged: bool

    @cached_property
    def width(self) -> int:
        """How many numbers a gradient has that lies in one piece, and is summed over the first axes; otherwise 0."""
        dense = [prod(self.sizes[k + 1 :]) for k in range(len(self.sizes))]
        is_dense = all(size == 1 or s == d for size, s, d in zip(self.sizes, self.strides, dense, strict=True))
        is_first = self.summed == tuple(range(len(self.summed)))
        return prod(self.sizes) if is_dense and is_first and self.sizes and prod(self.sizes) <= SETTLED else 0

    @staticmethod
    def of(gradient: Operand, space: Space, which: int, is_by_line: bool, is_merged: bool) -> "Sum":
        row_sizes = space.row_sizes
        row_strides, col_strides = (
            tuple(space.strides[s.slot] if s.literal is None else s.literal for s in strides)
            for strides in (gradient.row_strides, gradient.col_strides)
        )
        if gradient.axes in (SCALAR, NUMBER):
            return Sum(which, (space.rows,) if is_by_line else (0,), (0,), (), (), is_by_line, is_merged)
        if is_by_line or gradient.axes in ALONG:
            summed = tuple(d for d, stride in enumerate(row_strides) if stride == 0 and row_sizes[d] > 1)
            kept = [d for d in range(len(row_sizes)) if d not in summed]
            sizes, strides = (tuple(of[d] for d in kept) for of in (row_sizes, row_strides))
            return Sum(which, row_sizes, summed, sizes, strides, True, is_merged)
        col_sizes = space.sizes[len(row_sizes) - 1 :]
        col_sizes = (space.cols // max(prod(col_sizes), 1), *col_sizes)
        if gradient.axes == COLUMN:
            return Sum(which, (0, space.cols), (0,), col_sizes, col_strides, False, False)
        assert gradient.axes == GROUP  # whose axes come first
        kept = [d for d, stride in enumerate(row_strides) if stride != 0]
        sizes = (*(row_sizes[d] for d in kept), *col_sizes)
        return Sum(
            which, (space.groups, space.cols), (), sizes, (*(row_strides[d] for d in kept), *col_strides), False, False
        )

    def partial(self, parts: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """What native code writes: the gradient itself where it can."""
        if self.is_merged:
            return gradients[self.which]
        shape = (parts, *self.shape[1:]) if self.shape[0] == 0 else self.shape
        return (torch.empty if self.is_written else torch.zeros)(shape, dtype=torch.float64, device="cpu")

    def settle(self, partial: torch.Tensor, gradient: torch.Tensor) -> None:
        """Writes the gradient, where it lies."""
        if self.is_merged:
            return
        if self.width and gradient.dtype in KINDS:
            numbers = [c_int64(n) for n in (partial.numel() // self.width, self.width, KINDS[gradient.dtype])]
            build.pool().settle_one(c_void_p(partial.data_ptr()), *numbers, c_void_p(gradient.data_ptr()))
            return
        by_axes = partial if self.shape[0] == 0 else partial.view(self.shape)
        sums = by_axes.sum(self.summed) if self.summed else by_axes
        target = gradient.detach()
        if self.sizes:
            target = torch.as_strided(target, self.sizes, self.strides, target.storage_offset())
        target.copy_(sums.view(self.sizes))
