"""Forward and backward launches as one differentiable operation. Only the operands and the statistics are kept:
backward computes c again. The second derivative goes through the composite of `reference.py`."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from warpnorm.problem import Call
from warpnorm.reference import composite


class Flow(Protocol):
    """The two directions of a call, as `pipeline.py` runs them."""

    def forward(
        self, call: Call, operands: Sequence[torch.Tensor | float]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]: ...

    def backward(
        self,
        call: Call,
        operands: Sequence[torch.Tensor | float],
        grad_output: torch.Tensor,
        statistics: Sequence[torch.Tensor],
        wanted: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]: ...


class Normalization(torch.autograd.Function):
    """(flow, call, *operands) -> (output, *statistics)."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, call: Call, *operands: torch.Tensor | float) -> tuple[torch.Tensor, ...]:
        output, statistics = flow.forward(call, operands)
        ctx.flow, ctx.call = flow, call
        ctx.numbers = [None if isinstance(o, torch.Tensor) else o for o in operands]
        ctx.save_for_backward(*(o if isinstance(o, torch.Tensor) else None for o in operands), *statistics)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)  # no zeros for the statistics, which have no gradient
        return (output, *statistics)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        count = len(ctx.numbers)
        if grad_output is None:
            return (None,) * (2 + count)
        saved = ctx.saved_tensors  # once: each read unpacks anew, which checkpointing refuses
        operands, statistics = _with_numbers(saved[:count], ctx.numbers), saved[count:]
        wanted = tuple(i for i in range(count) if ctx.needs_input_grad[2 + i])
        gradients = NormalizationBackward.apply(ctx.flow, ctx.call, wanted, statistics, grad_output, *operands)
        found = dict(zip(wanted, gradients, strict=True))
        return (None, None, *(found.get(i) for i in range(count)))


class NormalizationBackward(torch.autograd.Function):
    """(flow, call, wanted, statistics, grad_output, *operands) -> the wanted gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        flow: Flow,
        call: Call,
        wanted: tuple[int, ...],
        statistics: tuple[torch.Tensor, ...],
        grad_output: torch.Tensor,
        *operands: torch.Tensor | float,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.wanted = call, wanted
        ctx.numbers = [None if isinstance(o, torch.Tensor) else o for o in operands]
        ctx.save_for_backward(grad_output, *(o if isinstance(o, torch.Tensor) else None for o in operands))
        return flow.backward(call, operands, grad_output, statistics, wanted)

    @staticmethod
    def backward(ctx: Any, *grad_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        is_differentiated_again = torch.is_grad_enabled()
        with torch.enable_grad():
            grad_output, *saved = (_as_input(tensor) for tensor in ctx.saved_tensors)
            operands = _with_numbers(saved, ctx.numbers)
            output = composite(ctx.call, *operands)
            first = [operands[i] for i in ctx.wanted]
            gradients = torch.autograd.grad(output, first, grad_output, create_graph=True, allow_unused=True)
            needed = [i for i, need in enumerate(ctx.needs_input_grad) if need]
            inputs = [grad_output if i == 4 else operands[i - 5] for i in needed]
            pairs = [
                (gradient, grad)
                for gradient, grad in zip(gradients, grad_gradients, strict=True)
                if gradient is not None and grad is not None and gradient.requires_grad
            ]
            second: Sequence[torch.Tensor | None] = [None] * len(inputs)
            if pairs:
                second = torch.autograd.grad(
                    [gradient for gradient, _ in pairs],
                    inputs,
                    [grad for _, grad in pairs],
                    create_graph=is_differentiated_again,
                    allow_unused=True,
                )
        found = dict(zip(needed, second, strict=True))
        return tuple(found.get(i) for i in range(len(ctx.needs_input_grad)))


def _with_numbers(tensors: Sequence[torch.Tensor | None], numbers: Sequence[float | None]) -> list[Any]:
    return [n if t is None else t for t, n in zip(tensors, numbers, strict=True)]


def _as_input(tensor: torch.Tensor | None) -> Any:
    """A tensor to differentiate by. An alias where it is part of a graph: the saved tensors may depend on each other,
    and what is wanted are partial derivatives, which stop here."""
    if tensor is None:
        return None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
