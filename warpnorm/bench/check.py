"""The error of a function against float64, forward or backward, on fresh random operands. Nothing wrong is timed."""

from collections.abc import Callable
from typing import Any

import torch

from warpnorm.bench.cases import FORWARD, BenchCase
from warpnorm.bench.rivals import EPS, Forward

CHECKED_ROWS = 512  # float64 of a whole large case would take longer than all the timing


class Subject:
    """One case's operands, and one function on them: a callable to time, and results to check."""

    def __init__(self, case: BenchCase, device: str) -> None:
        self.case = case
        cols = case.shape[-1]
        self.input = torch.randn(case.shape, device=device, dtype=torch.float32).to(case.dtype)
        self.parameters = [torch.randn(cols, device=device).to(case.dtype) for _ in range(1 + case.norm.is_centered)]
        self.grad = torch.randn(case.shape, device=device, dtype=torch.float32).to(case.dtype)

    def timed(self, forward: Forward) -> Callable[[], Any]:
        if self.case.direction == FORWARD:
            return lambda: self._forward(forward)
        leaves = self._leaves(self.input)
        output = forward(*leaves)
        return lambda: torch.autograd.grad(output, leaves, self.grad, retain_graph=True)

    def _forward(self, forward: Forward) -> torch.Tensor:
        with torch.no_grad():
            return forward(self.input, *self.parameters)

    def _leaves(self, input: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.detach().requires_grad_() for tensor in (input, *self.parameters)]

    def error(self, forward: Forward) -> float:
        """The largest relative error of the output, or of any gradient: norm of the difference over norm of the truth."""
        results, truths = self._results(forward)
        return max(_relative(result, truth) for result, truth in zip(results, truths, strict=True))

    def _results(self, forward: Forward) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows at the start and the end of the input, so that both ends of the grid are looked at."""
        rows = self.input.shape[0]
        half = min(CHECKED_ROWS, rows) // 2 or 1
        picked = torch.cat([torch.arange(half), torch.arange(rows - half, rows)]).unique().to(self.input.device)
        few, grad = self.input[picked], self.grad[picked]
        wide = [tensor.detach().double().requires_grad_() for tensor in (few, *self.parameters)]
        truth = definition(self.case, *wide)
        if self.case.direction == FORWARD:
            return [self._forward(forward)[picked]], [truth.detach()]
        whole = self.timed(forward)()[0][picked]  # the gradient of the input, from the whole case
        leaves = self._leaves(few)
        gradients = torch.autograd.grad(forward(*leaves), leaves, grad)
        truths = torch.autograd.grad(truth, wide, grad.double())
        return [whole, *gradients], [truths[0], *truths]


def definition(case: BenchCase, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """The norm as it is defined, in whatever dtype the operands have."""
    if case.norm.is_centered:
        x = x - x.mean(-1, keepdim=True)
    xhat = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return xhat * parameters[0] + (parameters[1] if len(parameters) > 1 else 0.0)


def _relative(result: torch.Tensor, truth: torch.Tensor) -> float:
    error = ((result.double() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")


def is_right(error: float, eager_error: float, dtype: torch.dtype) -> bool:
    """No further from float64 than eager PyTorch, but for one rounding of the result."""
    return error <= eager_error + torch.finfo(dtype).eps / 2
