"""The norms as functions of what lies on this rank: `batch_norm` of a batch, `layer_norm` and `rms_norm` of a hidden
dimension that the ranks of a process group share. Arguments are those of `warpnorm.functional`, and `group`."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from warpnorm import arguments, functional
from warpnorm.norms import BATCH_NORM, LAYER_NORM, RMS_NORM, Norm
from warpnorm.parallel import exchange, split
from warpnorm.problem import COLUMN, FULL, Call, compute_dtype
from warpnorm.reference import Affine, Itself

Shape = int | Sequence[int]


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    group: Any = None,
) -> torch.Tensor:
    """`warpnorm.batch_norm` of the batch that all ranks of `group` hold together (None: all ranks), each a part of any size,
    or nothing. In training one collective forward, and one backward where an input needs a gradient; the running
    statistics become those of the whole batch, the same on all ranks, once the exchange has succeeded. The gradients of
    weight and bias are those of this rank's part, which data parallel training reduces."""
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        return handle_torch_function(
            batch_norm, (input, running_mean, running_var, weight, bias), input, running_mean, running_var, weight, bias,
            training, momentum, eps, group=group,
        )  # fmt: skip
    if not training or exchange.world_size(group) == 1:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[return-value]
    name = "batch_norm"
    channels = arguments.check_channels(name, input)
    training = arguments.check_flag(name, "training", training)
    momentum = arguments.check_number(name, "momentum", momentum)
    eps = arguments.check_batch_eps(name, eps, training)
    arguments.check_vector(name, "weight", weight, input, channels)
    arguments.check_vector(name, "bias", bias, input, channels)
    arguments.check_running(name, running_mean, running_var, input, channels, True)
    mask = (False, True, *[False] * (input.ndim - 2))
    parameters = [p.view(-1, *[1] * (input.ndim - 2)) for p in (weight, bias) if p is not None]
    epilogue = Affine(weight is not None, bias is not None)
    call = Call(
        BATCH_NORM, 1, eps, Itself(), epilogue, (FULL, *[mask] * len(parameters)), (input.dtype,),
        compute_dtype([input.dtype, *(p.dtype for p in parameters)]),
    )  # fmt: skip
    (output,), merged = split.normalize(
        call, [input, *parameters], group, _takes_kernels(BATCH_NORM, input, parameters)
    )
    count = input.numel() // max(channels, 1)
    average(merged, count, running_mean, running_var, momentum, f"input has shape {tuple(input.shape)}")
    return output


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Shape,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    group: Any = None,
) -> torch.Tensor:
    """`warpnorm.layer_norm` over dimensions that the ranks of `group` share (None: all ranks): input, weight and bias are
    this rank's parts, `normalized_shape` is how the input here ends. Parts may differ in size. One collective forward, of
    two numbers for each row, and one backward; gradients of weight and bias are those of this rank's parts, and whole."""
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(
            layer_norm, (input, weight, bias), input, normalized_shape, weight, bias, eps, group=group
        )
    if exchange.world_size(group) == 1:
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)  # type: ignore[return-value]
    return _over_rows(LAYER_NORM, input, normalized_shape, weight, bias, eps, group)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Shape,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    group: Any = None,
) -> torch.Tensor:
    """`warpnorm.rms_norm` over dimensions that the ranks of `group` share, as `layer_norm` here; one number for each row."""
    if has_torch_function_variadic(input, weight):
        return handle_torch_function(rms_norm, (input, weight), input, normalized_shape, weight, eps, group=group)
    if exchange.world_size(group) == 1:
        return functional.rms_norm(input, normalized_shape, weight, eps)  # type: ignore[return-value]
    if eps is None:
        eps = torch.finfo(compute_dtype([getattr(input, "dtype", torch.float32)])).eps
    return _over_rows(RMS_NORM, input, normalized_shape, weight, None, eps, group)


def _over_rows(
    norm: Norm,
    input: torch.Tensor,
    normalized_shape: Shape,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    group: Any,
) -> torch.Tensor:
    arguments.check_input(norm.name, input)
    shape = arguments.resolve_shape(norm.name, input, normalized_shape, None)
    arguments.check_parameter(norm.name, "weight", weight, input, shape)
    arguments.check_parameter(norm.name, "bias", bias, input, shape)
    eps = arguments.check_eps(norm.name, eps)
    parameters = [p for p in (weight, bias) if p is not None]
    call = Call(
        norm, len(shape), eps, Itself(), Affine(weight is not None, bias is not None),
        (FULL, *[COLUMN] * len(parameters)), (input.dtype,), compute_dtype([input.dtype, *(p.dtype for p in parameters)]),
    )  # fmt: skip
    takes = _takes_kernels(norm, input, parameters, prod(shape))
    return split.normalize(call, [input, *parameters], group, takes)[0][0]


def _takes_kernels(norm: Norm, input: torch.Tensor, parameters: Sequence[torch.Tensor], cols: int = 0) -> bool:
    """A compiler sees PyTorch's operators around the exchange."""
    return not torch.compiler.is_compiling() and functional.takes_kernels(norm, input, *parameters, cols=cols)


def average(
    merged: exchange.Merged,
    count: int,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    given: str,
) -> None:
    """Into the running statistics, where given, those of a whole batch, of which `count` values are here. Nobody waits for a
    GPU but where so few are here that there may be too few of all."""
    if count < 2 and not torch.compiler.is_compiling():
        arguments.check_total("batch_norm", "value per channel when training", int(merged.total), given)
        if not int(merged.total):
            return
    if running_mean is None or running_var is None:
        return
    assert merged.mean is not None
    with torch.no_grad():
        unbiased = merged.variance * (merged.total / (merged.total - 1).clamp(min=1.0))
        for running, new in ((running_mean, merged.mean), (running_var, unbiased)):
            wide = running.double() * (1 - momentum) + new * momentum
            running.copy_(wide)
