"""The launches of one call of a norm by channel, of pattern `column`: one forward, or one for each task where tiles are
visited twice far apart; the same backward, and the sums of those gradients that are sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.backward import launch_gradient_sums
from warpnorm.launch.forward import empty_statistics, in_bits, lead_of, on_device
from warpnorm.plan import grid
from warpnorm.plan.plan import Plan
from warpnorm.problem import BackwardProblem, ForwardProblem, Running
from warpnorm.space import Space

WORDS = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ColumnForwardLaunch:
    problem: ForwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    eps: float
    last: Plan | None = None  # of last tasks that have a kernel of their own
    last_kernel: BoundKernel | None = None

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
        is_apart: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs, and averages the statistics, one number a row each, into running ones; returns them, each in
        memory of its own if they are to lie apart."""
        problem, space, plan = self.problem, self.space, self.plan
        lead = lead_of(operands)
        statistics = empty_statistics(problem, space.statistics, lead.device, is_apart)
        with on_device(lead):
            words = _words(plan, space, problem, lead.device, int(problem.has_long_mantissas))
            arguments = (tuple(map(in_bits, operands)), tuple(map(in_bits, outputs)), *words, statistics)
            averaged: tuple[Any, ...] = ((), ()) if running is None else running.arguments
            for of_step, order, programs in grid.column(plan, self.last, space, problem.has_tasks):
                kernel = self.last_kernel if of_step is self.last else self.kernel
                assert kernel is not None
                kernel.launch((programs, 1), *arguments, *_geometry(of_step, plan, space, order), self.eps, *averaged)
        return statistics


@dataclass(frozen=True)
class ColumnBackwardLaunch:
    problem: BackwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    column_sums: tuple[
        tuple[BoundKernel, Plan, tuple[int, ...]], ...
    ]  # for the gradients that are sums, by their number
    last: Plan | None = None
    last_kernel: BoundKernel | None = None

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
        sums = {i: grid.gradient_sum(plan, space, problem, i) for i in grid.left(plan, problem)}
        partials = {i: torch.empty(s.numel, dtype=problem.compute, device=device) for i, s in sums.items()}
        with on_device(gradients[0]):
            merged = tuple(gradients[i] for i in problem.merged if i not in partials)
            words = _words(plan, space, problem, device, len(merged))
            arguments = (read, written, merged, tuple(partials.values()), *words, tuple(statistics))
            for of_step, order, programs in grid.column(plan, self.last, space, problem.has_tasks):
                kernel = self.last_kernel if of_step is self.last else self.kernel
                assert kernel is not None
                kernel.launch((programs, 1), *arguments, *_geometry(of_step, plan, space, order))
            launch_gradient_sums(self.column_sums, partials, gradients, sums)


def _geometry(plan: Plan, first: Plan, space: Space, order: grid.Order) -> tuple[Any, ...]:
    """`first` is the plan of first tasks."""
    layout = grid.layout(plan, space)[0]
    lines = (space.strides, space.sizes, space.rows, space.statistics, layout, order)
    first_tasks = (grid.order(first, space).unit_tiles, first.block_cols, *grid.spans(first, space))
    return *lines, grid.reciprocals(layout, order), space.cols, grid.spans(plan, space), first_tasks


def _words(
    plan: Plan, space: Space, problem: ForwardProblem | BackwardProblem, device: torch.device, more: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """For what the programs tell each other: two for each line of every tile, and `more`, the second part of its mean or
    sums that are merged beside; two for each row. All are zero if somebody waits for them."""
    if not problem.has_tasks:
        return (), ()
    order = grid.order(plan, space)
    pieces = order.units * order.unit_tiles * plan.block_rows
    counts = [pieces] * (2 + more) + [space.statistics] * 2
    sizes = [-(-count // 4) * 4 for count in counts]  # each begins at a multiple of 16 bytes
    make = torch.zeros if order.is_by_turns else torch.empty
    storage = make(sum(sizes), dtype=WORDS[problem.compute.itemsize], device=device)
    *of_pieces, mean, rstd = storage.split(sizes)
    return tuple(of_pieces), (mean, rstd)
