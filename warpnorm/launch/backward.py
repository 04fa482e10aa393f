"""The backward launches of one call: gradients that lie full in memory are written by the kernel, those that are sums
over rows leave one partial row for each program, which `column_sum` adds up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.described import describe, slots
from warpnorm.launch.forward import in_bits, mailbox, on_device
from warpnorm.plan import grid
from warpnorm.plan.grid import Sum
from warpnorm.plan.plan import LONG_ROW, ROW, TEAM, Plan
from warpnorm.problem import BackwardProblem
from warpnorm.space import Space


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
        device = gradients[0].device
        read = tuple(map(in_bits, (*operands, *grad_outputs)))
        written = tuple(gradients[i] for i in problem.written)
        statistics = tuple(statistics)
        programs, sums = self.programs, self.sums
        totals = tuple(gradients[i] for i in problem.reduced)
        if space.rows == 0:  # a team would begin with a row that is not there
            for total in totals:
                total.zero_()
            return
        if self.are_few:
            partials = totals  # there are none
        else:
            partials = tuple(torch.empty(s.numel, dtype=problem.compute, device=device) for s in sums)
        before = (space.strides, space.sizes, space.rows)
        with on_device(gradients[0]):
            shared: tuple[Any, ...] = ()  # what the programs of one row need from each other
            after: tuple[Any, ...] = ()
            if self.plan.pattern == ROW:
                shared, after = (totals if self.has_totals else (),), (programs[0],)
                programs = (programs[0] + self.sum_programs, 1)
            elif self.plan.pattern == TEAM:
                shared = (mailbox(self.plan, device),)
            elif self.plan.pattern == LONG_ROW:
                shared = (tuple(torch.empty_like(statistic) for statistic in statistics),)
                if self.sums_kernel is not None:
                    self.sums_kernel.launch((space.rows, 1), read, *shared, statistics, *before, space.cols)
            self.kernel.launch(
                programs, read, written, partials, *shared, statistics, *before, space.groups, space.cols, *after
            )
            if self.column_sum is not None and not self.are_few:
                launch_sums(self.column_sum, self.column_sum_plan, partials, totals, sums)

    def described(self, operands: int) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
        """The sizes of partial rows, and these launches as the compiled launcher takes them: of the operands and statistics,
        which are saved, of one gradient that is given, and of the wanted ones."""
        problem, space, plan = self.problem, self.space, self.plan
        if plan.pattern != ROW or len(problem.given) != 1:
            return None
        counts = (operands, len(problem.norm.statistics), 1, len(problem.wanted), len(problem.reduced))
        read, statistics, grads, gradients, partials = slots(*counts)
        written = tuple(gradients[i] for i in problem.written)
        totals = tuple(gradients[i] for i in problem.reduced)
        before = (space.strides, space.sizes, space.rows, space.groups, space.cols, self.programs[0])
        given = (written, totals if self.are_few else partials, totals if self.has_totals else ())
        programs = (self.programs[0] + self.sum_programs, 1)
        found = [describe(self.kernel, programs, (*read, *grads), *given, statistics, *before)]
        if self.column_sum is not None and not self.are_few:
            found.append(describe(self.column_sum, *sum_arguments(self.column_sum_plan, partials, totals, self.sums)))
        sizes = () if self.are_few else tuple(s.numel for s in self.sums)
        return None if None in found else (sizes, tuple(found))

    @cached_property
    def has_totals(self) -> bool:
        """Whether programs of the same launch may sum over rows."""
        return grid.sum_tile(self.plan, self.problem)[1] > 0

    @cached_property
    def sum_programs(self) -> int:
        return grid.sum_programs(self.plan, self.space, self.problem)

    @property
    def are_few(self) -> bool:
        """Rows, so that these do."""
        return self.sum_programs > 0

    @cached_property
    def programs(self) -> tuple[int, int]:
        return grid.backward(self.plan, self.space)

    @cached_property
    def sums(self) -> list[Sum]:
        return [grid.gradient_sum(self.plan, self.space, self.problem, i) for i in self.problem.reduced]


def launch_sums(
    kernel: BoundKernel,
    plan: Plan,
    partials: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor],
    sums: Sequence[Sum],
) -> None:
    """`column_sum` of several at once."""
    kernel.launch(*sum_arguments(plan, partials, totals, sums))


def launch_gradient_sums(
    column_sums: Sequence[tuple[BoundKernel, Plan, tuple[int, ...]]],
    partials: Mapping[int, torch.Tensor],
    gradients: Sequence[torch.Tensor],
    sums: Mapping[int, Sum],
) -> None:
    """Of norms by channel: each kernel sums the gradients with these numbers."""
    for kernel, plan, which in column_sums:
        totals = tuple(gradients[i] for i in which)
        launch_sums(kernel, plan, tuple(partials[i] for i in which), totals, [sums[i] for i in which])


def sum_arguments(plan: Plan, partials: Sequence[Any], totals: Sequence[Any], sums: Sequence[Sum]) -> tuple[Any, ...]:
    """The grid first."""
    blocks = -(-max(s.width for s in sums) // plan.block_cols)
    groups, heights, widths = zip(*sums, strict=True)
    return (blocks * max(groups), len(sums)), tuple(partials), tuple(totals), groups, heights, widths, blocks
