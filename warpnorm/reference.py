"""The norms in plain PyTorch. `composite` is the specification, in primitive operators that can be differentiated any
number of times; `layer_norm` and `rms_norm` are what runs where there is no GPU, by PyTorch's own fused operators."""

from dataclasses import dataclass
from typing import Any

import torch

from warpnorm.problem import Call, compute_dtype


@dataclass(frozen=True)
class Itself:
    """The prologue of the plain norms: their input as it is."""

    def __call__(self, *operands: Any) -> torch.Tensor:
        return operands[0]


@dataclass(frozen=True)
class Affine:
    """The epilogue of the plain norms: `xhat * (weight + weight_offset) + bias`."""

    has_weight: bool
    has_bias: bool
    weight_offset: float = 0.0

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        xhat, _, _, *parameters = values  # beside it c, and the input once more
        remaining = iter(parameters)
        if self.has_weight:
            weight = next(remaining)
            xhat = xhat * (weight + self.weight_offset if self.weight_offset else weight)
        if self.has_bias:
            xhat = xhat + next(remaining)
        return (xhat,)


def composite(call: Call, *operands: torch.Tensor | float) -> tuple[torch.Tensor, ...]:
    """The call as its definition reads, in float32 (float64 where anything is float64), rounded once at the end."""
    compute = compute_dtype([call.compute, *(t.dtype for t in operands if isinstance(t, torch.Tensor))])
    wide = [t.to(compute) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in operands]
    c = deviation = call.prologue(*wide)
    dims = tuple(range(-call.col_dims, 0))
    if call.norm.is_centered:
        deviation = c - c.mean(dims, keepdim=True)
    xhat = deviation * torch.rsqrt(deviation.square().mean(dims, keepdim=True) + call.eps)
    results = call.epilogue(xhat, c, *wide)
    return tuple(result.to(dtype) for result, dtype in zip(results, call.outputs, strict=True))


def layer_norm(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | float | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, mean and rstd by `native_layer_norm`, for every weight and dtype that it does not take itself."""
    compute = _compute_dtype(input, weight, bias)
    weight = _full_weight(input, shape, weight, weight_offset, compute)
    bias = None if bias is None else bias.to(compute)
    output, mean, rstd = torch.native_layer_norm(input.to(compute), shape, weight, bias, eps)
    return output.to(input.dtype), mean.detach(), rstd.detach()


def rms_norm(
    input: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor | float | None, eps: float, weight_offset: float
) -> torch.Tensor:
    compute = _compute_dtype(input, weight)
    weight = _full_weight(input, shape, weight, weight_offset, compute)
    return torch.rms_norm(input.to(compute), shape, weight, eps).to(input.dtype)


def rms_statistic(
    input: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor | float | None, eps: float
) -> torch.Tensor:
    c = input.detach().to(_compute_dtype(input, weight))
    return torch.rsqrt(c.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)


def _compute_dtype(*tensors: torch.Tensor | float | None) -> torch.dtype:
    return compute_dtype([t.dtype for t in tensors if isinstance(t, torch.Tensor)])


def _full_weight(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | float | None,
    weight_offset: float,
    compute: torch.dtype,
) -> torch.Tensor | None:
    """PyTorch's operators take a weight of the normalized shape in the dtype they compute in, and no offset."""
    if weight is None:
        return None
    if not isinstance(weight, torch.Tensor):
        return torch.full(shape, weight + weight_offset, dtype=compute, device=input.device)
    weight = weight.to(compute)
    if weight_offset:
        weight = weight + weight_offset
    return weight.expand(shape) if weight.ndim == 0 else weight
