"""A norm whose rows lie on several ranks, in PyTorch's operators. `definition` can be differentiated any number of times,
with collectives of its own; `Normalized` has one collective forward and one backward, and compilers see through it."""

from collections.abc import Sequence
from typing import Any

import torch

from warpnorm import reference
from warpnorm.norms import CHANNEL, Norm
from warpnorm.parallel import exchange
from warpnorm.problem import Call


def composite(call: Call, operands: Any, group: Any) -> tuple[tuple[torch.Tensor, ...], exchange.Merged]:
    """The outputs of a call, and the statistics of its rows."""
    c, wide = reference.before(call, operands)
    dims = columns(call, c)
    with torch.no_grad():
        count = count_of(c, dims)
        mean, variance = _moments(c, call.norm, dims, count)
    stance = exchange.stance(c.requires_grad)
    flat = None if mean is None else mean.reshape(-1)
    merged = exchange.merge_moments(count, flat, variance.reshape(-1), group, stance)
    anchor = None if c.requires_grad else exchange.anchor(merged, c)
    xhat = Normalized.apply(c, anchor, call.norm, dims, call.eps, group, *merged)
    return _after(call, xhat, c, wide), merged


def differentiable(call: Call, operands: Any, group: Any) -> tuple[torch.Tensor, ...]:
    """The outputs by `definition`."""
    c, wide = reference.before(call, operands)
    return _after(call, definition(c, call.norm, columns(call, c), call.eps, group), c, wide)


def _after(call: Call, xhat: torch.Tensor, c: torch.Tensor, wide: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result.to(dtype) for result, dtype in zip(call.epilogue(xhat, c, *wide), call.outputs, strict=True))


def columns(call: Call, c: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a row."""
    return (0, *range(2, c.ndim)) if call.norm.rows == CHANNEL else tuple(range(c.ndim - call.col_dims, c.ndim))


def count_of(c: torch.Tensor, dims: tuple[int, ...]) -> int:
    count = 1
    for dim in dims:
        count *= c.shape[dim]
    return count


class Normalized(torch.autograd.Function):
    """(c, what makes this rank take part, norm, dims, eps, group, mean, variance, count, stances) -> xhat."""

    @staticmethod
    def forward(
        ctx: Any,
        c: torch.Tensor,
        anchor: torch.Tensor | None,
        norm: Norm,
        dims: tuple[int, ...],
        eps: float,
        group: Any,
        mean: torch.Tensor | None,
        variance: torch.Tensor,
        total: torch.Tensor,
        stances: torch.Tensor,
    ) -> torch.Tensor:
        shape = [1 if dim in dims else size for dim, size in enumerate(c.shape)]
        rstd = torch.rsqrt(variance + eps).to(c.dtype).view(shape)
        parts = () if mean is None else exchange.in_two(mean, c.dtype)
        means = tuple(part.view(shape) for part in parts)
        ctx.norm, ctx.dims, ctx.eps, ctx.group = norm, dims, eps, group
        ctx.save_for_backward(c, rstd, total, stances, *means)
        return _deviation(c, means) * rstd

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, (c, rstd, count, stances, *means) = grads[0], ctx.saved_tensors
        exchange.check_stances(stances)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with torch.enable_grad():
                alias = c.view_as(c) if c.requires_grad else c.detach().requires_grad_()
                xhat = definition(alias, ctx.norm, ctx.dims, ctx.eps, ctx.group)
                (gradient,) = torch.autograd.grad(xhat, alias, grad, create_graph=True)
            return gradient, *[None] * 9
        deviation = _deviation(c, means)
        sums = [(grad * deviation).sum(ctx.dims, keepdim=True)]
        if means:
            sums.insert(0, -rstd * grad.sum(ctx.dims, keepdim=True))
        terms = exchange.gradient_terms(sums, rstd, count, ctx.group)
        grad = grad * rstd + terms[-1] * deviation
        return (grad + terms[0] if means else grad), *[None] * 9


def definition(c: torch.Tensor, norm: Norm, dims: tuple[int, ...], eps: float, group: Any) -> torch.Tensor:
    """xhat as it is defined."""
    count = Summed.apply(c.new_full((1,), count_of(c, dims), dtype=torch.float64), group).clamp(min=1.0).to(c.dtype)
    deviation = c - Summed.apply(c.sum(dims, keepdim=True), group) / count if norm.is_centered else c
    variance = Summed.apply(deviation.square().sum(dims, keepdim=True), group) / count
    return deviation * torch.rsqrt(variance + eps)


class Summed(torch.autograd.Function):
    """The sum over all ranks. A gradient is that of what all ranks compute, so it is summed in the same way."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return exchange.add_up([part], group)[0].to(part.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Summed.apply(grads[0], ctx.group), None


def _deviation(c: torch.Tensor, means: Sequence[torch.Tensor]) -> torch.Tensor:
    for part in means:
        c = c - part
    return c


def _moments(
    c: torch.Tensor, norm: Norm, dims: tuple[int, ...], count: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Mean, if it is asked for, and variance of what is here; zeros of nothing."""
    if count == 0 or c.numel() == 0:
        zeros = c.sum(dims, keepdim=True)
        return (zeros if norm.is_centered else None), zeros
    if not norm.is_centered:
        return None, c.square().mean(dims, keepdim=True)
    variance, mean = torch.var_mean(c, dims, correction=0, keepdim=True)
    return mean, variance
