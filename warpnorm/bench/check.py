"""The error of a function against float64, forward or backward, on fresh random operands. Nothing wrong is timed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpnorm.bench.cases import FORWARD, BenchCase
from warpnorm.bench.rivals import Forward

CHECKED_ROWS = 512  # float64 of a whole large case would take longer than all the timing


class Subject:
    """One case's operands, and one function on them: a callable to time, and results to check."""

    def __init__(self, case: BenchCase, device: str) -> None:
        self.case = case
        workload = case.workload
        self.full = [_random(case.shape, case.dtype, device) for _ in range(workload.full)]
        self.columns = [_random(case.shape[-1:], case.dtype, device) for _ in range(workload.columns)]
        outputs = 2 if workload.forward_tensors - workload.full > 1 else 1
        self.grads = [_random(case.shape, case.dtype, device) for _ in range(outputs)]

    def timed(self, forward: Forward) -> Callable[[], Any]:
        if self.case.direction == FORWARD:
            return lambda: self._forward(forward)
        leaves = _leaves([*self.full, *self.columns])
        outputs = _several(forward(*leaves))
        return lambda: torch.autograd.grad(outputs, leaves, self.grads, retain_graph=True)

    def _forward(self, forward: Forward) -> list[torch.Tensor]:
        with torch.no_grad():
            return _several(forward(*self.full, *self.columns))

    def error(self, forward: Forward) -> float:
        """The largest relative error of an output, or of any gradient: norm of the difference over norm of the truth."""
        results, truths = self._results(forward)
        return max(_relative(result, truth) for result, truth in zip(results, truths, strict=True))

    def _results(self, forward: Forward) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows at the start and the end of the input, so that both ends of the grid are looked at."""
        rows = self.case.shape[0]
        half = min(CHECKED_ROWS, rows) // 2 or 1
        picked = torch.cat([torch.arange(half), torch.arange(rows - half, rows)]).unique().to(self.full[0].device)
        few, grads = [t[picked] for t in self.full], [g[picked] for g in self.grads]
        wide = _leaves([t.double() for t in (*few, *self.columns)])
        truths = _several(self.case.workload.function(*wide))
        if self.case.direction == FORWARD:
            return [output[picked] for output in self._forward(forward)], [truth.detach() for truth in truths]
        whole = self.timed(forward)()[: len(few)]  # the gradients of the full operands, from the whole case
        leaves = _leaves([*few, *self.columns])
        gradients = torch.autograd.grad(_several(forward(*leaves)), leaves, grads)
        exact = torch.autograd.grad(truths, wide, [g.double() for g in grads])
        return [*(gradient[picked] for gradient in whole), *gradients], [*exact[: len(few)], *exact]


def _random(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(tuple(shape), device=device, dtype=torch.float32).to(dtype)


def _leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _several(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _relative(result: torch.Tensor, truth: torch.Tensor) -> float:
    error = ((result.double() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")


def is_right(error: float, eager_error: float, dtype: torch.dtype) -> bool:
    """No further from float64 than eager PyTorch, but for one rounding of the result."""
    return error <= eager_error + torch.finfo(dtype).eps / 2
