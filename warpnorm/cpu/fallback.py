"""Calls that the compiler, for once, does not build: by PyTorch's operators, as the definition reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warpnorm.problem import BackwardProblem, Call, Running
from warpnorm.reference import composite, differentiating, statistics


@dataclass(frozen=True)
class FallbackForward:
    call: Call
    why: str

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
    ) -> tuple[torch.Tensor, ...]:
        norm = self.call.norm
        with torch.no_grad():
            results = composite(self.call, *operands)
            found = statistics(self.call, *operands) if norm.is_computed else {}
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
            if running is not None:
                kept, *gained = running.factors
                buffers = running.mean, running.variance
                averaged = [
                    buffer * kept + found[name] * factor
                    for name, buffer, factor in zip(("mean", "variance"), buffers, gained, strict=True)
                ]
                for buffer, value in zip(buffers, averaged, strict=True):  # where memory ends, neither is written
                    buffer.copy_(value)
        return tuple(found[name] for name in norm.statistics)


@dataclass(frozen=True)
class FallbackBackward:
    call: Call
    problem: BackwardProblem
    why: str

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        problem = self.problem
        leaves = [o.detach() if isinstance(o, torch.Tensor) else o for o in operands]
        wanted = [leaves[i].requires_grad_() for i in problem.wanted]  # type: ignore[union-attr]
        with differentiating():
            outputs = composite(self.call, *leaves)
            found = torch.autograd.grad(
                [outputs[i] for i in problem.given], wanted, grad_outputs, allow_unused=True, materialize_grads=True
            )
        for gradient, value in zip(gradients, found, strict=True):
            gradient.copy_(value)
