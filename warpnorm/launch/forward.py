"""The forward launches of one call: everything that does not depend on the tensors' contents is settled beforehand."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warpnorm.codegen.expressions import FLOAT8
from warpnorm.codegen.kernel import BoundKernel
from warpnorm.launch.described import Described, Slot, averaged, described, numbered
from warpnorm.launch.shared import Shared, mailbox
from warpnorm.plan import grid
from warpnorm.plan.plan import ROW, TEAM, Plan
from warpnorm.problem import ForwardProblem, Running
from warpnorm.space import Space


@dataclass(frozen=True)
class ForwardLaunch:
    """Of a norm over rows, and what other patterns have in common with it."""

    problem: ForwardProblem
    plan: Plan
    space: Space
    kernel: BoundKernel
    eps: float

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
        is_apart: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs, and averages the statistics, one number a row each, into running ones; returns them, each in
        memory of its own if they are to lie apart."""
        lead = lead_of(operands)
        statistics = empty_statistics(self.problem, self.units, lead.device, is_apart)
        with on_device(lead):
            self.into([in_bits(o) for o in operands], [in_bits(o) for o in outputs], statistics, running)
        return statistics

    def into(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor | float],
        statistics: tuple[torch.Tensor, ...],
        running: Running | None = None,
    ) -> None:
        """The launches alone, on the current device, of tensors that no dtype of 8 bits is among."""
        of_running = NOT_AVERAGED if running is None else running.arguments
        shared = self.shared.take(lead_of(operands).device)
        for kernel, programs, *arguments in self.steps(tuple(operands), tuple(outputs), statistics, shared, of_running):
            kernel.launch(programs, *arguments)

    def described(self, operands: Sequence[int], outputs: int, running: Sequence[int] = ()) -> Described | None:
        """The launches of as many tensors, by the numbers that the compiled launcher knows them by, as it takes them."""
        first = len(operands) + len(running)
        of_outputs, statistics, shared = numbered(first, outputs, len(self.problem.norm.statistics), self.shared.parts)
        of_running = averaged(tuple(map(Slot, running)), self.size) if running else NOT_AVERAGED
        given = (tuple(map(Slot, operands)), of_outputs, statistics, shared, of_running)
        return described(self.steps(*given), self.shared)

    def steps(
        self, operands: Any, outputs: Any, statistics: Any, shared: Any, of_running: tuple[Any, Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Each a kernel, how many programs, and what it is handed over: tensors, or what stands for them."""
        running = of_running if self.plan.pattern == ROW else ()
        programs = grid.launched(self.plan, self.programs)
        yield self.kernel, programs, operands, outputs, *shared, statistics, *self.geometry, *running

    @cached_property
    def units(self) -> int:
        """How many statistics of each kind there are."""
        return self.space.rows

    @cached_property
    def size(self) -> int:
        """Values that share a statistic."""
        return self.space.rows * self.space.cols // self.units

    @cached_property
    def shared(self) -> Shared:
        return mailbox(self.plan, self.plan.programs, self.plan.splits) if self.plan.pattern == TEAM else Shared()

    def empty_statistics(self, device: torch.device, rows: int | None = None) -> tuple[torch.Tensor, ...]:
        """Of this call, or of more rows."""
        return empty_statistics(self.problem, self.units if rows is None else rows, device)

    @cached_property
    def programs(self) -> tuple[int, int]:
        return grid.forward(self.plan, self.space)

    @cached_property
    def geometry(self) -> tuple[Any, ...]:
        space = self.space
        return space.strides, space.sizes, space.rows, space.cols, self.eps


NOT_AVERAGED: tuple[Any, Any] = ((), ())  # what a kernel that could average statistics is told


def empty_statistics(
    problem: ForwardProblem, rows: int, device: torch.device, is_apart: bool = False
) -> tuple[torch.Tensor, ...]:
    """One allocation, or one for each; a second for those that are not saved, which else would last as long as what is.
    Every statistic starts at a multiple of 16 bytes, as the kernels are told."""
    names, saved = problem.norm.statistics, len(problem.norm.saved)
    if is_apart:
        return tuple(torch.empty(rows, dtype=problem.compute, device=device) for _ in names)
    stride = -(-rows // 4) * 4
    found: list[torch.Tensor] = []
    for count in filter(None, (saved, len(names) - saved)):
        storage = torch.empty(count * stride, dtype=problem.compute, device=device)
        found += [storage[i * stride : i * stride + rows] for i in range(count)]
    return tuple(found)


def lead_of(operands: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """A tensor on the device that a call runs on; there need not be any output."""
    return next(operand for operand in operands if isinstance(operand, torch.Tensor))


def in_bits(operand: torch.Tensor | float) -> torch.Tensor | float:
    """The kernels read and write 8-bit floats as the integers that their bits are."""
    if isinstance(operand, torch.Tensor) and operand.dtype in FLOAT8:
        return operand.detach().view(torch.uint8)
    return operand


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()
