"""The launches of one call of a norm by channel, of pattern `held`: one forward; one backward, and the sums of those
gradients that are sums over rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warpnorm.codegen import along
from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.backward import launch_gradient_sums
from warpnorm.launch.forward import empty_statistics, in_bits, lead_of, on_device, team_mailbox
from warpnorm.plan import grid
from warpnorm.plan.plan import Plan
from warpnorm.problem import BackwardProblem, ForwardProblem, Running
from warpnorm.space import Space


@dataclass(frozen=True)
class HeldForwardLaunch:
    problem: ForwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    eps: float

    @property
    def words(self) -> int:
        """Of a message: a mean and M2, and of long mantissas what the mean is rounded off by."""
        return 2 if self.problem.has_long_mantissas else 1

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
        is_apart: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs, and averages the statistics, one number a row each, into running ones; returns them, each in
        memory of its own if they are to lie apart."""
        space, lead = self.space, lead_of(operands)
        statistics = empty_statistics(self.problem, space.statistics, lead.device, is_apart)
        averaged: tuple[Any, ...] = ((), ()) if running is None else running.arguments
        with on_device(lead):
            programs = grid.held(self.plan, space)
            self.kernel.launch(
                programs, tuple(map(in_bits, operands)), tuple(map(in_bits, outputs)),
                _mailbox(self.plan, programs, self.words, statistics), statistics, *_geometry(space), self.eps, *averaged,
            )  # fmt: skip
        return statistics


@dataclass(frozen=True)
class HeldBackwardLaunch:
    problem: BackwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    column_sums: tuple[
        tuple[BoundKernel, Plan, tuple[int, ...]], ...
    ]  # for the gradients that are sums, by their number

    @cached_property
    def words(self) -> int:
        """Of a message."""
        return -(-along.sent(self.problem) // along.sums_a_word(self.problem))

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
        sums = {i: grid.gradient_sum(plan, space, problem, i) for i in problem.left}
        partials = {i: torch.empty(s.numel, dtype=problem.compute, device=device) for i, s in sums.items()}
        merged = tuple(gradients[i] for i in problem.merged)
        with on_device(gradients[0]):
            programs = grid.held(plan, space)
            strides, sizes, *others = _geometry(space)
            self.kernel.launch(
                programs, tuple(map(in_bits, (*operands, *grad_outputs))), tuple(gradients[i] for i in problem.written),
                merged, tuple(partials.values()), _mailbox(plan, programs, self.words, statistics),
                tuple(statistics), strides, sizes, space.rows, *others,
            )  # fmt: skip
            launch_gradient_sums(self.column_sums, partials, gradients, sums)


def _geometry(space: Space) -> tuple[Any, ...]:
    return space.strides, space.sizes, space.statistics, space.pieces, space.inner_rows, space.cols


def _mailbox(plan: Plan, programs: tuple[int, int], length: int, statistics: Sequence[torch.Tensor]) -> torch.Tensor:
    """A lone program tells nobody."""
    if plan.splits == 1:
        return torch.empty(1, dtype=torch.int64, device=statistics[0].device)
    return team_mailbox(*programs, length, statistics[0].device)
