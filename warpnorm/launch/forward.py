"""The forward launch of one call: everything that does not depend on the tensors' contents is settled beforehand."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from warpnorm.codegen.bind import BoundKernel
from warpnorm.codegen.expressions import FLOAT8
from warpnorm.plan import grid
from warpnorm.plan.plan import ROW, Plan
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
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs, and averages the statistics, one number a row each, into running ones; returns them."""
        space = self.space
        averaged: tuple[Any, ...] = ()
        if self.plan.pattern == ROW:
            averaged = ((), ()) if running is None else running.arguments
        statistics = empty_statistics(self.problem, space.rows, outputs[0].device)
        with on_device(outputs[0]):
            self.kernel.launch(
                grid.forward(self.plan, space), tuple(map(in_bits, operands)), tuple(map(in_bits, outputs)), statistics,
                space.strides, space.sizes, space.rows, space.cols, self.eps, *averaged,
            )  # fmt: skip
        return statistics


def empty_statistics(problem: ForwardProblem, rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """One allocation; every statistic starts at a multiple of 16 bytes, as the kernels are told."""
    names = problem.norm.statistics
    stride = -(-rows // 4) * 4
    storage = torch.empty(len(names) * stride, dtype=problem.compute, device=device)
    return tuple(storage[i * stride : i * stride + rows] for i in range(len(names)))


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
