"""The forward launch of one call: everything that does not depend on the tensors' contents is settled beforehand."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warpnorm.codegen.expressions import FLOAT8
from warpnorm.codegen.kernel import BoundKernel
from warpnorm.kernels.messages import BOXES
from warpnorm.launch.described import describe, slots
from warpnorm.plan import grid
from warpnorm.plan.plan import ROW, TEAM, Plan
from warpnorm.problem import ForwardProblem, Running
from warpnorm.space import Space


@dataclass(frozen=True)
class ForwardLaunch:
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
        statistics = empty_statistics(self.problem, self.space.rows, lead.device, is_apart)
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
        """The launch alone, on the current device, of tensors that no dtype of 8 bits is among."""
        averaged = self.without_running if running is None or not self.without_running else running.arguments
        read, written = tuple(operands), tuple(outputs)
        shared = (mailbox(self.plan, statistics[0].device),) if self.plan.pattern == TEAM else ()
        self.kernel.launch(self.programs, read, written, *shared, statistics, *self.geometry, *averaged)

    def described(self, operands: int, outputs: int) -> tuple[Any, ...] | None:
        """This launch, of as many tensors, as the compiled launcher takes it."""
        if self.plan.pattern == TEAM:  # whose mailbox is that of a stream
            return None
        of_operands, of_outputs, of_statistics = slots(operands, outputs, len(self.problem.norm.statistics))
        return describe(
            self.kernel, self.programs, of_operands, of_outputs, of_statistics, *self.geometry, *self.without_running
        )

    def empty_statistics(self, device: torch.device, rows: int | None = None) -> tuple[torch.Tensor, ...]:
        """Of this call, or of more rows."""
        return empty_statistics(self.problem, self.space.rows if rows is None else rows, device)

    @cached_property
    def programs(self) -> tuple[int, int]:
        return grid.forward(self.plan, self.space)

    @cached_property
    def geometry(self) -> tuple[Any, ...]:
        space = self.space
        return space.strides, space.sizes, space.rows, space.cols, self.eps

    @cached_property
    def without_running(self) -> tuple[Any, ...]:
        """What a kernel that could average statistics is told where there are no running ones."""
        return ((), ()) if self.plan.pattern == ROW else ()


def empty_statistics(
    problem: ForwardProblem, rows: int, device: torch.device, is_apart: bool = False
) -> tuple[torch.Tensor, ...]:
    """One allocation, or one for each; every statistic starts at a multiple of 16 bytes, as the kernels are told."""
    names = problem.norm.statistics
    if is_apart:
        return tuple(torch.empty(rows, dtype=problem.compute, device=device) for _ in names)
    stride = -(-rows // 4) * 4
    storage = torch.empty(len(names) * stride, dtype=problem.compute, device=device)
    return tuple(storage[i * stride : i * stride + rows] for i in range(len(names)))


# Streams and teams of other sizes are few, or come one after another. A launch that still waits on its stream has what is
# dropped: memory of a stream is given to later work of the same stream alone
MOST_MAILBOXES = 256
_mailboxes: dict[Any, torch.Tensor] = {}
# Cleared words for the mailboxes of graphs: 1 MB at a time, 16 at the most. They are never given back, since graphs do not
# say when they are gone
STOCK, MOST_STOCKS = 1 << 17, 16
_stock: list[torch.Tensor] = []
_left: dict[torch.device, int] = {}


def mailbox(plan: Plan, device: torch.device) -> torch.Tensor:
    return team_mailbox(plan.programs, plan.splits, 1, device)


def team_mailbox(teams: int, splits: int, length: int, device: torch.device) -> torch.Tensor:
    """Where the programs of a team leave their sums for each other, in messages of `length` words: one for each stream,
    whose launches come one after another, and for each kind of team, whose programs have then all sent equally many."""
    words = teams * BOXES.value * splits * length
    if torch.cuda.is_current_stream_capturing():  # the graph may be replayed beside anything
        return _from_stock(words, device)
    if _left.get(device, 0) < STOCK // 2 and len(_stock) < MOST_STOCKS:
        _stock.append(torch.zeros(STOCK, dtype=torch.int64, device=device))
        _left[device] = STOCK
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream, splits, length, words)
    box = _mailboxes.get(key)
    if box is None:
        if len(_mailboxes) >= MOST_MAILBOXES:
            _mailboxes.clear()
        box = _mailboxes[key] = torch.zeros(words, dtype=torch.int64, device=device)
    return box


def _from_stock(words: int, device: torch.device) -> torch.Tensor:
    """A mailbox for a launch in a graph, which nobody else ever has: one that was cleared beforehand, as long as there are,
    so that the graph need not do so."""
    left = _left.get(device, 0) - -(-words // 2) * 2  # each begins at a multiple of 16 bytes
    if left < 0:
        return torch.zeros(words, dtype=torch.int64, device=device)
    _left[device] = left
    stock = next(stock for stock in reversed(_stock) if stock.device == device)
    return stock[left : left + words]


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
