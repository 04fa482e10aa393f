"""The launches of one call of a norm by channel, of pattern `column`: statistics of lines, of rows, results; in backward
sums of lines, of rows, gradients, and the sums of those that are sums."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warpnorm.codegen.bind import BoundKernel
from warpnorm.launch.backward import launch_sums
from warpnorm.launch.forward import empty_statistics, in_bits, on_device
from warpnorm.plan import grid
from warpnorm.plan.plan import Plan
from warpnorm.problem import BackwardProblem, ForwardProblem
from warpnorm.space import Space


@dataclass(frozen=True)
class ColumnForwardLaunch:
    problem: ForwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    line_statistics: BoundKernel | None  # where there is a statistic to compute
    row_statistics: BoundKernel | None
    merge_plan: Plan
    eps: float

    def __call__(
        self, operands: Sequence[torch.Tensor | float], outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs; returns the statistics, one number a row each."""
        space, plan = self.space, self.plan
        device = outputs[0].device
        read = tuple(map(in_bits, operands))
        programs = grid.column(plan, space)
        before = (space.strides, space.sizes, space.rows)
        width = grid.part_cols(plan, space)
        statistics = empty_statistics(self.problem, space.statistics, device)
        with on_device(outputs[0]):
            if self.line_statistics is not None and self.row_statistics is not None:
                pieces = _empty_pair(grid.pieces(plan, space).numel, self.problem.compute, device)
                self.line_statistics.launch(programs, read, pieces, *before, space.inner_rows, space.cols, width)
                blocks = -(-space.statistics // self.merge_plan.block_rows)
                self.row_statistics.launch(
                    (blocks, 1), pieces, statistics, space.statistics, space.pieces, space.inner_rows, space.cols,
                    width, self.eps,
                )  # fmt: skip
            self.kernel.launch(
                programs, read, tuple(map(in_bits, outputs)), statistics, *before, space.pieces, space.inner_rows,
                space.cols, width,
            )  # fmt: skip
        return statistics


@dataclass(frozen=True)
class ColumnBackwardLaunch:
    problem: BackwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    sums_kernel: BoundKernel | None  # where c needs a gradient, and there is a statistic
    piece_sums: BoundKernel
    column_sums: tuple[
        tuple[BoundKernel, Plan, tuple[int, ...]], ...
    ]  # for the gradients that are sums, by their number
    piece_plan: Plan

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        problem, plan, space = self.problem, self.plan, self.space
        device = gradients[0].device
        read = tuple(map(in_bits, (*operands, *grad_outputs)))
        written = tuple(gradients[i] for i in problem.written)
        sums = {i: grid.line_sum(plan, space, problem.gradients[i]) for i in problem.reduced}
        partials = {i: torch.empty(s.numel, dtype=problem.compute, device=device) for i, s in sums.items()}
        programs = grid.column(plan, space)
        before = (space.strides, space.sizes, space.rows)
        lines = (space.pieces, space.inner_rows, space.cols, grid.part_cols(plan, space))
        statistics = tuple(statistics)
        terms: tuple[torch.Tensor, ...] = ()
        with on_device(gradients[0]):
            if self.sums_kernel is not None:
                of_pieces = grid.pieces(plan, space)
                pieces = _empty_pair(of_pieces.numel, problem.compute, device)
                self.sums_kernel.launch(programs, read, pieces, statistics, *before, *lines)
                terms = _empty_pair(space.statistics, problem.compute, device)
                launch_sums(self.piece_sums, self.piece_plan, pieces, terms, [of_pieces] * 2)
            self.kernel.launch(programs, read, written, tuple(partials.values()), terms, statistics, *before, *lines)
            for kernel, sum_plan, which in self.column_sums:
                launch_sums(
                    kernel, sum_plan, tuple(partials[i] for i in which), tuple(gradients[i] for i in which),
                    [sums[i] for i in which],
                )  # fmt: skip


def _empty_pair(count: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One allocation; both start at a multiple of 16 bytes, as the kernels are told."""
    stride = -(-count // 4) * 4
    storage = torch.empty(2 * stride, dtype=dtype, device=device)
    return storage[:count], storage[stride : stride + count]
