"""The norms in plain PyTorch. `composite` is the specification, in primitive operators that can be differentiated any
number of times; the functions named after the norms are what runs where neither kernels nor native code do, by PyTorch's
own fused operators."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from warpnorm.norms import GROUPS
from warpnorm.problem import Call, compute_dtype

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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


@dataclass(frozen=True)
class FixedAffine:
    """The epilogue of BatchNorm in evaluation, by a mean and a variance that it is given."""

    eps: float
    has_weight: bool
    has_bias: bool

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        xhat, _, _, mean, variance, *parameters = values
        return Affine(self.has_weight, self.has_bias)(
            (xhat - mean) * torch.rsqrt(variance + self.eps), None, None, *parameters
        )


def composite(call: Call, *operands: torch.Tensor | float) -> tuple[torch.Tensor, ...]:
    """The call as its definition reads, in float32 (float64 where anything is float64), rounded once at the end."""
    c, wide = before(call, operands)
    xhat = c
    if call.norm.is_computed:
        deviation, _mean, variance = _moments(call, c)
        xhat = (deviation * torch.rsqrt(variance + call.eps)).reshape(c.shape)
    results = call.epilogue(xhat, c, *wide)
    return tuple(result.to(dtype) for result, dtype in zip(results, call.outputs, strict=True))


@contextmanager
def differentiating() -> Iterator[None]:
    """Gradients are recorded inside, also where an operator of PyTorch's library runs, which is below autograd."""
    keys, guard = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with torch.enable_grad(), guard(keys.AutogradFunctionality, False), guard(keys.ADInplaceOrView, False):
        yield


def statistics(call: Call, *operands: torch.Tensor | float) -> dict[str, torch.Tensor]:
    """One number for each row: mean, rstd and variance."""
    _deviation, mean, variance = _moments(call, before(call, operands)[0])
    found = {"mean": mean, "rstd": torch.rsqrt(variance + call.eps), "variance": variance}
    return {name: value.reshape(-1) for name, value in found.items()}


def before(call: Call, operands: Sequence[torch.Tensor | float]) -> tuple[torch.Tensor, list[torch.Tensor | float]]:
    """c, and the operands in the dtype of computation."""
    compute = compute_dtype([call.compute, *(t.dtype for t in operands if isinstance(t, torch.Tensor))])
    wide = [t.to(compute) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in operands]
    return call.prologue(*wide), wide


def _moments(call: Call, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Deviations, mean and variance of the rows; of a norm that is not centred, from zero."""
    rows = c.reshape(c.shape[0], call.groups, -1) if call.norm.rows == GROUPS else c
    dims: tuple[int, ...] = tuple(range(-call.col_dims, 0))
    if call.norm.is_by_channel:
        dims = (2,) if call.norm.rows == GROUPS else (0, *range(2, c.ndim))
    mean = rows.mean(dims, keepdim=True) if call.norm.is_centered else rows.new_zeros(())
    deviation = rows - mean if call.norm.is_centered else rows
    return deviation, mean, deviation.square().mean(dims, keepdim=True)


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


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """The output by PyTorch's operator, for every dtype. In training the running statistics are updated."""
    if input.numel() == 0:
        return of_nothing(input, weight, bias)
    wide, weight, bias, mean, variance = _widened(input, weight, bias, running_mean, running_var)
    cudnn = torch.backends.cudnn.enabled
    output = torch.batch_norm(wide, weight, bias, mean, variance, training, momentum, eps, cudnn)
    if training:
        _write_back((running_mean, running_var), (mean, variance))
    return output.to(input.dtype)


def group_norm(
    input: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if input.numel() == 0:
        return of_nothing(input, weight, bias)
    wide, weight, bias = _widened(input, weight, bias)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias, requires_grad=False)  # without it PyTorch's operator has no gradient
    return torch.group_norm(wide, groups, weight, bias, eps, torch.backends.cudnn.enabled).to(input.dtype)


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """As `batch_norm` in training."""
    if input.numel() == 0:
        return of_nothing(input, weight, bias)
    wide, weight, bias, mean, variance = _widened(input, weight, bias, running_mean, running_var)
    cudnn = torch.backends.cudnn.enabled
    output = torch.instance_norm(wide, weight, bias, mean, variance, True, momentum, eps, cudnn)
    _write_back((running_mean, running_var), (mean, variance))
    return in_format_of(input, output.to(input.dtype))


def in_format_of(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """PyTorch's operator for instance norm returns a contiguous tensor, also where its input is channels_last."""
    if input.ndim not in CHANNELS_LAST or input.is_contiguous():
        return output
    samples, channels, *positions = input.stride()
    is_last = all(outer >= inner > 0 for outer, inner in pairwise((samples, *positions, channels)))
    return output.contiguous(memory_format=CHANNELS_LAST[input.ndim]) if is_last else output


def of_nothing(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Any norm by channel of an input without elements; the parameters get a gradient of zeros."""
    output = input.clone()
    for parameter in (weight, bias):
        if parameter is not None:
            output = output * parameter.view(-1, *(1 for _ in input.shape[2:]))
    return output.to(input.dtype)


def channel_statistics(
    input: torch.Tensor, groups: int, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and rstd of each channel (`groups` is 0), or (N, groups) of each group of channels of each sample."""
    wide = input.detach().to(dtype)
    if wide.ndim == 1:
        wide = wide.view(0, 0)
    if groups:
        wide = wide.unflatten(1, (groups, wide.shape[1] // groups))
    dims = tuple(range(2, wide.ndim)) if groups else (0, *range(2, wide.ndim))
    if wide.numel() == 0:
        mean = variance = wide.mean(dims)  # NaN, without a warning
    else:
        variance, mean = torch.var_mean(wide, dims, correction=0)
    return mean, torch.rsqrt(variance + eps)


def fixed_statistics(
    running_mean: torch.Tensor, running_var: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and rstd of each channel in evaluation."""
    return running_mean.detach().to(dtype, copy=True), torch.rsqrt(running_var.detach().to(dtype) + eps)


def update_running(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: int,
    momentum: float,
) -> None:
    """Average into the running statistics a mean and a biased variance, (C,) or (N, C), each of `count` values."""
    if running_mean is None or running_var is None:
        return
    with torch.no_grad():
        unbiased = count / (count - 1)
        # Not momentum * unbiased: where both change, Inductor keeps an old product, and of a factor makes a wrong alpha
        for running, new in ((running_mean, mean), (running_var, variance * unbiased)):
            new = new.mean(0) if new.ndim == 2 else new
            wide = running.to(compute_dtype([running.dtype, new.dtype]))  # itself, where it is no narrower
            wide.mul_(1 - momentum).add_(new * momentum)
            if wide is not running:
                running.copy_(wide)


def _widened(*tensors: torch.Tensor | None) -> list[Any]:
    """All in one dtype, that of computation."""
    compute = _compute_dtype(*tensors)
    return [None if tensor is None else tensor.to(compute) for tensor in tensors]


def _write_back(buffers: Sequence[torch.Tensor | None], wide: Sequence[torch.Tensor | None]) -> None:
    """What was updated in the dtype of computation is rounded into the user's tensors."""
    with torch.no_grad():
        for buffer, updated in zip(buffers, wide, strict=True):
            if buffer is not None and updated is not None and updated is not buffer:
                buffer.copy_(updated)


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
