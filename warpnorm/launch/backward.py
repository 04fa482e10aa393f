"""The backward launches of one call: gradients that lie full in memory are written by the kernel, those that are sums
over rows leave one partial row for each program, which `column_sum` adds up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.described import described, numbered
from warpnorm.launch.forward import in_bits, on_device
from warpnorm.launch.shared import EMPTY, Shared, lent, mailbox
from warpnorm.plan import grid
from warpnorm.plan.grid import Sum
from warpnorm.plan.plan import LONG_ROW, ROW, TEAM, Plan
from warpnorm.problem import BackwardProblem
from warpnorm.space import Space


@dataclass(frozen=True)
class _Launch:
    """What all patterns have in common."""

    problem: BackwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        if self.space.rows == 0:  # a team would begin with a row that is not there
            for i in self.problem.reduced:
                gradients[i].zero_()
            return
        device = gradients[0].device
        read = tuple(map(in_bits, (*operands, *grad_outputs)))
        saved = tuple(statistics[: len(self.problem.norm.saved)])
        loan = (self.partial_sizes, self.problem.compute, self.shared, device)
        with on_device(gradients[0]), lent(*loan) as (partials, shared):
            for kernel, programs, *arguments in self.steps(read, saved, gradients, partials, shared):
                kernel.launch(programs, *arguments)

    def described(self, operands: int) -> tuple[Any, ...] | None:
        """The sizes of partial sums, and the launches as the compiled launcher takes them: of the operands and statistics,
        which are saved, of one gradient that is given, and of the wanted ones."""
        problem = self.problem
        if len(problem.given) != 1:
            return None
        counts = (operands, len(problem.norm.saved), 1, len(problem.wanted), len(self.partial_sizes))
        read, statistics, grads, *others = numbered(0, *counts, self.shared.parts)
        found = described(self.steps((*read, *grads), statistics, *others), self.shared)
        return None if found is None else (self.partial_sizes, *found)

    def steps(
        self, read: Any, statistics: Any, gradients: Any, partials: Any, shared: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Each a kernel, how many programs, and what it is handed over: tensors, or what stands for them."""
        raise NotImplementedError

    @cached_property
    def partial_sizes(self) -> tuple[int, ...]:
        raise NotImplementedError

    @cached_property
    def shared(self) -> Shared:
        raise NotImplementedError


@dataclass(frozen=True)
class BackwardLaunch(_Launch):
    sums_kernel: BoundKernel | None  # long rows whose c needs a gradient
    column_sum: BoundKernel | None  # where a gradient is a sum over rows
    column_sum_plan: Plan

    def steps(
        self, read: Any, statistics: Any, gradients: Any, partials: Any, shared: Any
    ) -> Iterator[tuple[Any, ...]]:
        problem, space = self.problem, self.space
        written = tuple(gradients[i] for i in problem.written)
        totals = tuple(gradients[i] for i in problem.reduced)
        programs, before = self.programs, (space.strides, space.sizes, space.rows)
        after: tuple[Any, ...] = ()
        if self.plan.pattern == ROW:
            of_rows = grid.row_programs(self.plan, space, problem)
            shared, after = (totals if self.has_totals else (),), (of_rows,)
            programs = (of_rows + self.sum_programs, 1)
        elif self.plan.pattern == LONG_ROW:
            shared = (shared,)
            if self.sums_kernel is not None:
                yield self.sums_kernel, (space.rows, 1), read, *shared, statistics, *before, space.cols
        partials = totals if self.are_few else partials  # there are none
        given = (read, written, partials, *shared, statistics, *before, space.groups, space.cols, *after)
        yield self.kernel, grid.launched(self.plan, programs), *given
        if self.column_sum is not None and not self.are_few:
            yield sum_step(self.column_sum, self.column_sum_plan, partials, totals, self.sums)

    @cached_property
    def partial_sizes(self) -> tuple[int, ...]:
        return () if self.are_few else tuple(s.numel for s in self.sums)

    @cached_property
    def shared(self) -> Shared:
        """What the programs of one row need from each other."""
        if self.plan.pattern == TEAM:
            return mailbox(self.plan, self.plan.programs, self.plan.splits)
        if self.plan.pattern == LONG_ROW:
            rows = -(-self.space.rows // 4) * 4  # each begins at a multiple of 16 bytes
            return Shared((rows,) * len(self.problem.norm.saved), self.problem.compute, EMPTY)
        return Shared()

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


@dataclass(frozen=True)
class ChannelBackwardLaunch(_Launch):
    """Of a norm by channel."""

    column_sums: tuple[
        tuple[BoundKernel, Plan, tuple[int, ...]], ...
    ]  # for the gradients that are sums, by their number

    def steps(
        self, read: Any, statistics: Any, gradients: Any, partials: Any, shared: Any
    ) -> Iterator[tuple[Any, ...]]:
        written, merged = (tuple(gradients[i] for i in of) for of in (self.problem.written, self.merged))
        yield from self.main_steps(read, written, merged, partials, statistics, shared)
        by_number = dict(zip(self.sums, partials, strict=True))
        for kernel, plan, which in self.column_sums:
            totals = tuple(gradients[i] for i in which)
            yield sum_step(kernel, plan, tuple(by_number[i] for i in which), totals, [self.sums[i] for i in which])

    def main_steps(
        self, read: Any, written: Any, merged: Any, partials: Any, statistics: Any, shared: Any
    ) -> Iterator[tuple[Any, ...]]:
        """But for the sums."""
        raise NotImplementedError

    @cached_property
    def sums(self) -> dict[int, Sum]:
        """Of the gradients that leave partial sums behind, by their number."""
        left = grid.left(self.plan, self.problem)
        return {i: grid.gradient_sum(self.plan, self.space, self.problem, i) for i in left}

    @cached_property
    def merged(self) -> tuple[int, ...]:
        """The gradients that programs merge themselves."""
        return tuple(i for i in self.problem.merged if i not in self.sums)

    @cached_property
    def partial_sizes(self) -> tuple[int, ...]:
        return tuple(s.numel for s in self.sums.values())


def sum_step(
    kernel: BoundKernel, plan: Plan, partials: Sequence[Any], totals: Sequence[Any], sums: Sequence[Sum]
) -> tuple[Any, ...]:
    """`column_sum` of several at once."""
    blocks = -(-max(s.width for s in sums) // plan.block_cols)
    groups, heights, widths = zip(*sums, strict=True)
    return kernel, (blocks * max(groups), len(sums)), tuple(partials), tuple(totals), groups, heights, widths, blocks
