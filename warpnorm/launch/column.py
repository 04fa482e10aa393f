"""The launches of one call of a norm by channel, of pattern `column`: one forward, or one for each task where tiles are
visited twice far apart; the same backward, and the sums of those gradients that are sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.backward import ChannelBackwardLaunch
from warpnorm.launch.forward import ForwardLaunch
from warpnorm.launch.shared import EMPTY, ZEROS, Shared
from warpnorm.plan import grid
from warpnorm.plan.plan import Plan
from warpnorm.problem import BackwardProblem, ForwardProblem
from warpnorm.space import Space

WORDS = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ColumnForwardLaunch(ForwardLaunch):
    last: Plan | None = None  # of last tasks that have a kernel of their own
    last_kernel: BoundKernel | None = None

    def steps(
        self, operands: Any, outputs: Any, statistics: Any, shared: Any, of_running: tuple[Any, Any]
    ) -> Iterator[tuple[Any, ...]]:
        given = (operands, outputs, *_of_words(shared), statistics)
        for is_last, programs, geometry in self.tasks:
            yield self.last_kernel if is_last else self.kernel, programs, *given, *geometry, self.eps, *of_running

    @cached_property
    def units(self) -> int:
        return self.space.statistics

    @cached_property
    def shared(self) -> Shared:
        return _words(self.plan, self.space, self.problem, int(self.problem.has_long_mantissas))

    @cached_property
    def tasks(self) -> list[tuple[bool, tuple[int, int], tuple[Any, ...]]]:
        return _tasks(self.plan, self.last, self.space, self.problem.has_tasks)


@dataclass(frozen=True)
class ColumnBackwardLaunch(ChannelBackwardLaunch):
    last: Plan | None = None
    last_kernel: BoundKernel | None = None

    def main_steps(
        self, read: Any, written: Any, merged: Any, partials: Any, statistics: Any, shared: Any
    ) -> Iterator[tuple[Any, ...]]:
        given = (read, written, merged, partials, *_of_words(shared), statistics)
        for is_last, programs, geometry in self.tasks:
            yield self.last_kernel if is_last else self.kernel, programs, *given, *geometry

    @cached_property
    def shared(self) -> Shared:
        return _words(self.plan, self.space, self.problem, len(self.merged))

    @cached_property
    def tasks(self) -> list[tuple[bool, tuple[int, int], tuple[Any, ...]]]:
        return _tasks(self.plan, self.last, self.space, self.problem.has_tasks)


def _tasks(
    plan: Plan, last: Plan | None, space: Space, has_tasks: bool
) -> list[tuple[bool, tuple[int, int], tuple[Any, ...]]]:
    """Of each launch, whether its plan is `last`, how many programs it has, and its numbers."""
    return [
        (of_step is last, (programs, 1), _geometry(of_step, plan, space, order))
        for of_step, order, programs in grid.column(plan, last, space, has_tasks)
    ]


def _geometry(plan: Plan, first: Plan, space: Space, order: grid.Order) -> tuple[Any, ...]:
    """`first` is the plan of first tasks."""
    layout = grid.layout(plan, space)[0]
    lines = (space.strides, space.sizes, space.rows, space.statistics, layout, order)
    first_tasks = (grid.order(first, space).unit_tiles, first.block_cols, *grid.spans(first, space))
    return *lines, grid.reciprocals(layout, order), space.cols, grid.spans(plan, space), first_tasks


def _words(plan: Plan, space: Space, problem: ForwardProblem | BackwardProblem, more: int) -> Shared:
    """For what the programs tell each other: two for each line of every tile, and `more`, the second part of its mean or
    sums that are merged beside; two for each row. All are zero if somebody waits for them."""
    if not problem.has_tasks:
        return Shared()
    order = grid.order(plan, space)
    pieces = order.units * order.unit_tiles * plan.block_rows
    counts = [pieces] * (2 + more) + [space.statistics] * 2
    sizes = tuple(-(-count // 4) * 4 for count in counts)  # each begins at a multiple of 16 bytes
    return Shared(sizes, WORDS[problem.compute.itemsize], ZEROS if order.is_by_turns else EMPTY)


def _of_words(shared: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of pieces, and of rows."""
    return shared[:-2], shared[-2:]
