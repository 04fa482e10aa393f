"""The backward launches of one call: gradients that lie full in memory are written by the kernel, those that are sums
over rows leave one partial row for each program, which `column_sum` adds up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warpnorm.codegen.bind import BoundKernel
from warpnorm.launch.forward import on_device
from warpnorm.plan.plan import LONG_ROW, Plan
from warpnorm.problem import COLUMN, FULL, BackwardProblem, Space


@dataclass(frozen=True)
class BackwardLaunch:
    problem: BackwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    sums_kernel: BoundKernel | None  # long rows whose c needs a gradient
    column_sum: BoundKernel | None  # where a gradient is a sum over rows
    column_sum_plan: Plan

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        problem, space = self.problem, self.space
        device = grad_outputs[0].device
        read = (*operands, *grad_outputs)
        written = tuple(g for g, kind in zip(gradients, problem.gradients, strict=True) if kind.axes == FULL)
        reduced = [(gradients[i], problem.gradients[i].axes) for i in problem.reduced]
        statistics = tuple(statistics)
        geometry = (space.strides, space.sizes, space.rows, space.cols)
        grid = self._grid()
        heights = tuple(self._partial_rows(grid, axes) for _, axes in reduced)
        widths = tuple(space.cols if axes == COLUMN else 1 for _, axes in reduced)
        partials = tuple(
            torch.empty(height * width, dtype=problem.compute, device=device)
            for height, width in zip(heights, widths, strict=True)
        )
        with on_device(grad_outputs[0]):
            if self.plan.pattern != LONG_ROW:
                self.kernel.launch(grid, read, written, partials, statistics, *geometry)
            else:
                sums = tuple(torch.empty_like(statistic) for statistic in statistics)
                if self.sums_kernel is not None:
                    self.sums_kernel.launch((space.rows, 1), read, sums, statistics, *geometry)
                self.kernel.launch(grid, read, written, partials, sums, statistics, *geometry)
            if self.column_sum is not None:
                blocks = -(-max(widths) // self.column_sum_plan.block_cols)
                totals = tuple(gradient for gradient, _ in reduced)
                self.column_sum.launch((blocks, len(reduced)), partials, totals, heights, widths)

    def _partial_rows(self, grid: tuple[int, int], axes: str) -> int:
        """How many partial sums there are: one for each program that has a share of the rows, and where the columns are
        shared too, one for each of those programs of a scalar."""
        if axes != COLUMN:
            return grid[0] * grid[1]
        return grid[1] if self.plan.pattern == LONG_ROW else grid[0]

    def _grid(self) -> tuple[int, int]:
        plan, space = self.plan, self.space
        if plan.pattern != LONG_ROW:
            return min(plan.programs, -(-space.rows // plan.block_rows)), plan.splits
        col_blocks = -(-space.cols // plan.block_cols)
        return col_blocks, max(1, min(space.rows, plan.programs // col_blocks))
